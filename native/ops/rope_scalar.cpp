#include "simd/declarations.h"
#include "simd/math_scalar.h"

namespace octavo::scalar {

void rope(float* x, std::int64_t heads, std::int64_t head_dim, std::int64_t rotary_dim, const float* cos,
          const float* sin) {
  const std::int64_t half = rotary_dim / 2;
  for (std::int64_t h = 0; h < heads; ++h, x += head_dim) {
    for (std::int64_t i = 0; i < half; ++i) {
      const float x1 = x[i], x2 = x[half + i];
      x[i] = fma_(x1, cos[i], -(x2 * sin[i]));
      x[half + i] = fma_(x2, cos[i], x1 * sin[i]);
    }
  }
}

}  // namespace octavo::scalar
