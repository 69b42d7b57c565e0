// The filters of sample.h on integer weights, without sorting a vocabulary.
#pragma once
#include <cstdint>

#include "ops/sample_passes.h"

namespace octavo {

// Ids that can still be drawn, in increasing order.
struct Survivors {
  std::uint32_t* weights = nullptr;
  std::uint32_t* ids = nullptr;
  std::int64_t count = 0;
  std::uint64_t total = 0;  // sum of weights
  bool whole = true;        // still the whole vocabulary: position is id, `ids` is not filled, weights may be 0
};

// The smallest integer weight that min_p keeps; at least 1.
std::uint32_t min_p_weight(float min_p);

// `survivors.total` > 0. Buffers of `scratch` besides weights and ids are overwritten.
void keep_top_k(const SamplePasses& passes, std::int64_t k, Survivors& survivors, SampleScratch& scratch);
void keep_typical_p(const SamplePasses& passes, float typical_p, Survivors& survivors, SampleScratch& scratch);
void keep_top_p(const SamplePasses& passes, float top_p, Survivors& survivors, SampleScratch& scratch);

// The id at which the running sum first exceeds r < survivors.total.
std::int32_t id_at(const SamplePasses& passes, const Survivors& survivors, std::uint64_t r);

}  // namespace octavo
