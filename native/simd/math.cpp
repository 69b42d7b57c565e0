#include "simd/math.h"

#include <cstdint>
#include <cstring>

namespace octavo::math {
namespace {

// The constants are split so that n * (each high part) is exact for the n that occur.
constexpr double kTwoOverPi = 0x1.45f306dc9c883p-1;
constexpr double kPio2High = 0x1.921fb544p+0;       // 33 bits
constexpr double kPio2Middle = 0x1.0b4611a6p-34;    // the next 33
constexpr double kPio2Low = 0x1.3198a2e037073p-69;  // the rest
constexpr double kLog2EDouble = 0x1.71547652b82fep+0;
constexpr double kLn2HighDouble = 0x1.62e42feep-1;  // 32 bits
constexpr double kLn2LowDouble = 0x1.a39ef35793c76p-33;
constexpr double kMagic = 0x1.8p+52;  // x + this - this rounds |x| < 2^51 to an integer
constexpr std::uint64_t kInfinity = 0x7ff0000000000000u, kNaN = 0x7ff8000000000000u;
constexpr std::uint64_t kSqrtHalf = 0x3fe6a09e667f3bcdu;

std::uint64_t bits(double x) {
  std::uint64_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
}
double from_bits(std::uint64_t u) {
  double x;
  std::memcpy(&x, &u, sizeof x);
  return x;
}
double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }

// Taylor series; on |r| <= pi/4 the first term left out is under 1e-19.
double sin_reduced(double r) {
  const double z = r * r;
  double p = 1.0;
  for (int n = 19; n >= 5; n -= 2) p = fma(-z / static_cast<double>(n * (n - 1)), p, 1.0);
  return fma(r, -z / 6.0 * p, r);
}
double cos_reduced(double r) {
  const double z = r * r;
  double p = 1.0;
  for (int n = 18; n >= 4; n -= 2) p = fma(-z / static_cast<double>(n * (n - 1)), p, 1.0);
  return fma(-0.5 * z, p, 1.0);
}

// sin(x + quadrant pi/2)
double sin_shifted(double x, std::uint64_t quadrant) {
  if (!(x <= 1647099.0 && x >= -1647099.0)) return from_bits(kNaN);
  const double shifted = fma(x, kTwoOverPi, kMagic);
  const double n = shifted - kMagic;
  double r = fma(n, -kPio2High, x);
  r = fma(n, -kPio2Middle, r);
  r = fma(n, -kPio2Low, r);
  quadrant += bits(shifted) - bits(kMagic);
  const double y = (quadrant & 1) != 0 ? cos_reduced(r) : sin_reduced(r);
  return (quadrant & 2) != 0 ? -y : y;
}

}  // namespace

double sin(double x) { return sin_shifted(x, 0); }
double cos(double x) { return sin_shifted(x, 1); }

double exp(double x) {
  if (x != x) return from_bits(kNaN);
  if (x > 0x1.62e42fefa39efp+9) return from_bits(kInfinity);
  if (x < -0x1.6232bdd7abcd2p+9) return 0.0;
  const double shifted = fma(x, kLog2EDouble, kMagic);
  const double n = shifted - kMagic;
  const double high = fma(n, -kLn2HighDouble, x);
  const double r = fma(n, -kLn2LowDouble, high);
  double p = 1.0;  // Taylor: (e^r - 1) / r, to r^14 / 15!
  for (int i = 14; i >= 2; --i) p = fma(p, r / static_cast<double>(i), 1.0);
  const double y = fma(r, p, 1.0);
  return from_bits(bits(y) + ((bits(shifted) - bits(kMagic)) << 52));
}

double log(double x) {
  if (!(x > 0.0)) return from_bits(kNaN);
  if (bits(x) == kInfinity) return x;
  const bool denormal = x < 0x1p-1022;
  const std::uint64_t u = bits(denormal ? x * 0x1p54 : x) - kSqrtHalf;
  const double e = static_cast<double>((static_cast<std::int64_t>(u) >> 52) - (denormal ? 54 : 0));
  const double f = from_bits((u & 0x000fffffffffffffu) + kSqrtHalf) - 1.0;
  // log(1 + f) = 2 atanh(s), s = f / (2 + f): 2 (s + s^3/3 + ...); and 2 s = f - s f.
  const double s = f / (2.0 + f);
  const double z = s * s;
  double p = 0.0;
  for (int n = 23; n >= 3; n -= 2) p = fma(p, z, 2.0 / static_cast<double>(n));
  const double tail = fma(e, kLn2LowDouble, s * (z * p - f));
  return fma(e, kLn2HighDouble, f + tail);
}

double pow(double base, double y) { return exp(y * log(base)); }

}  // namespace octavo::math
