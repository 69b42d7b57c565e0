// Half precision in portable code, equal bit for bit to the F16C instructions (round to nearest even, denormals kept,
// NaN payloads truncated and quieted). Functions are static: a copy compiled for AVX2 must never be linked into code
// that runs on any CPU.
#pragma once
#include <cstdint>
#include <cstring>

namespace octavo {

[[maybe_unused]] static inline std::uint32_t float_bits(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

[[maybe_unused]] static inline float bits_float(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Both conversions compute every case and select, so that loops over them are vectorised.
[[maybe_unused]] static inline float half_to_float(std::uint16_t h) {
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000u) << 16;
  const std::uint32_t rest = h & 0x7fffu;
  // The exponent is 112 too small; the exact product puts it right, for denormals too.
  const std::uint32_t finite = float_bits(bits_float(rest << 13) * 0x1p112f);
  const std::uint32_t other = 0x7f800000u | rest << 13 | (rest > 0x7c00u ? 0x400000u : 0u);
  return bits_float(sign | (rest >= 0x7c00u ? other : finite));
}

[[maybe_unused]] static inline std::uint16_t float_to_half(float x) {
  const std::uint32_t bits = float_bits(x);
  const std::uint32_t sign = bits >> 16 & 0x8000u;
  const std::uint32_t rest = bits & 0x7fffffffu;
  const std::uint32_t normal = (rest - 0x38000000u + 0xfffu + (rest >> 13 & 1u)) >> 13;
  // Below 2^-14: a ulp of 0.5 is 2^-24, so this addition rounds to a half's denormals.
  const std::uint32_t denormal = float_bits(bits_float(rest) + 0.5f) - 0x3f000000u;
  const std::uint32_t nan = 0x7e00u | (rest >> 13 & 0x1ffu);
  std::uint32_t half = rest < 0x38800000u ? denormal : normal;
  half = rest >= 0x47800000u ? 0x7c00u : half;  // 65,536 and more
  half = rest > 0x7f800000u ? nan : half;
  return static_cast<std::uint16_t>(sign | half);
}

[[maybe_unused]] static inline float bf16_to_float(std::uint16_t h) {
  return bits_float(static_cast<std::uint32_t>(h) << 16);
}

}  // namespace octavo
