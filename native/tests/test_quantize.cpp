// Quantising activations: every kernel table gives the scalar one's bits, and those follow ops/linear.h.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "check.h"
#include "formats/fp16.h"
#include "simd/kernels.h"

using namespace octavo;

namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

bool same_bits(float a, float b) { return (std::isnan(a) && std::isnan(b)) || float_bits(a) == float_bits(b); }

bool same_block(const QBlock& a, const QBlock& b) {
  return same_bits(a.d, b.d) && same_bits(a.s, b.s) && a.offset == b.offset && std::memcmp(a.q, b.q, sizeof a.q) == 0;
}

void quantize_is_the_same_in_every_table() {
  Rng rng{9};
  for (std::int64_t k : {1, 7, 31, 32, 33, 64, 100, 576}) {
    for (int turn = 0; turn < 60; ++turn) {
      std::vector<float> x(static_cast<std::size_t>(k + 1));
      const float size = std::ldexp(1.0f, turn * 5 - 149);
      for (float& value : x) value = rng.uniform(-1, 1) * size;
      if (turn % 5 == 0) x[rng.next() % x.size()] = turn % 2 == 0 ? kNaN : -std::numeric_limits<float>::infinity();
      const auto blocks = static_cast<std::size_t>((k + kGroup - 1) / kGroup);
      std::vector<QBlock> expected(blocks), got(blocks);
      scalar_kernels().quantize(x.data() + 1, k, expected.data());
      for (const std::string& name : kernel_names()) {
        find_kernels(name)->quantize(x.data() + 1, k, got.data());
        CHECK(std::equal(expected.begin(), expected.end(), got.begin(), same_block));
      }
    }
  }
}

void quantize_rounds_ties_to_even_and_marks_what_is_not_finite() {
  for (const std::string& name : kernel_names()) {
    const Kernels& kernels = *find_kernels(name);
    const float x[] = {-127.0f, 0.5f, 1.5f, -2.5f, 3.49f};
    QBlock block;
    kernels.quantize(x, 5, &block);
    const int q[] = {-127, 0, 2, -2, 3};
    for (int i = 0; i < kGroup; ++i) CHECK(block.q[i] == (i < 5 ? q[i] : 0));
    CHECK(block.d == 1.0f && block.s == -124.0f && block.offset == 128 * 124);

    const float bad[] = {1.0f, kNaN, 3.0f};
    kernels.quantize(bad, 3, &block);
    CHECK(std::isnan(block.d) && std::isnan(block.s) && block.q[0] == 0 && block.q[2] == 0);

    const float tiny[] = {1e-38f, -9e-31f};
    kernels.quantize(tiny, 2, &block);
    CHECK(block.d == 0.0f && block.s == 0.0f && block.q[0] == 0 && block.q[1] == 0);
  }
}

void quantized_values_are_within_half_a_step() {
  Rng rng{2};
  for (int turn = 0; turn < 100; ++turn) {
    float x[kGroup];
    for (float& value : x) value = rng.uniform(-3, 3);
    QBlock block;
    scalar_kernels().quantize(x, kGroup, &block);
    int sum = 0;
    for (int i = 0; i < kGroup; ++i) {
      CHECK(std::fabs(block.d * static_cast<float>(block.q[i]) - x[i]) <= block.d * 0.5001f);
      sum += block.q[i];
    }
    CHECK(block.s == block.d * static_cast<float>(sum));
  }
}

}  // namespace

int main() {
  quantize_is_the_same_in_every_table();
  quantize_rounds_ties_to_even_and_marks_what_is_not_finite();
  quantized_values_are_within_half_a_step();
  return 0;
}
