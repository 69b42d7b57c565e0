#include "simd/declarations.h"
#include "simd/math_avx2.h"
#include "simd/sum_avx2.h"

namespace octavo::avx2 {

void rms_norm(const float* x, const float* weight, std::int64_t n, float eps, float* y) {
  const std::int64_t whole = n - n % 16;
  __m256 low = _mm256_setzero_ps(), high = low;  // the 16 partial sums
  for (std::int64_t i = 0; i < whole; i += 16) {
    const __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + i + 8);
    low = _mm256_fmadd_ps(a, a, low);
    high = _mm256_fmadd_ps(b, b, high);
  }
  if (whole < n) {  // padding with zeros changes no partial sum: none is -0
    float tail[16] = {};
    for (std::int64_t i = whole; i < n; ++i) tail[i - whole] = x[i];
    const __m256 a = _mm256_loadu_ps(tail), b = _mm256_loadu_ps(tail + 8);
    low = _mm256_fmadd_ps(a, a, low);
    high = _mm256_fmadd_ps(b, b, high);
  }
  const float r = 1.0f / __builtin_sqrtf(tree_sum(low, high) / static_cast<float>(n) + eps);
  const __m256 rs = set_(r);
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(y + i, _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(x + i), rs), _mm256_loadu_ps(weight + i)));
  }
  for (; i < n; ++i) y[i] = (x[i] * r) * weight[i];
}

}  // namespace octavo::avx2
