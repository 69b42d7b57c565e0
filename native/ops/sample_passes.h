// What sampling does across a whole vocabulary. Each instruction set fills one table; the rest of sampling (sample.cpp,
// sample_filters.cpp) is written once over it. Only sum_exp, weights and typical_logs round; the others are exact, so
// their order of work is free.
#pragma once
#include <cstdint>

#include "ops/sample.h"

namespace octavo {

inline constexpr std::int64_t kMaximaBlock = 64;   // ids a block of block_max
inline constexpr std::int64_t kSumSegment = 4096;  // ids a segment of sum_exp
inline constexpr std::int64_t kCompactSlack = 8;   // elements `compact` may write past what it keeps
inline constexpr std::uint32_t kWeightOne = 1u << 30;
inline constexpr float kTypicalScale = 1048576.0f;  // 2^20

struct Tally {
  std::uint64_t count = 0, sum = 0;
};

struct SamplePasses {
  // The largest of n >= 1 elements, -0 counting as +0. `finite`: no NaN or infinity among them. With a NaN the maximum
  // means nothing; with -inf it holds.
  float (*row_max)(const float* x, std::int64_t n, bool* finite);
  std::int64_t (*find_first)(const float* x, std::int64_t n, float value);  // n when absent
  std::int64_t (*count_greater)(const float* x, std::int64_t n, float value);
  void (*block_max)(const float* x, std::int64_t n, float* maxima);  // of each kMaximaBlock ids, the last block shorter
  float (*sum_exp)(const float* x, std::int64_t n, float max);
  // w[i] = the weight of x[i], or 0 when it is below `smallest`; returns their sum.
  std::uint64_t (*weights)(const float* x, std::int64_t n, float max, float temperature, std::uint32_t smallest,
                           std::uint32_t* w);
  void (*typical_logs)(const std::uint32_t* w, std::int64_t n, std::uint32_t* logs);  // L(i); w[i] >= 1
  // Over keys (below 2^31) of at least `low`: how many, and the sum of their values.
  Tally (*tally)(const std::uint32_t* keys, const std::uint32_t* values, std::int64_t n, std::uint32_t low);
  // Keeps, in order, positions with low <= key < high: a -> a_out and b -> b_out; a null `b` means the position itself,
  // a null b_out nothing. Outputs may be the inputs or keys; they have room for n + kCompactSlack. Returns how many.
  std::int64_t (*compact)(const std::uint32_t* keys, std::int64_t n, std::uint32_t low, std::uint32_t high,
                          const std::uint32_t* a, std::uint32_t* a_out, const std::uint32_t* b, std::uint32_t* b_out);
};

namespace scalar {
const SamplePasses& sample_passes();
}
namespace avx2 {
const SamplePasses& sample_passes();
}

void sample_row_with(const SamplePasses& passes, const SampleRow& row, SampleScratch& scratch, SampleResult& result);

}  // namespace octavo
