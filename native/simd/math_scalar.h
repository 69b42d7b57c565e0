// exp, log, tanh and silu in float: the specification. math_avx2.h gives the same bits for every input.
//
// Nothing here calls libm (fma is exact by definition, so any implementation of it will do). Every NaN that comes out
// is the quiet NaN 0x7fc00000. Largest errors found over all floats are held in tests/test_math.cpp (all under 2 ulp).
// Functions are `static` because a file compiled for AVX2 that includes this header must keep its copies to itself.
#pragma once
#include <cstdint>
#include <cstring>

namespace octavo::math {

// Shared by every instruction set, so that there is one set of digits.
inline constexpr float kLog2E = 0x1.715476p+0f;
inline constexpr float kLn2High = 0x1.62e400p-1f;  // 15 bits: n * kLn2High is exact for |n| < 512
inline constexpr float kLn2Low = 0x1.7f7d1cp-20f;
inline constexpr float kRoundMagic = 0x1.8p+23f;   // x + this - this rounds |x| < 2^22 to an integer, ties to even
inline constexpr float kExpHigh = 0x1.62e42ep+6f;  // the largest float whose exp is finite
inline constexpr float kExpLow = -0x1.5d589ep+6f;  // the smallest float whose exp is at least 2^-126
inline constexpr float kExp[5] = {0x1.fffffcp-2f, 0x1.555490p-3f, 0x1.5558f4p-5f, 0x1.123a36p-7f, 0x1.6a23a8p-10f};
inline constexpr std::uint32_t kSqrtHalfBits = 0x3f3504f3;
inline constexpr float kLog[10] = {-0.5f,          0x1.555548p-2f,  -0x1.000006p-2f, 0x1.99a4b6p-3f,  -0x1.555c4ep-3f,
                                   0x1.233768p-3f, -0x1.fc2208p-4f, 0x1.e6f06ap-4f,  -0x1.de3c16p-4f, 0x1.1457a6p-4f};
inline constexpr float kTanhSmall = 0.625f;
inline constexpr float kTanh[5] = {-0x1.555532p-2f, 0x1.110726p-3f, -0x1.b83c5ap-5f, 0x1.522696p-6f, -0x1.75e1ccp-8f};

}  // namespace octavo::math

namespace octavo::scalar {

static inline std::uint32_t bits_of(float x) {
  std::uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
}
static inline float float_of(std::uint32_t u) {
  float x;
  std::memcpy(&x, &u, sizeof x);
  return x;
}
static inline float fma_(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline float nan_() { return float_of(0x7fc00000u); }
static inline float infinity_() { return float_of(0x7f800000u); }

// e^x. Results under 2^-126 are flushed to +0; exp_(-inf) = +0, exp_(+inf) = +inf.
// x = n ln 2 + r with |r| <= ln 2 / 2; e^r = 1 + (r + r^2 P(r)); the exponent is added as an integer.
static inline float exp_(float x) {
  using namespace math;
  if (x != x) return nan_();
  if (x > kExpHigh) return infinity_();
  if (x < kExpLow) return 0.0f;
  const float shifted = fma_(x, kLog2E, kRoundMagic);
  const float n = shifted - kRoundMagic;
  float r = fma_(n, -kLn2High, x);
  r = fma_(n, -kLn2Low, r);
  float p = fma_(kExp[4], r, kExp[3]);
  p = fma_(p, r, kExp[2]);
  p = fma_(p, r, kExp[1]);
  p = fma_(p, r, kExp[0]);
  const float y = fma_(r * r, p, r) + 1.0f;
  return float_of(bits_of(y) + ((bits_of(shifted) - bits_of(kRoundMagic)) << 23));
}

// Natural logarithm. log_(±0) = -inf, log_(+inf) = +inf, negative: NaN.
// x = 2^e m with m in [sqrt(1/2), sqrt(2)); f = m - 1 is exact; log m = f + f^2 P(f).
static inline float log_(float x) {
  using namespace math;
  if (x != x || x < 0.0f) return nan_();
  if (x == 0.0f) return -infinity_();
  if (x == infinity_()) return x;
  const bool denormal = x < 0x1p-126f;
  const std::uint32_t u = bits_of(denormal ? x * 0x1p23f : x) - kSqrtHalfBits;
  const float e = static_cast<float>((static_cast<std::int32_t>(u) >> 23) - (denormal ? 23 : 0));
  const float f = float_of((u & 0x007fffffu) + kSqrtHalfBits) - 1.0f;
  float p = fma_(kLog[9], f, kLog[8]);
  for (int i = 7; i >= 0; --i) p = fma_(p, f, kLog[i]);
  const float tail = fma_(e, kLn2Low, (f * f) * p);
  return fma_(e, kLn2High, f + tail);
}

// Hyperbolic tangent, odd by construction: |x| < 0.625 by a polynomial, else 1 - 2 / (e^2|x| + 1).
static inline float tanh_(float x) {
  using namespace math;
  if (x != x) return nan_();
  const std::uint32_t sign = bits_of(x) & 0x80000000u;
  const float a = float_of(bits_of(x) ^ sign);
  float y;
  if (a < kTanhSmall) {
    const float z = a * a;
    float p = fma_(kTanh[4], z, kTanh[3]);
    p = fma_(p, z, kTanh[2]);
    p = fma_(p, z, kTanh[1]);
    p = fma_(p, z, kTanh[0]);
    y = fma_(a * z, p, a);
  } else {
    y = 1.0f - 2.0f / (exp_(a + a) + 1.0f);
  }
  return float_of(bits_of(y) | sign);
}

// x / (1 + e^-x)
static inline float silu_(float x) { return x / (1.0f + exp_(-x)); }

}  // namespace octavo::scalar
