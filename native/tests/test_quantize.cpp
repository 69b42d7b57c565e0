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

AlignedBytes row_memory(std::int64_t blocks) {
  AlignedBytes memory = allocate_aligned(static_cast<std::size_t>(q_row_bytes(blocks)));
  CHECK(memory != nullptr);
  return memory;
}

bool same_row(QRow<std::byte> a, QRow<std::byte> b) {
  for (std::int64_t i = 0; i < a.blocks; ++i) {
    if (!same_bits(a.scales()[i], b.scales()[i]) || a.corrections()[i] != b.corrections()[i]) return false;
  }
  const auto count = static_cast<std::size_t>(a.blocks);
  return std::memcmp(a.q(), b.q(), kBlock * count) == 0 && std::memcmp(a.sums(), b.sums(), 4 * count) == 0;
}

void quantize_is_the_same_in_every_table() {
  Rng rng{9};
  for (std::int64_t k : {1, 7, 32, 63, 64, 65, 100, 128, 576}) {
    for (int turn = 0; turn < 60; ++turn) {
      std::vector<float> x(static_cast<std::size_t>(k + 1));
      const float size = std::ldexp(1.0f, turn * 5 - 149);
      for (float& value : x) value = rng.uniform(-1, 1) * size;
      if (turn % 5 == 0) x[rng.next() % x.size()] = turn % 2 == 0 ? kNaN : -std::numeric_limits<float>::infinity();
      const std::int64_t blocks = (k + kBlock - 1) / kBlock;
      const AlignedBytes expected = row_memory(blocks), got = row_memory(blocks);
      scalar_kernels().quantize(x.data() + 1, k, expected.get());
      for (const std::string& name : kernel_names()) {
        find_kernels(name)->quantize(x.data() + 1, k, got.get());
        CHECK(same_row({expected.get(), blocks}, {got.get(), blocks}));
      }
    }
  }
}

void quantize_rounds_ties_to_even_and_marks_what_is_not_finite() {
  const AlignedBytes memory = row_memory(1);
  const QRow<std::byte> row{memory.get(), 1};
  for (const std::string& name : kernel_names()) {
    const Kernels& kernels = *find_kernels(name);
    float x[40] = {-127.0f, 0.5f, 1.5f, -2.5f, 3.49f};
    x[39] = 9.0f;
    kernels.quantize(x, 40, row.at);
    const int q[] = {-127, 0, 2, -2, 3};
    for (int i = 0; i < kBlock; ++i) CHECK(row.q()[i] == (i < 5 ? q[i] : i == 39 ? 9 : 0));
    CHECK(row.scales()[0] == 1.0f && row.corrections()[0] == 128 * 115);
    CHECK(row.sums()[0].of_group[0] == -124 && row.sums()[0].of_group[1] == 9);

    const float bad[] = {1.0f, kNaN, 3.0f};
    kernels.quantize(bad, 3, row.at);
    CHECK(std::isnan(row.scales()[0]) && row.q()[0] == 0 && row.q()[2] == 0 && row.corrections()[0] == 0);

    const float tiny[] = {1e-38f, -9e-31f};
    kernels.quantize(tiny, 2, row.at);
    CHECK(row.scales()[0] == 0.0f && row.q()[0] == 0 && row.q()[1] == 0 && row.sums()[0].of_group[0] == 0);
  }
}

void quantized_values_are_within_half_a_step() {
  Rng rng{2};
  const AlignedBytes memory = row_memory(1);
  const QRow<std::byte> row{memory.get(), 1};
  for (int turn = 0; turn < 100; ++turn) {
    float x[kBlock];
    for (float& value : x) value = rng.uniform(-3, 3);
    scalar_kernels().quantize(x, kBlock, row.at);
    const float scale = row.scales()[0];
    for (int i = 0; i < kBlock; ++i) {
      CHECK(std::fabs(scale * static_cast<float>(row.q()[i]) - x[i]) <= scale * 0.5001f);
    }
  }
}

}  // namespace

int main() {
  quantize_is_the_same_in_every_table();
  quantize_rounds_ties_to_even_and_marks_what_is_not_finite();
  quantized_values_are_within_half_a_step();
  return 0;
}
