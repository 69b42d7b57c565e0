#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/sample_passes.h"
#include "simd/math_scalar.h"

namespace octavo::scalar {
namespace {

float row_max(const float* x, std::int64_t n, bool* finite) {
  float max = -std::numeric_limits<float>::infinity();
  bool all = true;
  for (std::int64_t i = 0; i < n; ++i) {
    all &= std::fabs(x[i]) <= std::numeric_limits<float>::max();
    max = x[i] > max ? x[i] : max;
  }
  *finite = all;
  return max + 0.0f;
}

std::int64_t find_first(const float* x, std::int64_t n, float value) { return std::find(x, x + n, value) - x; }

std::int64_t count_greater(const float* x, std::int64_t n, float value) {
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < n; ++i) count += x[i] > value;
  return count;
}

void block_max(const float* x, std::int64_t n, float* maxima) {
  for (std::int64_t i = 0; i < n; i += kMaximaBlock)
    *maxima++ = *std::max_element(x + i, x + std::min(n, i + kMaximaBlock));
}

float sum_exp(const float* x, std::int64_t n, float max) {
  float total = 0.0f;
  for (std::int64_t begin = 0; begin < n; begin += kSumSegment) {
    const std::int64_t end = std::min(n, begin + kSumSegment);
    float partial[16] = {};
    for (std::int64_t i = begin; i < end; ++i) partial[i % 16] += exp_(x[i] - max);
    for (int half = 8; half >= 1; half /= 2)
      for (int i = 0; i < half; ++i) partial[i] += partial[i + half];
    total += partial[0];
  }
  return total;
}

std::uint64_t weights(const float* x, std::int64_t n, float max, float temperature, std::uint32_t smallest,
                      std::uint32_t* w) {
  std::uint64_t total = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const float z = std::max((x[i] - max) / temperature, -22.0f);
    const auto weight = static_cast<std::uint32_t>(std::lrint(exp_(z) * static_cast<float>(kWeightOne)));
    w[i] = weight < smallest ? 0 : weight;
    total += w[i];
  }
  return total;
}

void typical_logs(const std::uint32_t* w, std::int64_t n, std::uint32_t* logs) {
  for (std::int64_t i = 0; i < n; ++i) {
    const long fixed = std::lrint(log_(static_cast<float>(static_cast<std::int32_t>(w[i]))) * kTypicalScale);
    logs[i] = static_cast<std::uint32_t>(std::max(fixed, 0L));
  }
}

Tally tally(const std::uint32_t* keys, const std::uint32_t* values, std::int64_t n, std::uint32_t low) {
  Tally result;
  for (std::int64_t i = 0; i < n; ++i) {
    result.count += keys[i] >= low;
    result.sum += keys[i] >= low ? values[i] : 0;
  }
  return result;
}

std::int64_t compact(const std::uint32_t* keys, std::int64_t n, std::uint32_t low, std::uint32_t high,
                     const std::uint32_t* a, std::uint32_t* a_out, const std::uint32_t* b, std::uint32_t* b_out) {
  std::int64_t kept = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const bool keep = keys[i] >= low && keys[i] < high;
    const std::uint32_t second = b != nullptr ? b[i] : static_cast<std::uint32_t>(i);
    a_out[kept] = a[i];
    if (b_out != nullptr) b_out[kept] = second;
    kept += keep;
  }
  return kept;
}

constexpr SamplePasses kPasses = {row_max, find_first,   count_greater, block_max, sum_exp,
                                  weights, typical_logs, tally,         compact};

}  // namespace

const SamplePasses& sample_passes() { return kPasses; }

void sample_row(const SampleRow& row, SampleScratch& scratch, SampleResult& result) {
  sample_row_with(kPasses, row, scratch, result);
}

}  // namespace octavo::scalar
