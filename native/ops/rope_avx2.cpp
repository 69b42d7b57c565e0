#include "simd/declarations.h"
#include "simd/math_avx2.h"

namespace octavo::avx2 {

void rope(float* x, std::int64_t heads, std::int64_t head_dim, std::int64_t rotary_dim, const float* cos,
          const float* sin) {
  const std::int64_t half = rotary_dim / 2, whole = half - half % 8;
  for (std::int64_t h = 0; h < heads; ++h, x += head_dim) {
    for (std::int64_t i = 0; i < whole; i += 8) {
      const __m256 c = _mm256_loadu_ps(cos + i), s = _mm256_loadu_ps(sin + i);
      const __m256 x1 = _mm256_loadu_ps(x + i), x2 = _mm256_loadu_ps(x + half + i);
      _mm256_storeu_ps(x + i, _mm256_fmsub_ps(x1, c, _mm256_mul_ps(x2, s)));
      _mm256_storeu_ps(x + half + i, _mm256_fmadd_ps(x2, c, _mm256_mul_ps(x1, s)));
    }
    for (std::int64_t i = whole; i < half; ++i) {
      const float x1 = x[i], x2 = x[half + i];
      x[i] = scalar::fma_(x1, cos[i], -(x2 * sin[i]));
      x[half + i] = scalar::fma_(x2, cos[i], x1 * sin[i]);
    }
  }
}

}  // namespace octavo::avx2
