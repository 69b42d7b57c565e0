// Rope kernels and tables: the same bits from every table, rows that do not depend on how the table grew, accuracy.
#include <cmath>
#include <cstring>
#include <vector>

#include "ops/rope.h"
#include "simd/kernels.h"
#include "tests/check.h"

using namespace octavo;

namespace {

void test_every_table_gives_the_scalar_bits_and_leaves_the_rest_of_a_head() {
  Rng rng{21};
  const struct {
    std::int64_t heads, head_dim, rotary_dim;
  } shapes[] = {{1, 8, 8}, {3, 16, 16}, {9, 64, 64}, {2, 80, 32}, {4, 128, 128}, {2, 96, 72}, {1, 20, 10}, {5, 64, 0}};
  for (const auto& shape : shapes) {
    RopeTable table(rope_frequencies(10000.0, static_cast<int>(shape.rotary_dim)));
    table.reserve(5001);
    std::vector<float> x(static_cast<std::size_t>(shape.heads * shape.head_dim));
    for (const std::int64_t position : {0, 1, 77, 5000}) {
      for (float& v : x) v = rng.uniform(-2.0f, 2.0f);
      const auto run = [&](const Kernels& k) {
        std::vector<float> y = x;
        k.rope(y.data(), shape.heads, shape.head_dim, shape.rotary_dim, table.cos(position), table.sin(position));
        return y;
      };
      const std::vector<float> want = run(scalar_kernels());
      for (const std::string& name : kernel_names()) {
        CHECK(std::memcmp(run(*find_kernels(name)).data(), want.data(), want.size() * sizeof(float)) == 0);
      }
      for (std::size_t i = 0; i < x.size(); ++i) {
        const bool untouched = static_cast<std::int64_t>(i) % shape.head_dim >= shape.rotary_dim || position == 0;
        if (untouched) CHECK(want[i] == x[i]);
      }
    }
  }
}

void test_pairs_are_the_halves_of_the_rotary_part() {
  const double inv_freq[] = {1.0, 0.01};
  RopeTable table({inv_freq, inv_freq + 2});
  table.reserve(8);
  float x[5] = {1.0f, 2.0f, 3.0f, 4.0f, 5.0f};
  scalar_kernels().rope(x, 1, 5, 4, table.cos(7), table.sin(7));
  CHECK(std::fabs(x[0] - (std::cos(7.0) - 3.0 * std::sin(7.0))) < 1e-6);
  CHECK(std::fabs(x[2] - (3.0 * std::cos(7.0) + std::sin(7.0))) < 1e-6);
  CHECK(std::fabs(x[1] - (2.0 * std::cos(0.07) - 4.0 * std::sin(0.07))) < 1e-6);
  CHECK(std::fabs(x[3] - (4.0 * std::cos(0.07) + 2.0 * std::sin(0.07))) < 1e-6);
  CHECK(x[4] == 5.0f);
}

void test_frequencies_are_powers_of_theta() {
  for (const double theta : {10000.0, 100000.0, 500000.0, 1000000.0}) {
    const std::vector<double> f = rope_frequencies(theta, 128);
    CHECK(f.size() == 64 && f[0] == 1.0);
    for (int i = 0; i < 64; ++i) {
      const double want = std::pow(theta, -2.0 * i / 128.0);
      CHECK(std::fabs(f[static_cast<std::size_t>(i)] / want - 1.0) < 1e-14);
    }
  }
}

void test_a_row_does_not_depend_on_how_the_table_grew() {
  const std::vector<double> f = rope_frequencies(10000.0, 64);
  RopeTable at_once(f), grown(f);
  at_once.reserve(3000);
  for (const std::int64_t positions : {1, 64, 65, 100, 1000, 3000}) grown.reserve(positions);
  CHECK(at_once.positions() >= 3000 && grown.positions() >= 3000 && at_once.half() == 32);
  for (std::int64_t p = 0; p < 3000; ++p) {
    CHECK(std::memcmp(at_once.cos(p), grown.cos(p), 32 * sizeof(float)) == 0);
    CHECK(std::memcmp(at_once.sin(p), grown.sin(p), 32 * sizeof(float)) == 0);
    for (std::int64_t i = 0; i < 32; ++i) {
      const double angle = static_cast<double>(p) * f[static_cast<std::size_t>(i)];
      CHECK(std::fabs(static_cast<double>(at_once.cos(p)[i]) - std::cos(angle)) < 6e-8);
      CHECK(std::fabs(static_cast<double>(at_once.sin(p)[i]) - std::sin(angle)) < 6e-8);
    }
  }
}

void test_magnitude_scales_cos_and_sin() {
  RopeTable plain({1.0}), scaled({1.0}, 2.0);
  plain.reserve(10);
  scaled.reserve(10);
  CHECK(scaled.cos(3)[0] == 2.0f * plain.cos(3)[0] && scaled.sin(9)[0] == 2.0f * plain.sin(9)[0]);
}

}  // namespace

int main() {
  test_every_table_gives_the_scalar_bits_and_leaves_the_rest_of_a_head();
  test_pairs_are_the_halves_of_the_rotary_part();
  test_frequencies_are_powers_of_theta();
  test_a_row_does_not_depend_on_how_the_table_grew();
  test_magnitude_scales_cos_and_sin();
  return 0;
}
