// linear.h for AVX2 + FMA + F16C. Lanes hold different outputs, so each output's float operations come in the
// canonical order; only the exact integer dot products are summed in an order of our own.
//
// A tile is R rows by P panels; R is 1 where P > 1. With one row the kernel waits for memory, so P panels from distant
// places are read side by side. Accumulators live in registers or, where there are too many, on the stack.
#include <immintrin.h>

#include <cstring>

#include "formats/fp16.h"
#include "simd/declarations.h"
#include "simd/math_avx2.h"

namespace octavo::avx2 {
namespace {

constexpr int kTileRows = 4;
constexpr std::uintptr_t kAheadBytes = 1024;  // how far ahead of its use a stream is fetched

static inline __m256i load_bytes(const std::byte* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
static inline __m256 load_floats(const std::byte* p) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p)); }
static inline __m256 load_halves(const std::byte* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static inline __m256i broadcast4(const std::int8_t* q) {
  std::int32_t four;
  std::memcpy(&four, q, sizeof four);
  return _mm256_set1_epi32(four);
}

// Additions that stay in their order: GCC would otherwise regroup a chain of them and run out of registers.
static inline __m256i in_order(__m256i sum) {
  __asm__("" : "+x"(sum));
  return sum;
}
static inline __m256i add16(__m256i a, __m256i b) { return in_order(_mm256_add_epi16(a, b)); }
static inline __m256i add32(__m256i a, __m256i b) { return in_order(_mm256_add_epi32(a, b)); }

// Cache lines to fetch while a tile is computed: `lines` at each step, from `at` on. An address past the weights is
// harmless to a prefetch, hence an integer rather than a pointer.
struct Ahead {
  std::uintptr_t at;
  std::int64_t lines;

  void fetch() {
    for (std::int64_t i = 0; i < lines; ++i, at += 64) _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T0);
  }
};

template <int R>
using Pair = __m256[R][2];  // [row][outputs 0..7, outputs 8..15]

// Bytes, and cache lines, of a panel's block of 64 inputs, or of one input of a float format.
template <Format F>
constexpr std::int64_t kStep = is_quantised(F) ? block_bytes(F) : step_bytes(F);
template <Format F>
constexpr std::int64_t kLines = (kStep<F> + 63) / 64;

struct Rows {  // quantised, `stride` bytes apart
  const std::byte* at;
  std::int64_t stride, blocks;

  QRow<const std::byte> operator[](int r) const { return {at + r * stride, blocks}; }
};

// acc += block b of R rows, q4: dot = sum over groups of multiplier * (nibbles . x) + offset * sum(x). A group's
// integer dot fits 16 bits: 32 / 2 * 15 * 127 = 30,480 at most. Eight outputs after the other, for want of registers.
template <int R>
[[gnu::always_inline]] inline void add_q4_block(const std::byte* quants, const std::byte* terms, Rows x, std::int64_t b,
                                                Pair<R>& acc) {
  const __m256i nibble = _mm256_set1_epi8(15);
  // Output o's multiplier in both halves of dword o; the same for the outputs 8..15.
  const __m256i halves = _mm256_setr_epi8(0, -1, 0, -1, 1, -1, 1, -1, 2, -1, 2, -1, 3, -1, 3, -1, 4, -1, 4, -1, 5, -1,
                                          5, -1, 6, -1, 6, -1, 7, -1, 7, -1);
#pragma GCC unroll 2
  for (int c = 0; c < 2; ++c) {
    const __m128i offset0 = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(terms + kOffsetsAt + 8 * c));
    const __m128i offset1 = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(terms + kOffsetsAt + kPanel + 8 * c));
    const __m256i offsets = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(offset0, offset1));
    __m256i sums[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      std::int32_t of_groups;
      std::memcpy(&of_groups, x[r].sums() + b, sizeof of_groups);
      sums[r] = _mm256_madd_epi16(offsets, _mm256_set1_epi32(of_groups));
    }
#pragma GCC unroll 2
    for (int g = 0; g < 2; ++g) {
      __m256i dots[R];
#pragma GCC unroll 4
      for (int v = 4 * g; v < 4 * g + 4; ++v) {
        const __m256i both = load_bytes(quants + 64 * v + 32 * c);
        const __m256i low = _mm256_and_si256(both, nibble);
        const __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const std::int8_t* q = x[r].q() + b * kBlock + 8 * v;
          const __m256i dot = _mm256_maddubs_epi16(low, broadcast4(q));
          dots[r] = v == 4 * g ? dot : add16(dots[r], dot);
          dots[r] = add16(dots[r], _mm256_maddubs_epi16(high, broadcast4(q + 4)));
        }
      }
      const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(terms + kPanel * g + 8 * c));
      const __m256i multiplier = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(eight), halves);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sums[r] = add32(sums[r], _mm256_madd_epi16(dots[r], multiplier));
    }
    const __m256 scale = load_halves(terms + kQ4ScalesAt + 16 * c);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m256 d = _mm256_mul_ps(scale, _mm256_set1_ps(x[r].scales()[b]));
      acc[r][c] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[r]), d, acc[r][c]);
    }
  }
}

// The same for q8. |w| <= 128 as an unsigned byte times x with w's sign: a pair is 2 * 128 * 127 = 32,512 at most.
template <int R>
[[gnu::always_inline]] inline void add_q8_block(const std::byte* quants, const std::byte* terms, Rows x, std::int64_t b,
                                                Pair<R>& acc) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i dots[R][2];
#pragma GCC unroll 16
  for (int s = 0; s < 16; ++s) {
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) {
      const __m256i w = load_bytes(quants + 64 * s + 32 * c);
      const __m256i magnitude = _mm256_abs_epi8(w);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const __m256i q = _mm256_sign_epi8(broadcast4(x[r].q() + b * kBlock + 4 * s), w);
        const __m256i dot = _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, q), ones);
        dots[r][c] = s == 0 ? dot : add32(dots[r][c], dot);
      }
    }
  }
#pragma GCC unroll 2
  for (int c = 0; c < 2; ++c) {
    const __m256 scale = load_halves(terms + 16 * c);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m256 d = _mm256_mul_ps(scale, _mm256_set1_ps(x[r].scales()[b]));
      acc[r][c] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[r][c]), d, acc[r][c]);
    }
  }
}

template <Format F>
static inline __m256 load_weights(const std::byte* p) {  // eight outputs of a float format
  if constexpr (F == Format::F32) {
    return load_floats(p);
  } else if constexpr (F == Format::F16) {
    return load_halves(p);
  } else {
    const __m128i bf16 = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bf16), 16));
  }
}

template <Format F, int R>
[[gnu::always_inline]] inline void add_input(const std::byte* step, const float* x, std::int64_t x_stride,
                                             Pair<R>& acc) {
  const __m256 w0 = load_weights<F>(step), w1 = load_weights<F>(step + step_bytes(F) / 2);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const __m256 value = _mm256_set1_ps(x[r * x_stride]);
    acc[r][0] = _mm256_fmadd_ps(w0, value, acc[r][0]);
    acc[r][1] = _mm256_fmadd_ps(w1, value, acc[r][1]);
  }
}

// y = residual + acc or acc, for the 16 or fewer outputs of a panel that exist.
static inline void store_outputs(const LinearJob& job, std::int64_t row, std::int64_t first, const __m256 (&acc)[2]) {
  const bool add = job.epilogue == Epilogue::Add;
  float* y = job.y + row * job.y_stride + first;
  const float* residual = add ? job.residual + row * job.y_stride + first : nullptr;
  if (first + kPanel <= job.w->n) {
    for (int c = 0; c < 2; ++c) {
      _mm256_storeu_ps(y + 8 * c, add ? _mm256_add_ps(_mm256_loadu_ps(residual + 8 * c), acc[c]) : acc[c]);
    }
    return;
  }
  float values[kPanel];
  for (int c = 0; c < 2; ++c) _mm256_storeu_ps(values + 8 * c, acc[c]);
  for (std::int64_t o = 0; first + o < job.w->n; ++o) y[o] = add ? residual[o] + values[o] : values[o];
}

// Not inlined, and by value: else each tile carries a copy, and accumulators whose address is taken live in memory.
[[gnu::noinline]] void finish(const LinearJob& job, std::int64_t row, std::int64_t panel, __m256 sum0, __m256 sum1) {
  __m256 acc[2] = {sum0, sum1};
  if (job.bias != nullptr) {
    for (int c = 0; c < 2; ++c) acc[c] = _mm256_add_ps(acc[c], _mm256_loadu_ps(job.bias + panel * kPanel + 8 * c));
  }
  if (job.epilogue != Epilogue::SiluMul) return store_outputs(job, row, panel * kPanel, acc);
  float values[8];
  _mm256_storeu_ps(values, _mm256_mul_ps(silu_(acc[0]), acc[1]));
  const std::int64_t first = panel * 8, count = job.w->n / 2 - first;
  const std::size_t present = static_cast<std::size_t>(count < 8 ? count : 8);
  std::memcpy(job.y + row * job.y_stride + first, values, sizeof(float) * present);
}

// Rows row .. row + R - 1 of panels panel, panel + apart, ... (P of them).
template <Format F, int R, int P>
void tile(const LinearJob& job, std::int64_t row, std::int64_t panel, std::int64_t apart, Ahead ahead) {
  const Weight& w = *job.w;
  const std::byte* first = w.panel(panel);
  const std::int64_t apart_bytes = apart * w.panel_bytes();
  __m256 acc[P][R][2];
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) acc[p][r][0] = acc[p][r][1] = _mm256_setzero_ps();
  }
  const std::int64_t steps = is_quantised(F) ? w.blocks() : w.k;
  for (std::int64_t i = 0; i < steps; ++i) {
    if constexpr (P == 1) ahead.fetch();
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      const std::byte* step = first + p * apart_bytes + i * kStep<F>;
      if constexpr (P > 1) Ahead{reinterpret_cast<std::uintptr_t>(step) + kAheadBytes, kLines<F>}.fetch();
      if constexpr (is_quantised(F)) {
        const Rows x{job.row(row).at, q_row_bytes(steps), steps};
        if constexpr (F == Format::Q8) {
          add_q8_block<R>(step, step + quants_bytes(F), x, i, acc[p]);
        } else {
          add_q4_block<R>(step, step + quants_bytes(F), x, i, acc[p]);
        }
      } else {
        add_input<F, R>(step, job.x + row * job.x_stride + i, job.x_stride, acc[p]);
      }
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) finish(job, row + r, panel + p * apart, acc[p][r][0], acc[p][r][1]);
  }
}

template <Format F>
void one_row(const LinearJob& job, std::int64_t panel_begin, std::int64_t panel_end) {
  constexpr int kStreams = F == Format::Q8 ? 4 : 2;
  const std::int64_t apart = (panel_end - panel_begin) / kStreams;
  for (std::int64_t p = 0; p < apart; ++p) tile<F, 1, kStreams>(job, 0, panel_begin + p, apart, {0, 0});
  for (std::int64_t p = panel_begin + kStreams * apart; p < panel_end; ++p) tile<F, 1, 1>(job, 0, p, 0, {0, 0});
}

// What tile t of a panel's `tiles` fetches: a single one, its own panel a little ahead; else each a share of the next.
template <Format F>
Ahead ahead_of(const Weight& w, std::int64_t panel, std::int64_t t, std::int64_t tiles) {
  const auto here = reinterpret_cast<std::uintptr_t>(w.panel(panel));
  if (tiles == 1) return {here + kAheadBytes, kLines<F>};
  const std::int64_t lines = (kLines<F> + tiles - 1) / tiles;
  const std::int64_t start = t * lines * 64 * (is_quantised(F) ? w.blocks() : w.k);
  if (start >= w.panel_bytes()) return {0, 0};
  return {here + static_cast<std::uintptr_t>(w.panel_bytes() + start), lines};
}

template <Format F>
void many_rows(const LinearJob& job, std::int64_t panel_begin, std::int64_t panel_end) {
  const std::int64_t tiles = (job.rows + kTileRows - 1) / kTileRows;
  for (std::int64_t panel = panel_begin; panel < panel_end; ++panel) {
    for (std::int64_t t = 0; t < tiles; ++t) {
      const std::int64_t row = t * kTileRows;
      const Ahead ahead = ahead_of<F>(*job.w, panel, t, tiles);
      switch (job.rows - row) {
        case 1:
          tile<F, 1, 1>(job, row, panel, 0, ahead);
          break;
        case 2:
          tile<F, 2, 1>(job, row, panel, 0, ahead);
          break;
        case 3:
          tile<F, 3, 1>(job, row, panel, 0, ahead);
          break;
        default:
          tile<F, 4, 1>(job, row, panel, 0, ahead);
      }
    }
  }
}

template <Format F>
void linear_in(const LinearJob& job, std::int64_t panel_begin, std::int64_t panel_end) {
  if (job.rows == 1) {
    one_row<F>(job, panel_begin, panel_end);
  } else {
    many_rows<F>(job, panel_begin, panel_end);
  }
}

static inline std::int32_t sum_lanes(__m256i v) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

static inline std::uint32_t max_lanes(__m256i v) {
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  return static_cast<std::uint32_t>(_mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1))));
}

static inline void quantize_block(const float* x, std::int64_t b, QRow<std::byte> out) {
  __m256 v[8];
  __m256i largest = _mm256_setzero_si256();  // bits of |x| order like |x|, with infinity and NaN above all
  for (int i = 0; i < 8; ++i) {
    v[i] = _mm256_loadu_ps(x + 8 * i);
    const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(v[i]), _mm256_set1_epi32(0x7fffffff));
    largest = _mm256_max_epi32(largest, magnitude);
  }
  const std::uint32_t bits = max_lanes(largest);
  const float amax = bits_float(bits);
  std::int8_t* to = out.q() + b * kBlock;
  if (bits >= 0x7f800000u || amax < kTinyBlock) {
    std::memset(to, 0, kBlock);
    out.scales()[b] = bits >= 0x7f800000u ? bits_float(0x7fc00000u) : 0.0f;
    out.sums()[b] = {};
    out.corrections()[b] = 0;
    return;
  }
  const __m256 inverse = _mm256_set1_ps(127.0f / amax);
  std::int32_t sums[2];
  for (int g = 0; g < 2; ++g) {
    __m256i q[4];
    for (int i = 0; i < 4; ++i) {
      q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[4 * g + i], inverse));  // nearest even: a step's float environment
    }
    sums[g] = sum_lanes(_mm256_add_epi32(_mm256_add_epi32(q[0], q[1]), _mm256_add_epi32(q[2], q[3])));
    // The packs work within 128-bit lanes; the permutation puts the groups of four back in order.
    const __m256i mixed = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + kGroup * g), _mm256_permutevar8x32_epi32(mixed, order));
  }
  out.scales()[b] = amax / 127.0f;
  out.sums()[b] = {{static_cast<std::int16_t>(sums[0]), static_cast<std::int16_t>(sums[1])}};
  out.corrections()[b] = -128 * (sums[0] + sums[1]);
}

// Eight consecutive inputs, 8v .. 8v + 7, of output o of a panel's block.
static inline __m256 unpack_eight(Format format, const std::byte* quants, const std::byte* terms, int o, int v) {
  __m256i q;
  if (format == Format::Q8) {
    std::uint32_t first, second;
    std::memcpy(&first, quants + (2 * v * kPanel + o) * 4, 4);
    std::memcpy(&second, quants + ((2 * v + 1) * kPanel + o) * 4, 4);
    q = _mm256_cvtepi8_epi32(
        _mm_cvtsi64_si128(static_cast<long long>(static_cast<std::uint64_t>(second) << 32 | first)));
  } else {
    std::uint32_t both;
    std::memcpy(&both, quants + (v * kPanel + o) * 4, 4);
    const std::uint64_t bytes = static_cast<std::uint64_t>(both >> 4 & 0x0f0f0f0fu) << 32 | (both & 0x0f0f0f0fu);
    const int multiplier = static_cast<std::uint8_t>(terms[kPanel * (v / 4) + o]);
    const int offset = static_cast<std::int8_t>(terms[kOffsetsAt + kPanel * (v / 4) + o]);
    q = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<long long>(bytes)));
    q = _mm256_add_epi32(_mm256_mullo_epi32(q, _mm256_set1_epi32(multiplier)), _mm256_set1_epi32(offset));
    terms += kQ4ScalesAt;
  }
  std::uint16_t scale;
  std::memcpy(&scale, terms + 2 * o, 2);
  return _mm256_mul_ps(_mm256_cvtepi32_ps(q), _mm256_set1_ps(half_to_float(scale)));
}

}  // namespace

void quantize(const float* x, std::int64_t k, std::byte* out) {
  const QRow<std::byte> row{out, (k + kBlock - 1) / kBlock};
  std::int64_t b = 0;
  for (; k >= kBlock; k -= kBlock, x += kBlock, ++b) quantize_block(x, b, row);
  if (k == 0) return;
  float block[kBlock] = {};
  std::memcpy(block, x, sizeof(float) * static_cast<std::size_t>(k));
  quantize_block(block, b, row);
}

void linear(const LinearJob& job, std::int64_t panel_begin, std::int64_t panel_end) {
  switch (job.w->format) {
    case Format::F32:
      return linear_in<Format::F32>(job, panel_begin, panel_end);
    case Format::F16:
      return linear_in<Format::F16>(job, panel_begin, panel_end);
    case Format::BF16:
      return linear_in<Format::BF16>(job, panel_begin, panel_end);
    case Format::Q8:
      return linear_in<Format::Q8>(job, panel_begin, panel_end);
    case Format::Q4:
      return linear_in<Format::Q4>(job, panel_begin, panel_end);
  }
}

void unpack_row(const Weight& w, std::int64_t row, float* out) {
  if (!is_quantised(w.format)) return scalar::unpack_row(w, row, out);  // 16 values apart: nothing for lanes to do
  const std::byte* panel = w.panel(row / kPanel);
  const int o = static_cast<int>(row % kPanel);
  for (std::int64_t b = 0; b < w.blocks(); ++b) {
    const std::byte* quants = panel + b * block_bytes(w.format);
    const std::byte* terms = quants + quants_bytes(w.format);
    for (int v = 0; v < 8 && b * kBlock + 8 * v < w.k; ++v) {
      const __m256 values = unpack_eight(w.format, quants, terms, o, v);
      const std::int64_t first = b * kBlock + 8 * v, left = w.k - first;
      if (left >= 8) {
        _mm256_storeu_ps(out + first, values);
      } else {
        float eight[8];
        _mm256_storeu_ps(eight, values);
        std::memcpy(out + first, eight, sizeof(float) * static_cast<std::size_t>(left));
      }
    }
  }
}

}  // namespace octavo::avx2
