// exp_, log_, tanh_, silu_ and the double functions: accuracy against libm, the same bits in SIMD, and digests that
// hold on every compiler and CPU. A digest may change only together with the executor's `arithmetic`.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <vector>

#include "simd/kernels.h"
#include "simd/math.h"
#include "simd/math_scalar.h"
#include "tests/check.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#include "simd/math_avx2.h"
namespace {
void exp_eight(const float* x, float* y) { _mm256_storeu_ps(y, octavo::avx2::exp_(_mm256_loadu_ps(x))); }
void log_eight(const float* x, float* y) { _mm256_storeu_ps(y, octavo::avx2::log_(_mm256_loadu_ps(x))); }
void tanh_eight(const float* x, float* y) { _mm256_storeu_ps(y, octavo::avx2::tanh_(_mm256_loadu_ps(x))); }
void silu_eight(const float* x, float* y) { _mm256_storeu_ps(y, octavo::avx2::silu_(_mm256_loadu_ps(x))); }
}  // namespace
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma"))), \
                             apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")
#endif
#include "simd/math_avx512.h"
namespace {
void exp_sixteen(const float* x, float* y) { _mm512_storeu_ps(y, octavo::avx512::exp_(_mm512_loadu_ps(x))); }
void tanh_sixteen(const float* x, float* y) { _mm512_storeu_ps(y, octavo::avx512::tanh_(_mm512_loadu_ps(x))); }
}  // namespace
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

using namespace octavo;

namespace {

using Function = float (*)(float);
using Reference = double (*)(double);

double silu_reference(double x) { return x / (1.0 + std::exp(-x)); }
double exp_reference(double x) { return std::exp(x); }
double log_reference(double x) { return std::log(x); }
double tanh_reference(double x) { return std::tanh(x); }

double ulp_error(float got, double want) {
  int exponent;
  std::frexp(want, &exponent);
  return std::fabs(static_cast<double>(got) - want) / std::ldexp(1.0, exponent - 24);
}

// Largest error over floats spread evenly over the bit patterns of [low, high], both of one sign.
double worst_ulp(Function f, Reference reference, float low, float high) {
  const std::uint32_t a = scalar::bits_of(low), b = scalar::bits_of(high);
  const std::uint32_t first = a < b ? a : b, last = a < b ? b : a, step = (last - first) / 1000003 + 1;
  double worst = 0.0;
  for (std::uint64_t u = first; u <= last; u += step) {
    const float x = scalar::float_of(static_cast<std::uint32_t>(u));
    worst = std::fmax(worst, ulp_error(f(x), reference(static_cast<double>(x))));
  }
  return worst;
}

void test_errors_are_under_two_ulp() {
  const double exp_worst = std::fmax(worst_ulp(scalar::exp_, exp_reference, 0.0f, 88.7228f),
                                     worst_ulp(scalar::exp_, exp_reference, -0.0f, -87.3365f));
  const double log_worst = worst_ulp(scalar::log_, log_reference, 0x1p-149f, std::numeric_limits<float>::max());
  const double log_near_one = worst_ulp(scalar::log_, log_reference, 0.5f, 2.0f);
  const double tanh_worst = worst_ulp(scalar::tanh_, tanh_reference, 0x1p-126f, 20.0f);
  const double silu_worst = std::fmax(worst_ulp(scalar::silu_, silu_reference, 0x1p-100f, 80.0f),
                                      worst_ulp(scalar::silu_, silu_reference, -0x1p-100f, -80.0f));
  std::printf("ulp: exp %.3f log %.3f (0.5..2: %.3f) tanh %.3f silu %.3f\n", exp_worst, log_worst, log_near_one,
              tanh_worst, silu_worst);
  CHECK(exp_worst < 2.0);
  CHECK(log_worst < 2.0);
  CHECK(log_near_one < 2.0);
  CHECK(tanh_worst < 2.0);
  CHECK(silu_worst < 4.0);  // three roundings on top of exp_
}

void test_special_values_are_exact() {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const auto bits = [](float x) { return scalar::bits_of(x); };
  CHECK(bits(scalar::exp_(0.0f)) == bits(1.0f) && bits(scalar::exp_(-0.0f)) == bits(1.0f));
  CHECK(bits(scalar::exp_(-inf)) == 0u && bits(scalar::exp_(-104.0f)) == 0u && bits(scalar::exp_(-87.34f)) == 0u);
  CHECK(scalar::exp_(inf) == inf && scalar::exp_(89.0f) == inf && scalar::exp_(1e30f) == inf);
  CHECK(bits(scalar::exp_(nan)) == 0x7fc00000u && bits(scalar::exp_(-nan)) == 0x7fc00000u);
  CHECK(std::isnormal(scalar::exp_(math::kExpLow)) && std::isfinite(scalar::exp_(math::kExpHigh)));
  CHECK(scalar::exp_(std::nextafterf(math::kExpHigh, inf)) == inf &&
        scalar::exp_(std::nextafterf(math::kExpLow, -inf)) == 0.0f);
  CHECK(bits(scalar::log_(1.0f)) == 0u && scalar::log_(0.0f) == -inf && scalar::log_(-0.0f) == -inf);
  CHECK(scalar::log_(inf) == inf && bits(scalar::log_(-1.0f)) == 0x7fc00000u && bits(scalar::log_(nan)) == 0x7fc00000u);
  CHECK(bits(scalar::tanh_(-0.0f)) == 0x80000000u && scalar::tanh_(inf) == 1.0f && scalar::tanh_(-inf) == -1.0f);
  CHECK(bits(scalar::tanh_(nan)) == 0x7fc00000u);
}

#if defined(__x86_64__)
void test_simd_gives_the_scalar_bits() {
  if (!cpu_features().avx2) return;
  std::vector<float> values;
  for (std::uint32_t i = 0; i < (1u << 22); ++i)
    values.push_back(scalar::float_of(i * 1024u + (i * 2654435761u >> 22)));
  for (const std::uint32_t u :
       {0x00000000u, 0x00000001u, 0x007fffffu, 0x00800000u, 0x7f7fffffu, 0x7f800000u, 0x7f800001u, 0x7fc00000u,
        0x7fffffffu, scalar::bits_of(math::kExpHigh), scalar::bits_of(math::kExpLow),
        scalar::bits_of(math::kExpHigh) + 1, scalar::bits_of(math::kExpLow) + 1, 0x3f200000u, 0x3f1fffffu}) {
    values.push_back(scalar::float_of(u));
    values.push_back(scalar::float_of(u ^ 0x80000000u));
  }
  while (values.size() % 16 != 0) values.push_back(1.0f);
  const struct {
    Function one;
    void (*many)(const float*, float*);
    std::size_t lanes;
    bool nan_bits;
  } pairs[] = {{scalar::exp_, exp_eight, 8, true},
               {scalar::log_, log_eight, 8, true},
               {scalar::tanh_, tanh_eight, 8, true},
               {scalar::silu_, silu_eight, 8, false},  // silu_ passes a NaN on: it stays NaN, with any payload
               {scalar::exp_, exp_sixteen, 16, true},
               {scalar::tanh_, tanh_sixteen, 16, true}};
  for (const auto& pair : pairs) {
    if (pair.lanes == 16 && !cpu_features().avx512) continue;
    for (std::size_t i = 0; i < values.size(); i += pair.lanes) {
      float y[16];
      pair.many(values.data() + i, y);
      for (std::size_t j = 0; j < pair.lanes; ++j) {
        const float want = pair.one(values[i + j]);
        if (!pair.nan_bits && std::isnan(want) && std::isnan(y[j])) continue;
        CHECK(scalar::bits_of(want) == scalar::bits_of(y[j]));
      }
    }
  }
}
#endif

void test_double_functions_are_accurate() {
  double sin_worst = 0.0, exp_worst = 0.0, log_worst = 0.0, pow_worst = 0.0;
  Rng rng{7};
  for (int i = 0; i < 200000; ++i) {
    const double u = static_cast<double>(rng.next() >> 11) * 0x1p-53;
    const double x = (u - 0.5) * (i % 3 == 0 ? 10.0 : i % 3 == 1 ? 1e4 : 2e6);
    sin_worst = std::fmax(sin_worst, std::fabs(math::sin(x) - std::sin(x)));
    sin_worst = std::fmax(sin_worst, std::fabs(math::cos(x) - std::cos(x)));
    const double e = (u - 0.5) * 1400.0;
    exp_worst = std::fmax(exp_worst, std::fabs(math::exp(e) / std::exp(e) - 1.0));
    const double v = std::exp(e);
    log_worst = std::fmax(log_worst, std::fabs(math::log(v) / std::log(v) - 1.0));
    const double near = 1.0 + (u - 0.5) * 1e-3;
    log_worst = std::fmax(log_worst, std::fabs(math::log(near) / std::log(near) - 1.0));
    const double theta = i % 2 == 0 ? 10000.0 : 1000000.0;
    pow_worst = std::fmax(pow_worst, std::fabs(math::pow(theta, -u) / std::pow(theta, -u) - 1.0));
  }
  std::printf("double: sin, cos %.2g (absolute); exp %.2g log %.2g pow %.2g (relative)\n", sin_worst, exp_worst,
              log_worst, pow_worst);
  CHECK(sin_worst < 3e-16);  // libm's own half ulp included
  CHECK(exp_worst < 1e-15);
  CHECK(log_worst < 1e-15);
  CHECK(pow_worst < 1e-14);
  CHECK(math::sin(0.0) == 0.0 && math::cos(0.0) == 1.0 && math::exp(0.0) == 1.0 && math::log(1.0) == 0.0);
  CHECK(math::pow(10000.0, 0.0) == 1.0 && math::exp(-800.0) == 0.0 && std::isinf(math::exp(800.0)));
  CHECK(std::isnan(math::log(-1.0)) && std::isnan(math::sin(1e9)) && std::isnan(math::cos(std::nan(""))));
}

class Fnv {
 public:
  template <class T>
  void add(T x) {
    unsigned char bytes[sizeof x];
    std::memcpy(bytes, &x, sizeof x);
    for (const unsigned char byte : bytes) hash_ = (hash_ ^ byte) * 0x100000001b3u;
  }
  std::uint64_t value() const { return hash_; }

 private:
  std::uint64_t hash_ = 0xcbf29ce484222325u;
};

std::uint64_t digest(Function f, std::uint32_t first, std::uint32_t step) {
  Fnv hash;
  for (std::uint32_t i = 0; i < 300000; ++i) hash.add(f(scalar::float_of(first + i * step)));
  return hash.value();
}
std::uint64_t digest(double (*f)(double), double first, double step) {
  Fnv hash;
  for (int i = 0; i < 200000; ++i) hash.add(f(first + step * i));
  return hash.value();
}
double pow_theta(double y) { return math::pow(500000.0, y); }

void check_digest(const char* name, std::uint64_t got, std::uint64_t want) {
  if (got != want) std::fprintf(stderr, "digest of %s is 0x%016llx\n", name, static_cast<unsigned long long>(got));
  CHECK(got == want);
}

void test_digests_have_not_moved() {
  check_digest("exp_ > 0", digest(scalar::exp_, 0x38000000u, 557u), 0xcdc0e3a4c8cd6e0bu);
  check_digest("exp_ < 0", digest(scalar::exp_, 0xb8000000u, 557u), 0x196d23f850600705u);
  check_digest("log_", digest(scalar::log_, 0x00000001u, 7127u), 0x68b6052213000260u);
  check_digest("tanh_", digest(scalar::tanh_, 0x3a000000u, 331u), 0x55f9574187cd591eu);
  check_digest("silu_ > 0", digest(scalar::silu_, 0x38000000u, 557u), 0x36f0c507775a4483u);
  check_digest("silu_ < 0", digest(scalar::silu_, 0xb8000000u, 557u), 0x3ed4c0d34b7b15b0u);
  check_digest("sin", digest(math::sin, -3000.0, 0x1.1p-5), 0x4137653e18c4ddb0u);
  check_digest("cos", digest(math::cos, -3000.0, 0x1.1p-5), 0x79bbe490ff8f79d6u);
  check_digest("exp", digest(math::exp, -700.0, 0x1.cp-8), 0x069933855841decfu);
  check_digest("log", digest(math::log, 0x1p-20, 0x1.1p-10), 0x4a762eca4bf18eeau);
  check_digest("pow", digest(pow_theta, -1.0, 0x1.4p-18), 0xc903bc0d9a5ee297u);
}

}  // namespace

int main() {
  test_errors_are_under_two_ulp();
  test_special_values_are_exact();
#if defined(__x86_64__)
  test_simd_gives_the_scalar_bits();
#endif
  test_double_functions_are_accurate();
  test_digests_have_not_moved();
  return 0;
}
