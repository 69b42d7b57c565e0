#include "simd/declarations.h"
#include "simd/math_scalar.h"

namespace octavo::scalar {

void rms_norm(const float* x, const float* weight, std::int64_t n, float eps, float* y) {
  float s[16] = {};
  for (std::int64_t i = 0; i < n; ++i) s[i % 16] = fma_(x[i], x[i], s[i % 16]);
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) s[i] += s[i + width];
  }
  const float r = 1.0f / __builtin_sqrtf(s[0] / static_cast<float>(n) + eps);
  for (std::int64_t i = 0; i < n; ++i) y[i] = (x[i] * r) * weight[i];
}

}  // namespace octavo::scalar
