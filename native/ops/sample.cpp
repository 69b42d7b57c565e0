#include "ops/sample.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/philox.h"
#include "ops/sample_filters.h"
#include "ops/sample_passes.h"
#include "simd/math_scalar.h"

namespace octavo {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();

float clamped(float v) { return std::clamp(v, -kLargest, kLargest); }

void mask_to(const std::uint32_t* allowed, float* x, std::int64_t vocab) {
  for (std::int64_t begin = 0; begin < vocab; begin += 32) {
    const std::uint32_t word = allowed[begin / 32];
    if (word == 0xffffffffu) continue;
    const std::int64_t end = std::min(vocab, begin + 32);
    if (word == 0) {
      std::fill(x + begin, x + end, -kInfinity);
      continue;
    }
    for (std::int64_t i = begin; i < end; ++i)
      if ((word >> (i - begin) & 1u) == 0) x[i] = -kInfinity;
  }
}

bool has_edits(const SampleRow& row) {
  const bool penalties = row.repetition != 1.0f || row.frequency != 0.0f || row.presence != 0.0f;
  return row.allowed != nullptr || row.banned_count > 0 || row.bias_count > 0 || (penalties && row.seen_count > 0);
}

void edit(const SampleRow& row) {
  float* x = row.logits;
  if (row.allowed != nullptr) mask_to(row.allowed, x, row.vocab);
  for (std::int64_t i = 0; i < row.banned_count; ++i) x[row.banned[i]] = -kInfinity;
  for (std::int64_t i = 0; i < row.bias_count; ++i) {
    float& v = x[row.bias_ids[i]];
    if (v != -kInfinity) v = clamped(v + row.bias_values[i]);
  }
  for (std::int64_t i = 0; i < row.seen_count; ++i) {
    float& v = x[row.seen_ids[i]];
    if (v == -kInfinity) continue;
    const std::int32_t count = row.seen_counts[i];
    v = clamped(v > 0.0f ? v / row.repetition : v * row.repetition);
    v = clamped(v - clamped(row.frequency * static_cast<float>(count)));
    if (count > 0) v = clamped(v - row.presence);
  }
}

struct Raw {
  const float* logits;
  std::int64_t vocab;
  float max, log_sum;

  float logprob(std::int32_t id) const { return (logits[id] - max) - log_sum; }
};

// The k best raw logits. The k-th largest block maximum bounds the k-th largest logit from below, so only the blocks
// that reach it are read.
void report_best(const SamplePasses& passes, const Raw& raw, std::int32_t k, float* maxima, SampleResult& result) {
  const std::int64_t blocks = (raw.vocab + kMaximaBlock - 1) / kMaximaBlock;
  std::int32_t* ids = result.top_ids;
  float* best = result.top_logprobs;  // logits first
  std::int32_t found = 0;
  const auto offer = [&](float value, std::int32_t id) {  // ids come in increasing order, so ties stay behind
    if (found == k && !(value > best[k - 1])) return;
    std::int32_t at = found < k ? found++ : k - 1;
    for (; at > 0 && value > best[at - 1]; --at) {
      best[at] = best[at - 1];
      ids[at] = ids[at - 1];
    }
    best[at] = value;
    ids[at] = id;
  };
  passes.block_max(raw.logits, raw.vocab, maxima);
  for (std::int64_t b = 0; b < blocks; ++b) offer(maxima[b], 0);
  const float bound = found == k ? best[k - 1] : -kInfinity;
  found = 0;
  for (std::int64_t b = 0; b < blocks; ++b) {
    if (maxima[b] < bound || (found == k && !(maxima[b] > best[k - 1]))) continue;
    const std::int64_t end = std::min(raw.vocab, (b + 1) * kMaximaBlock);
    for (std::int64_t i = b * kMaximaBlock; i < end; ++i)
      if (raw.logits[i] >= bound) offer(raw.logits[i], static_cast<std::int32_t>(i));
  }
  for (std::int32_t i = 0; i < k; ++i) {
    best[i] = i < found ? raw.logprob(ids[i]) : -kInfinity;
    ids[i] = i < found ? ids[i] : -1;
  }
}

// The id drawn from the edited row, or -1 when nothing is left.
std::int32_t choose(const SamplePasses& passes, const SampleRow& row, float max, SampleScratch& scratch) {
  if (max == -kInfinity) return -1;
  if (row.temperature == 0.0f) return static_cast<std::int32_t>(passes.find_first(row.logits, row.vocab, max));
  Survivors s;
  s.weights = scratch.weights.data();
  s.ids = scratch.ids.data();
  s.count = row.vocab;
  s.total = passes.weights(row.logits, row.vocab, max, row.temperature, min_p_weight(row.min_p), s.weights);
  if (row.top_k > 0) keep_top_k(passes, row.top_k, s, scratch);
  if (row.typical_p < 1.0f) keep_typical_p(passes, row.typical_p, s, scratch);
  if (row.top_p < 1.0f) keep_top_p(passes, row.top_p, s, scratch);
  const auto word =
      philox4x32_10({static_cast<std::uint32_t>(row.position), static_cast<std::uint32_t>(row.position >> 32),
                     row.n_index, static_cast<std::uint32_t>(Purpose::Sample)},
                    {static_cast<std::uint32_t>(row.seed), static_cast<std::uint32_t>(row.seed >> 32)});
  const std::uint64_t u = static_cast<std::uint64_t>(word[1]) << 32 | word[0];
  const auto r = static_cast<std::uint64_t>(static_cast<unsigned __int128>(u) * s.total >> 64);
  return id_at(passes, s, r);
}

}  // namespace

void SampleScratch::reserve(std::int64_t vocab) {
  const auto size = static_cast<std::size_t>(vocab + kCompactSlack);
  if (weights.size() >= size) return;
  for (auto* buffer : {&weights, &ids, &keys, &values, &typical}) buffer->resize(size);
  raw.resize(size);
  maxima.resize(size / kMaximaBlock + 1);
}

void sample_row_with(const SamplePasses& passes, const SampleRow& row, SampleScratch& scratch, SampleResult& result) {
  result.id = -1;
  result.logprob = 0.0f;
  result.rank = 0;
  result.ok = false;
  const std::int32_t k = std::max(row.num_logprobs, 0);
  for (std::int32_t i = 0; i < k; ++i) {
    result.top_ids[i] = -1;
    result.top_logprobs[i] = -kInfinity;
  }
  bool finite = false;
  float max = passes.row_max(row.logits, row.vocab, &finite);
  if (!finite) return;
  scratch.reserve(row.vocab);

  const bool edited = row.target < 0 && has_edits(row);
  Raw raw{row.logits, row.vocab, max, 0.0f};
  if (row.num_logprobs >= 0) {
    raw.log_sum = scalar::log_(passes.sum_exp(row.logits, row.vocab, max));
    if (edited) {
      std::copy_n(row.logits, row.vocab, scratch.raw.data());
      raw.logits = scratch.raw.data();
    }
  }
  if (edited) {
    edit(row);
    max = passes.row_max(row.logits, row.vocab, &finite);
  }
  result.id = row.target >= 0 ? row.target : choose(passes, row, max, scratch);
  if (result.id < 0) return;
  result.ok = true;
  if (row.num_logprobs < 0) return;
  result.logprob = raw.logprob(result.id);
  result.rank = static_cast<std::int32_t>(1 + passes.count_greater(raw.logits, raw.vocab, raw.logits[result.id]));
  if (k > 0) report_best(passes, raw, k, scratch.maxima.data(), result);
}

}  // namespace octavo
