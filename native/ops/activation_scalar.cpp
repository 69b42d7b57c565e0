#include "simd/declarations.h"
#include "simd/math_scalar.h"

namespace octavo::scalar {

void silu_mul(const float* gate, const float* up, std::int64_t n, float* y) {
  for (std::int64_t i = 0; i < n; ++i) y[i] = silu_(gate[i]) * up[i];
}

void add(const float* a, const float* b, std::int64_t n, float* y) {
  for (std::int64_t i = 0; i < n; ++i) y[i] = a[i] + b[i];
}

bool all_finite(const float* x, std::int64_t n) {
  std::uint32_t found = 0;
  for (std::int64_t i = 0; i < n; ++i) found |= (bits_of(x[i]) & 0x7f800000u) == 0x7f800000u;
  return found == 0;
}

}  // namespace octavo::scalar
