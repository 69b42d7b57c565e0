// RMSNorm and the element-wise kernels: the same bits from every table, the canonical order, and accuracy.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <vector>

#include "simd/kernels.h"
#include "simd/math_scalar.h"
#include "tests/check.h"

using namespace octavo;

namespace {

const std::int64_t kSizes[] = {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 576, 577, 1536, 4096};
constexpr float kEps = 1e-5f;

std::vector<float> random_floats(Rng& rng, std::int64_t n, float scale) {
  std::vector<float> x(static_cast<std::size_t>(n));
  for (float& v : x) v = rng.uniform(-scale, scale);
  return x;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

template <class Run>
void check_every_table(Run run) {
  const std::vector<float> want = run(scalar_kernels());
  for (const std::string& name : kernel_names()) CHECK(same_bits(run(*find_kernels(name)), want));
}

void test_every_table_gives_the_scalar_bits() {
  Rng rng{11};
  for (const std::int64_t n : kSizes) {
    for (const float scale : {1e-3f, 1.0f, 300.0f}) {
      const std::vector<float> x = random_floats(rng, n, scale), w = random_floats(rng, n, 2.0f);
      const auto made = [&](auto call) {
        std::vector<float> y(static_cast<std::size_t>(n), -7.0f);
        call(y.data());
        return y;
      };
      check_every_table(
          [&](const Kernels& k) { return made([&](float* y) { k.rms_norm(x.data(), w.data(), n, kEps, y); }); });
      check_every_table(
          [&](const Kernels& k) { return made([&](float* y) { k.silu_mul(x.data(), w.data(), n, y); }); });
      check_every_table([&](const Kernels& k) { return made([&](float* y) { k.add(x.data(), w.data(), n, y); }); });
    }
  }
}

void test_in_place_gives_the_same_bits() {
  Rng rng{12};
  for (const std::string& name : kernel_names()) {
    const Kernels& k = *find_kernels(name);
    const std::vector<float> x = random_floats(rng, 100, 1.0f), w = random_floats(rng, 100, 1.0f);
    std::vector<float> y(100), z = x;
    k.rms_norm(x.data(), w.data(), 100, kEps, y.data());
    k.rms_norm(z.data(), w.data(), 100, kEps, z.data());
    CHECK(same_bits(y, z));
    z = x;
    k.silu_mul(x.data(), w.data(), 100, y.data());
    k.silu_mul(z.data(), w.data(), 100, z.data());
    CHECK(same_bits(y, z));
    z = w;
    k.add(x.data(), w.data(), 100, y.data());
    k.add(x.data(), z.data(), 100, z.data());
    CHECK(same_bits(y, z));
  }
}

// The control: one running sum differs in bits from the canonical 16 partial sums, so the tests above can see an order.
void test_a_linear_sum_would_be_noticed() {
  Rng rng{13};
  int different = 0;
  for (int trial = 0; trial < 20; ++trial) {
    const std::vector<float> x = random_floats(rng, 576, 1.0f), w(576, 1.0f);
    std::vector<float> y(576), linear(576);
    scalar_kernels().rms_norm(x.data(), w.data(), 576, kEps, y.data());
    float sum = 0.0f;
    for (const float v : x) sum = scalar::fma_(v, v, sum);
    const float r = 1.0f / std::sqrt(sum / 576.0f + kEps);
    for (std::size_t i = 0; i < 576; ++i) linear[i] = x[i] * r;
    different += same_bits(y, linear) ? 0 : 1;
  }
  CHECK(different > 10);
}

void test_values_are_near_double_precision() {
  Rng rng{14};
  const std::int64_t n = 1000;
  const std::vector<float> x = random_floats(rng, n, 3.0f), w = random_floats(rng, n, 1.0f);
  std::vector<float> norm(1000), silu(1000);
  scalar_kernels().rms_norm(x.data(), w.data(), n, kEps, norm.data());
  scalar_kernels().silu_mul(x.data(), w.data(), n, silu.data());
  double squares = 0.0;
  for (const float v : x) squares += static_cast<double>(v) * v;
  const double r = 1.0 / std::sqrt(squares / static_cast<double>(n) + static_cast<double>(kEps));
  for (std::size_t i = 0; i < 1000; ++i) {
    const double a = x[i], b = w[i];
    CHECK(std::fabs(norm[i] - a * r * b) < 4e-7 * std::fabs(a * r * b));
    CHECK(std::fabs(silu[i] - a / (1.0 + std::exp(-a)) * b) < 1e-6 * std::fabs(a * b));
  }
}

void test_all_finite_sees_one_bad_value_anywhere() {
  const float bad[] = {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                       std::numeric_limits<float>::quiet_NaN()};
  for (const std::string& name : kernel_names()) {
    const Kernels& k = *find_kernels(name);
    for (const std::int64_t n : {1, 7, 8, 9, 16, 37}) {
      std::vector<float> x(static_cast<std::size_t>(n), std::numeric_limits<float>::max());
      CHECK(k.all_finite(x.data(), n));
      for (std::size_t i = 0; i < x.size(); ++i) {
        for (const float b : bad) {
          x[i] = b;
          CHECK(!k.all_finite(x.data(), n));
        }
        x[i] = -0.0f;
      }
    }
    CHECK(k.all_finite(nullptr, 0));
  }
}

void test_nan_reaches_the_output() {
  std::vector<float> x(40, 1.0f), w(40, 1.0f), y(40);
  x[21] = std::numeric_limits<float>::quiet_NaN();
  for (const std::string& name : kernel_names()) {
    const Kernels& k = *find_kernels(name);
    k.rms_norm(x.data(), w.data(), 40, kEps, y.data());
    for (const float v : y) CHECK(std::isnan(v));
    k.silu_mul(x.data(), w.data(), 40, y.data());
    CHECK(std::isnan(y[21]) && !std::isnan(y[20]));
  }
}

}  // namespace

int main() {
  test_every_table_gives_the_scalar_bits();
  test_in_place_gives_the_same_bits();
  test_a_linear_sum_would_be_noticed();
  test_values_are_near_double_precision();
  test_all_finite_sees_one_bad_value_anywhere();
  test_nan_reaches_the_output();
  return 0;
}
