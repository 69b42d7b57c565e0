// Half precision in portable code: exact where it can be, and the hardware's bits everywhere.
#include <algorithm>
#include <cmath>

#include "check.h"
#include "formats/fp16.h"
#include "simd/kernels.h"

using namespace octavo;

namespace {

#if defined(__x86_64__)
using Halves = short __attribute__((vector_size(16)));
using Floats = float __attribute__((vector_size(16)));
[[gnu::target("avx,f16c")]] float hardware_to_float(std::uint16_t h) {
  return __builtin_ia32_vcvtph2ps(Halves{static_cast<short>(h)})[0];
}
[[gnu::target("avx,f16c")]] std::uint16_t hardware_to_half(float x) {
  return static_cast<std::uint16_t>(__builtin_ia32_vcvtps2ph(Floats{x}, 0)[0]);
}
#endif

double value_of_half(std::uint32_t h) {  // finite ones, by the definition of binary16
  const int exponent = static_cast<int>(h >> 10 & 31), fraction = static_cast<int>(h & 1023);
  const double magnitude = std::ldexp(exponent == 0 ? fraction : 1024 + fraction, std::max(1, exponent) - 25);
  return h >> 15 != 0 ? -magnitude : magnitude;
}

void half_precision_round_trips_and_equals_the_hardware() {
  for (std::uint32_t h = 0; h < 65536; ++h) {
    const float x = half_to_float(static_cast<std::uint16_t>(h));
    CHECK(std::isfinite(x) == ((h & 0x7c00u) != 0x7c00u));
    if (!std::isnan(x)) CHECK(float_to_half(x) == h);
    if (std::isfinite(x)) CHECK(x == value_of_half(h));
  }
  CHECK(float_to_half(65519.996f) == 0x7bff && float_to_half(65520.0f) == 0x7c00);
  CHECK(float_to_half(0x1p-25f) == 0 && float_to_half(0x1.000002p-25f) == 1 && float_to_half(0x1.8p-24f) == 2);
#if defined(__x86_64__)
  if (!cpu_features().avx2) return;
  for (std::uint32_t h = 0; h < 65536; ++h) {
    const auto half = static_cast<std::uint16_t>(h);
    CHECK(float_bits(half_to_float(half)) == float_bits(hardware_to_float(half)));
  }
  for (std::uint64_t bits = 0; bits < std::uint64_t{1} << 32; bits += 1021) {
    const float x = bits_float(static_cast<std::uint32_t>(bits));
    CHECK(float_to_half(x) == hardware_to_half(x));
  }
#endif
}

}  // namespace

int main() {
  half_precision_round_trips_and_equals_the_hardware();
  return 0;
}
