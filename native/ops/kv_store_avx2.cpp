#include "ops/linear.h"
#include "simd/declarations.h"
#include "simd/math_avx2.h"

namespace octavo::avx2 {
namespace {

// One head of one token: k to column `token` of K [head_dim][16], v to row `token` of V [16][head_dim].
// Returns false when a stored value is not finite.
bool store_head(const float* k, const float* v, std::int64_t head_dim, std::int64_t token, std::uint16_t* keys) {
  std::uint16_t* values = keys + kBlockTokens * head_dim + token * head_dim;
  keys += token;
  const __m128i exponent = _mm_set1_epi16(0x7c00);
  __m128i found = _mm_setzero_si128();
  for (std::int64_t d = 0; d < head_dim; d += 8) {
    const __m128i hk = _mm256_cvtps_ph(_mm256_loadu_ps(k + d), _MM_FROUND_TO_NEAREST_INT);
    const __m128i hv = _mm256_cvtps_ph(_mm256_loadu_ps(v + d), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(values + d), hv);
    alignas(16) std::uint16_t column[8];
    _mm_store_si128(reinterpret_cast<__m128i*>(column), hk);
    for (int i = 0; i < 8; ++i) keys[(d + i) * kBlockTokens] = column[i];
    found = _mm_or_si128(found, _mm_cmpeq_epi16(_mm_and_si128(hk, exponent), exponent));
    found = _mm_or_si128(found, _mm_cmpeq_epi16(_mm_and_si128(hv, exponent), exponent));
  }
  return _mm_testz_si128(found, found) != 0;
}

bool store_head(const float* k, const float* v, std::int64_t head_dim, std::int64_t token, float* keys) {
  float* values = keys + kBlockTokens * head_dim + token * head_dim;
  for (std::int64_t d = 0; d < head_dim; ++d) keys[d * kBlockTokens + token] = k[d];
  std::memcpy(values, v, static_cast<std::size_t>(head_dim) * sizeof(float));
  return avx2::all_finite(k, head_dim) && avx2::all_finite(v, head_dim);
}

// One vector to int8, its eight elements from d on to put(d, eight bytes). Returns its scale.
template <class Put>
float quantise(const float* x, std::int64_t head_dim, Put put) {
  __m256i largest = _mm256_setzero_si256();  // bits of |x| order like |x|, with infinity and NaN above all
  for (std::int64_t d = 0; d < head_dim; d += 8) {
    const __m256i magnitude =
        _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(x + d)), _mm256_set1_epi32(0x7fffffff));
    largest = _mm256_max_epi32(largest, magnitude);
  }
  __m128i top = _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
  top = _mm_max_epi32(top, _mm_shuffle_epi32(top, 0x4e));
  top = _mm_max_epi32(top, _mm_shuffle_epi32(top, 0xb1));
  const auto bits = static_cast<std::uint32_t>(_mm_cvtsi128_si32(top));
  const float amax = scalar::float_of(bits);
  const bool finite = bits < 0x7f800000u, stored = finite && amax >= kTinyBlock;
  if (!stored) {
    for (std::int64_t d = 0; d < head_dim; d += 8) put(d, 0);
    return finite ? 0.0f : scalar::nan_();
  }
  const __m256 inverse = set_(127.0f / amax);
  for (std::int64_t d = 0; d < head_dim; d += 8) {
    // To nearest even: the float environment of a step.
    const __m256i q = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + d), inverse));
    const __m128i q16 = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
    put(d, static_cast<std::uint64_t>(_mm_cvtsi128_si64(_mm_packs_epi16(q16, q16))));
  }
  return amax / 127.0f;
}

bool store_head(const float* k, const float* v, std::int64_t head_dim, std::int64_t token, std::int8_t* keys) {
  const std::int64_t data = kBlockTokens * head_dim;
  std::int8_t* values = keys + data + kBlockTokens * 4;
  const float scale_k = quantise(k, head_dim, [&](std::int64_t d, std::uint64_t eight) {
    std::int8_t* column = keys + d * kBlockTokens + token;
    for (int i = 0; i < 8; ++i) column[i * kBlockTokens] = static_cast<std::int8_t>(eight >> (8 * i));
  });
  const float scale_v = quantise(v, head_dim, [&](std::int64_t d, std::uint64_t eight) {
    std::memcpy(values + token * head_dim + d, &eight, sizeof eight);
  });
  std::memcpy(keys + data + token * 4, &scale_k, sizeof scale_k);
  std::memcpy(values + data + token * 4, &scale_v, sizeof scale_v);
  return scale_k == scale_k && scale_v == scale_v;
}

template <class T>
void store(const KVStoreJob& job, std::int64_t sequence, std::int64_t row_begin, std::int64_t row_end) {
  const KVLayout& layout = job.layout;
  const SequenceRows& rows = job.sequences[sequence];
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    const std::int64_t position = rows.first_position + row - rows.row_begin;
    std::byte* keys =
        job.pool + rows.block_table[position / kBlockTokens] * layout.block_bytes() + job.layer * layout.layer_bytes();
    bool finite = true;
    for (std::int64_t h = 0; h < layout.kv_heads; ++h, keys += layout.head_bytes()) {
      const std::int64_t column = row * job.stride + h * layout.head_dim;
      finite = store_head(job.k + column, job.v + column, layout.head_dim, position % kBlockTokens,
                          reinterpret_cast<T*>(keys)) &&
               finite;
    }
    if (!finite) job.finite[row] = 0;
  }
}

}  // namespace

void kv_store(const KVStoreJob& job, std::int64_t sequence, std::int64_t row_begin, std::int64_t row_end) {
  if (job.layout.type == KVType::F32) {
    store<float>(job, sequence, row_begin, row_end);
  } else if (job.layout.head_dim % 8 != 0) {
    scalar::kv_store(job, sequence, row_begin, row_end);
  } else if (job.layout.type == KVType::F16) {
    store<std::uint16_t>(job, sequence, row_begin, row_end);
  } else {
    store<std::int8_t>(job, sequence, row_begin, row_end);
  }
}

}  // namespace octavo::avx2
