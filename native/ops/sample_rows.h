// The arrays of src/octavo/executor/interface.py's SamplingRows, checked once, then read row by row.
#pragma once
#include <cstdint>
#include <string>

#include "ops/sample.h"

namespace octavo {

inline constexpr std::int32_t kMaxLogprobs = 20;

struct SamplingView {
  std::int64_t rows = 0;   // R
  std::int64_t vocab = 0;  // width of a row of logits

  const float* temperature = nullptr;  // [R], as all scalars below
  const std::int32_t* top_k = nullptr;
  const float* top_p = nullptr;
  const float* min_p = nullptr;
  const float* typical_p = nullptr;
  const float* presence = nullptr;
  const float* frequency = nullptr;
  const float* repetition = nullptr;
  const std::uint64_t* seed = nullptr;
  const std::int64_t* position = nullptr;
  const std::int32_t* n_index = nullptr;
  const std::int32_t* target = nullptr;
  const std::int32_t* num_logprobs = nullptr;
  const std::int32_t* mask_index = nullptr;

  const std::uint32_t* masks = nullptr;  // [mask_count][ceil(vocab / 32)]
  std::int64_t mask_count = 0;

  // Ragged: row r holds offsets[r] .. offsets[r + 1] - 1; the sizes are those of the flat arrays.
  const std::int32_t* banned_offsets = nullptr;  // [R + 1]
  const std::int32_t* banned_ids = nullptr;
  std::int64_t banned_size = 0;
  const std::int32_t* bias_offsets = nullptr;  // [R + 1]
  const std::int32_t* bias_ids = nullptr;
  const float* bias_values = nullptr;
  std::int64_t bias_size = 0;
  const std::int32_t* seen_offsets = nullptr;  // [R + 1]
  const std::int32_t* seen_ids = nullptr;
  const std::int32_t* seen_counts = nullptr;
  std::int64_t seen_size = 0;
};

// Empty when every scalar is in its range, every offset in its array and every id in the vocabulary; else what is not.
std::string validate(const SamplingView& view);

// Row r of a view that passed validate, its logits to be set by the caller.
SampleRow sample_row_view(const SamplingView& view, std::int64_t r);

// The largest num_logprobs of the view, 0 when none asks for the best ids: the width of the results' top arrays.
std::int32_t max_logprobs(const SamplingView& view);

}  // namespace octavo
