#include "ops/sample_rows.h"

#include <cmath>

namespace octavo {
namespace {

std::string at(const char* field, std::int64_t index, const char* problem) {
  return std::string(field) + "[" + std::to_string(index) + "]: " + problem;
}

std::string check_ragged(const char* field, const std::int32_t* offsets, std::int64_t rows, std::int64_t size,
                         const std::int32_t* ids, std::int64_t vocab) {
  if (offsets[0] != 0 || offsets[rows] != size) return std::string(field) + ": offsets do not span the ids";
  for (std::int64_t r = 0; r < rows; ++r)
    if (offsets[r] > offsets[r + 1]) return at(field, r, "offsets decrease");
  for (std::int64_t i = 0; i < size; ++i)
    if (ids[i] < 0 || ids[i] >= vocab) return at(field, i, "id outside the vocabulary");
  return {};
}

bool within(float x, float low, float high) { return x >= low && x <= high; }  // false for NaN

std::string check_row(const SamplingView& v, std::int64_t r) {
  constexpr float kLargest = 3.0e38f;
  if (!within(v.temperature[r], 0.0f, kLargest)) return at("temperature", r, "not a finite number >= 0");
  if (v.top_k[r] < 0) return at("top_k", r, "negative");
  if (!within(v.top_p[r], 0.0f, 1.0f)) return at("top_p", r, "outside [0, 1]");
  if (!within(v.min_p[r], 0.0f, 1.0f)) return at("min_p", r, "outside [0, 1]");
  if (!within(v.typical_p[r], 0.0f, 1.0f)) return at("typical_p", r, "outside [0, 1]");
  if (!within(v.presence[r], -kLargest, kLargest)) return at("presence", r, "not finite");
  if (!within(v.frequency[r], -kLargest, kLargest)) return at("frequency", r, "not finite");
  if (!within(v.repetition[r], 0.0f, kLargest) || v.repetition[r] == 0.0f)
    return at("repetition", r, "not a finite number > 0");
  if (v.position[r] < 0) return at("position", r, "negative");
  if (v.n_index[r] < 0) return at("n_index", r, "negative");
  if (v.target[r] < -1 || v.target[r] >= v.vocab) return at("target", r, "id outside the vocabulary");
  if (v.num_logprobs[r] < -1 || v.num_logprobs[r] > kMaxLogprobs) return at("num_logprobs", r, "outside -1 .. 20");
  if (v.mask_index[r] < -1 || v.mask_index[r] >= v.mask_count) return at("mask_index", r, "no such mask");
  return {};
}

}  // namespace

std::string validate(const SamplingView& v) {
  if (v.rows < 0 || v.vocab < 1) return "no vocabulary";
  for (std::int64_t r = 0; r < v.rows; ++r)
    if (std::string problem = check_row(v, r); !problem.empty()) return problem;
  std::string problem = check_ragged("banned", v.banned_offsets, v.rows, v.banned_size, v.banned_ids, v.vocab);
  if (problem.empty()) problem = check_ragged("bias", v.bias_offsets, v.rows, v.bias_size, v.bias_ids, v.vocab);
  if (problem.empty()) problem = check_ragged("seen", v.seen_offsets, v.rows, v.seen_size, v.seen_ids, v.vocab);
  if (!problem.empty()) return problem;
  for (std::int64_t i = 0; i < v.bias_size; ++i)
    if (!std::isfinite(v.bias_values[i])) return at("bias_values", i, "not finite");
  for (std::int64_t i = 0; i < v.seen_size; ++i)
    if (v.seen_counts[i] < 0) return at("seen_counts", i, "negative");
  return {};
}

SampleRow sample_row_view(const SamplingView& v, std::int64_t r) {
  SampleRow row;
  row.vocab = v.vocab;
  row.temperature = v.temperature[r];
  row.top_k = v.top_k[r];
  row.top_p = v.top_p[r];
  row.min_p = v.min_p[r];
  row.typical_p = v.typical_p[r];
  row.presence = v.presence[r];
  row.frequency = v.frequency[r];
  row.repetition = v.repetition[r];
  row.seed = v.seed[r];
  row.position = static_cast<std::uint64_t>(v.position[r]);
  row.n_index = static_cast<std::uint32_t>(v.n_index[r]);
  row.target = v.target[r];
  row.num_logprobs = v.num_logprobs[r];
  if (v.mask_index[r] >= 0) row.allowed = v.masks + v.mask_index[r] * ((v.vocab + 31) / 32);
  row.banned = v.banned_ids + v.banned_offsets[r];
  row.banned_count = v.banned_offsets[r + 1] - v.banned_offsets[r];
  row.bias_ids = v.bias_ids + v.bias_offsets[r];
  row.bias_values = v.bias_values + v.bias_offsets[r];
  row.bias_count = v.bias_offsets[r + 1] - v.bias_offsets[r];
  row.seen_ids = v.seen_ids + v.seen_offsets[r];
  row.seen_counts = v.seen_counts + v.seen_offsets[r];
  row.seen_count = v.seen_offsets[r + 1] - v.seen_offsets[r];
  return row;
}

std::int32_t max_logprobs(const SamplingView& v) {
  std::int32_t most = 0;
  for (std::int64_t r = 0; r < v.rows; ++r)
    if (v.num_logprobs[r] > most) most = v.num_logprobs[r];
  return most;
}

}  // namespace octavo
