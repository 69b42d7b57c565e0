#include "simd/declarations.h"
#include "simd/math_avx2.h"

namespace octavo::avx2 {

void silu_mul(const float* gate, const float* up, std::int64_t n, float* y) {
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(y + i, _mm256_mul_ps(silu_(_mm256_loadu_ps(gate + i)), _mm256_loadu_ps(up + i)));
  }
  for (; i < n; ++i) y[i] = scalar::silu_(gate[i]) * up[i];
}

void add(const float* a, const float* b, std::int64_t n, float* y) {
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(y + i, _mm256_add_ps(_mm256_loadu_ps(a + i), _mm256_loadu_ps(b + i)));
  for (; i < n; ++i) y[i] = a[i] + b[i];
}

bool all_finite(const float* x, std::int64_t n) {
  const __m256i exponent = _mm256_set1_epi32(0x7f800000);
  __m256i found = _mm256_setzero_si256();
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256i bits = _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(x + i)), exponent);
    found = _mm256_or_si256(found, _mm256_cmpeq_epi32(bits, exponent));
  }
  bool finite = _mm256_testz_si256(found, found) != 0;
  for (; i < n; ++i) finite = finite && (scalar::bits_of(x[i]) & 0x7f800000u) != 0x7f800000u;
  return finite;
}

}  // namespace octavo::avx2
