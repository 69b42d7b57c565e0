// Tails go through masked vectors, never through inline functions shared with the scalar file: those must not be
// compiled for AVX2.
#include <immintrin.h>

#include "ops/sample_passes.h"
#include "simd/math_avx2.h"

namespace octavo::avx2 {
namespace {

__m256i iota() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }

// All ones in the lanes that `left` more elements fill.
__m256i lanes(std::int64_t left) {
  const int count = left < 8 ? static_cast<int>(left) : 8;
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), iota());
}

__m256 load(const float* x, __m256i mask, __m256 fill) {
  return _mm256_blendv_ps(fill, _mm256_maskload_ps(x, mask), _mm256_castsi256_ps(mask));
}

__m256i load(const std::uint32_t* x, __m256i mask) {
  return _mm256_maskload_epi32(reinterpret_cast<const int*>(x), mask);
}
__m256i load8(const std::uint32_t* x) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)); }
void store8(std::uint32_t* x, __m256i v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), v); }

float max_lane(__m256 v) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

// Eight 32-bit lanes into u64 sums, four even and four odd.
struct Sum64 {
  __m256i even = _mm256_setzero_si256(), odd = _mm256_setzero_si256();

  void add(__m256i v) {
    even = _mm256_add_epi64(even, _mm256_and_si256(v, _mm256_set1_epi64x(0xffffffff)));
    odd = _mm256_add_epi64(odd, _mm256_srli_epi64(v, 32));
  }
  std::uint64_t total() const {
    alignas(32) std::uint64_t s[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(s), _mm256_add_epi64(even, odd));
    return s[0] + s[1] + s[2] + s[3];
  }
};

float row_max(const float* x, std::int64_t n, bool* finite) {
  const __m256 lowest = _mm256_set1_ps(-__builtin_inff());
  const __m256 zero = _mm256_setzero_ps();
  __m256 max[4] = {lowest, lowest, lowest, lowest};
  __m256 bad = zero;  // x - x is NaN where x is not finite, else +0
  std::int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    __m256 v[4];
    for (int j = 0; j < 4; ++j) v[j] = _mm256_loadu_ps(x + i + 8 * j);
    for (int j = 0; j < 4; ++j) max[j] = _mm256_max_ps(v[j], max[j]);
    for (int j = 0; j < 4; ++j) bad = _mm256_or_ps(bad, _mm256_sub_ps(v[j], v[j]));
  }
  for (; i < n; i += 8) {
    const __m256i mask = lanes(n - i);
    const __m256 v = load(x + i, mask, lowest), here = load(x + i, mask, zero);
    max[0] = _mm256_max_ps(v, max[0]);
    bad = _mm256_or_ps(bad, _mm256_sub_ps(here, here));
  }
  *finite = _mm256_testz_si256(_mm256_castps_si256(bad), _mm256_castps_si256(bad)) != 0;
  return max_lane(_mm256_max_ps(_mm256_max_ps(max[0], max[1]), _mm256_max_ps(max[2], max[3]))) + 0.0f;
}

std::int64_t find_first(const float* x, std::int64_t n, float value) {
  const __m256 wanted = _mm256_set1_ps(value);
  for (std::int64_t i = 0; i < n; i += 8) {
    const __m256i mask = lanes(n - i);
    const __m256 equal = _mm256_cmp_ps(_mm256_maskload_ps(x + i, mask), wanted, _CMP_EQ_OQ);
    const int bits = _mm256_movemask_ps(_mm256_and_ps(equal, _mm256_castsi256_ps(mask)));
    if (bits != 0) return i + __builtin_ctz(static_cast<unsigned>(bits));
  }
  return n;
}

std::int64_t count_greater(const float* x, std::int64_t n, float value) {
  const __m256 bound = _mm256_set1_ps(value);
  __m256i count = _mm256_setzero_si256();
  for (std::int64_t i = 0; i < n; i += 8) {
    const __m256i mask = lanes(n - i);
    const __m256 greater = _mm256_cmp_ps(_mm256_maskload_ps(x + i, mask), bound, _CMP_GT_OQ);
    count = _mm256_sub_epi32(count, _mm256_and_si256(_mm256_castps_si256(greater), mask));
  }
  Sum64 sum;
  sum.add(count);
  return static_cast<std::int64_t>(sum.total());
}

void block_max(const float* x, std::int64_t n, float* maxima) {
  const __m256 lowest = _mm256_set1_ps(-__builtin_inff());
  for (std::int64_t begin = 0; begin < n; begin += kMaximaBlock) {
    __m256 max = lowest;
    const std::int64_t end = begin + kMaximaBlock < n ? begin + kMaximaBlock : n;
    for (std::int64_t i = begin; i < end; i += 8) max = _mm256_max_ps(load(x + i, lanes(end - i), lowest), max);
    *maxima++ = max_lane(max);
  }
}

float sum_exp(const float* x, std::int64_t n, float max) {
  const __m256 maximum = _mm256_set1_ps(max);
  float total = 0.0f;
  for (std::int64_t begin = 0; begin < n; begin += kSumSegment) {
    const std::int64_t end = begin + kSumSegment < n ? begin + kSumSegment : n;
    __m256 low = _mm256_setzero_ps(), high = _mm256_setzero_ps();  // partial sums 0..7 and 8..15
    std::int64_t i = begin;
    for (; i + 16 <= end; i += 16) {
      low = _mm256_add_ps(low, exp_(_mm256_sub_ps(_mm256_loadu_ps(x + i), maximum)));
      high = _mm256_add_ps(high, exp_(_mm256_sub_ps(_mm256_loadu_ps(x + i + 8), maximum)));
    }
    for (bool first = true; i < end; i += 8, first = false) {
      const __m256i mask = lanes(end - i);
      const __m256 e = exp_(_mm256_sub_ps(load(x + i, mask, maximum), maximum));
      __m256& sum = first ? low : high;
      sum = _mm256_add_ps(sum, _mm256_and_ps(e, _mm256_castsi256_ps(mask)));  // + 0 leaves a sum >= 0 as it is
    }
    const __m256 eight = _mm256_add_ps(low, high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    total += _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  return total;
}

std::uint64_t weights(const float* x, std::int64_t n, float max, float temperature, std::uint32_t smallest,
                      std::uint32_t* w) {
  const __m256 maximum = _mm256_set1_ps(max), t = _mm256_set1_ps(temperature);
  const __m256 floor = _mm256_set1_ps(-22.0f), one = _mm256_set1_ps(static_cast<float>(kWeightOne));
  const __m256i below = _mm256_set1_epi32(static_cast<int>(smallest) - 1);
  Sum64 sum;
  const auto weigh = [&](__m256 v) {
    const __m256 z = _mm256_max_ps(_mm256_div_ps(_mm256_sub_ps(v, maximum), t), floor);
    const __m256i weight = _mm256_cvtps_epi32(_mm256_mul_ps(exp_(z), one));
    const __m256i kept = _mm256_and_si256(weight, _mm256_cmpgt_epi32(weight, below));
    sum.add(kept);
    return kept;
  };
  std::int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m256i first = weigh(_mm256_loadu_ps(x + i)), second = weigh(_mm256_loadu_ps(x + i + 8));
    store8(w + i, first);
    store8(w + i + 8, second);
  }
  for (; i < n; i += 8) {
    const __m256i mask = lanes(n - i);
    const __m256i kept = weigh(load(x + i, mask, _mm256_set1_ps(-__builtin_inff())));
    _mm256_maskstore_epi32(reinterpret_cast<int*>(w + i), mask, kept);
  }
  return sum.total();
}

void typical_logs(const std::uint32_t* w, std::int64_t n, std::uint32_t* logs) {
  for (std::int64_t i = 0; i < n; i += 8) {
    const __m256i mask = lanes(n - i);
    const __m256i weight = _mm256_max_epi32(load(w + i, mask), _mm256_set1_epi32(1));
    const __m256 scaled = _mm256_mul_ps(log_(_mm256_cvtepi32_ps(weight)), _mm256_set1_ps(kTypicalScale));
    const __m256i fixed = _mm256_max_epi32(_mm256_cvtps_epi32(scaled), _mm256_setzero_si256());
    _mm256_maskstore_epi32(reinterpret_cast<int*>(logs + i), mask, fixed);
  }
}

Tally tally(const std::uint32_t* keys, const std::uint32_t* values, std::int64_t n, std::uint32_t low) {
  const __m256i below = _mm256_set1_epi32(static_cast<int>(low) - 1);
  __m256i count = _mm256_setzero_si256();
  Sum64 sum;
  const auto add = [&](__m256i in, __m256i value) {
    count = _mm256_sub_epi32(count, in);
    sum.add(_mm256_and_si256(value, in));
  };
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8) add(_mm256_cmpgt_epi32(load8(keys + i), below), load8(values + i));
  if (i < n) {
    const __m256i mask = lanes(n - i);
    add(_mm256_and_si256(_mm256_cmpgt_epi32(load(keys + i, mask), below), mask), load(values + i, mask));
  }
  Sum64 counts;
  counts.add(count);
  return {counts.total(), sum.total()};
}

// For each of 256 lane masks, the lanes that are set, in order, one a byte.
struct CompactTable {
  std::uint64_t order[256] = {};
  constexpr CompactTable() {
    for (unsigned mask = 0; mask < 256; ++mask) {
      int at = 0;
      for (unsigned lane = 0; lane < 8; ++lane)
        if (mask >> lane & 1u) order[mask] |= static_cast<std::uint64_t>(lane) << (8 * at++);
    }
  }
};
constexpr CompactTable kCompact;

// What goes to b_out: positions, or the elements of b.
struct Positions {
  __m256i full(std::int64_t i) const { return _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(i)), iota()); }
  __m256i part(std::int64_t i, __m256i) const { return full(i); }
};
struct Elements {
  const std::uint32_t* b;
  __m256i full(std::int64_t i) const { return load8(b + i); }
  __m256i part(std::int64_t i, __m256i mask) const { return load(b + i, mask); }
};

template <class Second>
std::int64_t compact_with(const std::uint32_t* keys, std::int64_t n, std::uint32_t low, std::uint32_t high,
                          const std::uint32_t* a, std::uint32_t* a_out, std::uint32_t* b_out, Second second) {
  const __m256i below = _mm256_set1_epi32(static_cast<int>(low) - 1);
  const __m256i above = _mm256_set1_epi32(static_cast<int>(high));
  std::int64_t kept = 0;
  const auto put = [&](__m256i key, __m256i mask, __m256i first, __m256i other) {
    const __m256i in = _mm256_and_si256(_mm256_cmpgt_epi32(key, below), _mm256_cmpgt_epi32(above, key));
    const auto bits = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_and_si256(in, mask))));
    const __m256i order = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<long long>(kCompact.order[bits])));
    store8(a_out + kept, _mm256_permutevar8x32_epi32(first, order));
    if (b_out != nullptr) store8(b_out + kept, _mm256_permutevar8x32_epi32(other, order));
    kept += __builtin_popcount(bits);
  };
  // All loads of a step come before its stores: outputs may be inputs.
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8) put(load8(keys + i), _mm256_set1_epi32(-1), load8(a + i), second.full(i));
  if (i < n) {
    const __m256i mask = lanes(n - i);
    put(load(keys + i, mask), mask, load(a + i, mask), second.part(i, mask));
  }
  return kept;
}

std::int64_t compact(const std::uint32_t* keys, std::int64_t n, std::uint32_t low, std::uint32_t high,
                     const std::uint32_t* a, std::uint32_t* a_out, const std::uint32_t* b, std::uint32_t* b_out) {
  if (b_out == nullptr || b == nullptr) return compact_with(keys, n, low, high, a, a_out, b_out, Positions{});
  return compact_with(keys, n, low, high, a, a_out, b_out, Elements{b});
}

constexpr SamplePasses kPasses = {row_max, find_first,   count_greater, block_max, sum_exp,
                                  weights, typical_logs, tally,         compact};

}  // namespace

const SamplePasses& sample_passes() { return kPasses; }

void sample_row(const SampleRow& row, SampleScratch& scratch, SampleResult& result) {
  sample_row_with(kPasses, row, scratch, result);
}

}  // namespace octavo::avx2
