// Sampling one row of logits. All randomness and every filter work on integers, so no order of summation matters.
//
// The row is refused (ok = false) when a logit is NaN or infinite. All float arithmetic is float32, one rounding an
// operation, no FMA outside exp_ and log_.
//
// Raw: logprob(i) = (raw[i] - max) - log_(sum of exp_(raw - max)), max taken as max + 0.0f (so never -0). The sum goes
//   in segments of 4,096 ids, each 16 partial sums (id i to i mod 16) and the tree i+8, i+4, i+2, i+1, segments added
//   in order to 0. rank = 1 + the number of ids with a greater raw logit. The k best are ordered by raw logit, ties to
//   the smaller id; past the vocabulary they are (-1, -inf). A row with a target stops here.
//
// Edits, in this order, on the row itself; a masked id becomes -inf and stays so; a finite value that overflows is
//   clamped to the largest finite float of its sign:
//     allowed mask; banned ids; bias (added in the order given);
//     for every seen id:  repetition: v > 0 ? v / r : v * r;  then v -= frequency * float(count);
//     then v -= presence if count > 0.
//
// Greedy (temperature 0): arg-max of the edited row, ties to the smaller id (-0 equals +0). Filters change nothing.
//
// Weights: weight(i) = rint(2^30 * exp_(z)), z = max((x[i] - max) / T, -22) with max over the edited row; below -22 the
//   weight is 0 anyway, and the clamp keeps infinities out of exp_. The largest weight is 2^30. An id of weight 0 is
//   never drawn. Sums are u64.
//
// Filters, each on the survivors of the one before, W = the sum of their weights. "Best first" means by the key named,
//   ties to the smaller id; mass(p) = max(1, ceil(rint(p * 2^32) * W / 2^32)):
//     min_p      keeps weight >= min_p * 2^30 (compared exactly).
//     top_k      keeps the k best by weight.
//     typical_p  (Meister et al. 2022) |-log p(i) - H| equals |log w(i) - M| with M the mean of log w under p. In fixed
//                point: L(i) = max(0, rint(2^20 * log_(float(w(i))))), M = floor(sum of w(i) L(i) / W); by smallest
//                |L(i) - M|, keeps the shortest prefix whose weight reaches mass(typical_p).
//     top_p      by weight, keeps the shortest prefix whose weight reaches mass(top_p).
//
// Draw: r = floor(u * W / 2^64), u = the first 64 bits (word 0 low, word 1 high) of philox4x32-10 with key = {seed low,
//   seed high} and counter = {position low, position high, n_index, purpose}; the first id, in increasing order, whose
//   running sum exceeds r.
#pragma once
#include <cstdint>
#include <vector>

namespace octavo {

enum class Purpose : std::uint32_t { Sample = 0 };

struct SampleRow {
  float* logits = nullptr;  // [vocab]; overwritten
  std::int64_t vocab = 0;

  float temperature = 1.0f;  // 0: greedy
  std::int32_t top_k = 0;    // 0: off
  float top_p = 1.0f, min_p = 0.0f, typical_p = 1.0f;
  float presence = 0.0f, frequency = 0.0f, repetition = 1.0f;

  std::uint64_t seed = 0;
  std::uint64_t position = 0;  // absolute position of the token drawn
  std::uint32_t n_index = 0;

  const std::uint32_t* allowed = nullptr;  // bitmap of ceil(vocab / 32) words, or null: all
  const std::int32_t* banned = nullptr;
  std::int64_t banned_count = 0;
  const std::int32_t* bias_ids = nullptr;
  const float* bias_values = nullptr;
  std::int64_t bias_count = 0;
  const std::int32_t* seen_ids = nullptr;     // distinct ids of prompt and output, for the penalties
  const std::int32_t* seen_counts = nullptr;  // times in the output (0: in the prompt only)
  std::int64_t seen_count = 0;

  std::int32_t target = -1;        // >= 0: draw nothing, report this id's logprob (prompt logprobs, scoring)
  std::int32_t num_logprobs = -1;  // -1: none; 0: the chosen id's; k: also the k best
};

struct SampleResult {
  std::int32_t id = -1;
  float logprob = 0.0f;             // of id, when num_logprobs >= 0
  std::int32_t rank = 0;            // 1 + ids with a greater raw logit, when num_logprobs >= 0
  std::int32_t* top_ids = nullptr;  // [num_logprobs], best first, ties to the smaller id
  float* top_logprobs = nullptr;    // [num_logprobs]
  bool ok = false;                  // false: a NaN or infinity in the row, or nothing left to draw from; id is then -1
};

struct SampleScratch {                      // one a thread, kept between rows
  std::vector<std::uint32_t> weights, ids;  // the survivors
  std::vector<std::uint32_t> keys, values;  // a selection's undecided part
  std::vector<std::uint32_t> typical;       // typical_p's keys
  std::vector<float> raw;                   // logits before the edits, when logprobs are asked for
  std::vector<float> maxima;                // of blocks of the vocabulary

  // Makes room for rows of this width; sample_row itself allocates only when this was not called.
  void reserve(std::int64_t vocab);
};

}  // namespace octavo
