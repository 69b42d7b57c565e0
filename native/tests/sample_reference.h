// For the sampling tests: running every instruction set at once, the plain sorting reference, and rows of every kind.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "check.h"
#include "ops/philox.h"
#include "ops/sample_passes.h"
#include "simd/kernels.h"
#include "simd/math_scalar.h"

namespace octavo::sampling_tests {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kMax = std::numeric_limits<float>::max();

inline std::vector<const SamplePasses*> all_passes() {
  std::vector<const SamplePasses*> all = {&scalar::sample_passes()};
#if defined(__x86_64__)
  if (cpu_features().avx2) all.push_back(&avx2::sample_passes());
#endif
  return all;
}

struct Answer {
  std::int32_t id = -1, rank = 0;
  float logprob = 0.0f;
  bool ok = false;
  std::vector<std::int32_t> top_ids;
  std::vector<float> top_logprobs;
  std::vector<float> edited;  // the row afterwards

  bool same_bits(const Answer& o) const {
    const auto bits = [](const std::vector<float>& a, const std::vector<float>& b) {
      return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), 4 * a.size()) == 0);
    };
    return id == o.id && rank == o.rank && ok == o.ok && top_ids == o.top_ids && bits(top_logprobs, o.top_logprobs) &&
           std::memcmp(&logprob, &o.logprob, 4) == 0 && bits(edited, o.edited);
  }
};

// Runs one table on a copy of the logits between canaries.
inline Answer run(const SamplePasses& passes, SampleRow row, const std::vector<float>& logits, SampleScratch& scratch) {
  constexpr std::size_t kGuard = 16;
  const float canary = -12345.5f;
  std::vector<float> guarded(kGuard, canary);
  guarded.insert(guarded.end(), logits.begin(), logits.end());
  guarded.insert(guarded.end(), kGuard, canary);
  row.logits = guarded.data() + kGuard;
  row.vocab = static_cast<std::int64_t>(logits.size());
  const std::size_t k = static_cast<std::size_t>(std::max(row.num_logprobs, 0));
  Answer answer;
  answer.top_ids.assign(k + 1, 777);
  answer.top_logprobs.assign(k + 1, canary);
  SampleResult result;
  result.top_ids = answer.top_ids.data();
  result.top_logprobs = answer.top_logprobs.data();
  sample_row_with(passes, row, scratch, result);
  CHECK(answer.top_ids[k] == 777 && answer.top_logprobs[k] == canary);
  for (std::size_t i = 0; i < kGuard; ++i) CHECK(guarded[i] == canary && guarded[kGuard + logits.size() + i] == canary);
  answer.top_ids.pop_back();
  answer.top_logprobs.pop_back();
  answer.edited.assign(row.logits, row.logits + row.vocab);
  answer.id = result.id;
  answer.rank = result.rank;
  answer.logprob = result.logprob;
  answer.ok = result.ok;
  return answer;
}

// One answer from every instruction set, which must agree.
inline Answer run_all(const SampleRow& row, const std::vector<float>& logits) {
  static std::vector<SampleScratch> scratch(2);
  const auto all = all_passes();
  const Answer first = run(*all[0], row, logits, scratch[0]);
  for (std::size_t i = 1; i < all.size(); ++i) CHECK(first.same_bits(run(*all[i], row, logits, scratch[i])));
  return first;
}

// ---- the plain reference, from the words of sample.h

using Weighted = std::pair<std::int32_t, std::uint64_t>;  // id, weight

inline std::uint64_t total_of(const std::vector<Weighted>& set) {
  std::uint64_t sum = 0;
  for (const auto& w : set) sum += w.second;
  return sum;
}

// The shortest prefix, best first, whose weight (or count) reaches `need`; back in order of ids.
inline std::vector<Weighted> prefix(std::vector<Weighted> set,
                                    const std::function<std::int64_t(const Weighted&)>& badness, std::uint64_t need,
                                    bool counting) {
  std::stable_sort(set.begin(), set.end(), [&](const auto& a, const auto& b) { return badness(a) < badness(b); });
  std::size_t keep = 0;
  for (std::uint64_t sum = 0; keep < set.size() && sum < need; ++keep) sum += counting ? 1 : set[keep].second;
  set.resize(keep);
  std::sort(set.begin(), set.end());
  return set;
}

inline std::uint64_t mass(float p, std::uint64_t total) {
  const auto fixed = static_cast<unsigned __int128>(std::rint(static_cast<double>(p) * 4294967296.0));
  const unsigned __int128 one = static_cast<unsigned __int128>(1) << 32;
  return std::max<std::uint64_t>(1, static_cast<std::uint64_t>((fixed * total + (one - 1)) / one));
}

inline std::vector<Weighted> reference_filter(const SampleRow& row, std::vector<Weighted> set) {
  const auto light = [](const Weighted& w) { return -static_cast<std::int64_t>(w.second); };
  if (row.top_k > 0) set = prefix(set, light, static_cast<std::uint64_t>(row.top_k), true);
  if (row.typical_p < 1.0f) {
    const auto log_of = [](const Weighted& w) {
      const float scaled = scalar::log_(static_cast<float>(w.second)) * 1048576.0f;
      return std::max<std::int64_t>(0, static_cast<std::int64_t>(std::nearbyint(scaled)));
    };
    unsigned __int128 sum = 0;
    for (const auto& w : set) sum += static_cast<unsigned __int128>(w.second) * static_cast<std::uint64_t>(log_of(w));
    const auto mean = static_cast<std::int64_t>(sum / total_of(set));
    set = prefix(
        set, [&](const Weighted& w) { return std::abs(log_of(w) - mean); }, mass(row.typical_p, total_of(set)), false);
  }
  if (row.top_p < 1.0f) set = prefix(set, light, mass(row.top_p, total_of(set)), false);
  return set;
}

inline std::vector<Weighted> reference_survivors(const SampleRow& row, const std::vector<float>& x) {
  const float max = *std::max_element(x.begin(), x.end()) + 0.0f;
  std::vector<Weighted> set;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const float z = std::max((x[i] - max) / row.temperature, -22.0f);
    const double weight = std::nearbyint(static_cast<double>(scalar::exp_(z)) * 1073741824.0);
    if (weight >= 1.0 && weight >= static_cast<double>(row.min_p) * 1073741824.0)
      set.emplace_back(static_cast<std::int32_t>(i), static_cast<std::uint64_t>(weight));
  }
  return reference_filter(row, std::move(set));
}

inline std::int32_t reference_draw(const SampleRow& row, const std::vector<Weighted>& set) {
  const auto word = philox4x32_10(
      {static_cast<std::uint32_t>(row.position), static_cast<std::uint32_t>(row.position >> 32), row.n_index, 0},
      {static_cast<std::uint32_t>(row.seed), static_cast<std::uint32_t>(row.seed >> 32)});
  const std::uint64_t u = static_cast<std::uint64_t>(word[1]) << 32 | word[0];
  const auto r = static_cast<std::uint64_t>(static_cast<unsigned __int128>(u) * total_of(set) >> 64);
  std::uint64_t sum = 0;
  for (const auto& w : set)
    if ((sum += w.second) > r) return w.first;
  return -1;
}

// ---- rows

inline std::vector<float> normal_row(Rng& rng, std::size_t n, float spread) {
  std::vector<float> x(n);
  for (float& v : x) v = spread * (rng.uniform(-1, 1) + rng.uniform(-1, 1) + rng.uniform(-1, 1));
  return x;
}

inline std::vector<std::vector<float>> rows_of(Rng& rng, std::size_t n) {
  std::vector<std::vector<float>> rows = {normal_row(rng, n, 1.0f), normal_row(rng, n, 6.0f),
                                          normal_row(rng, n, 40.0f)};
  rows.emplace_back(n, 0.25f);  // all equal
  rows.emplace_back(n, -0.0f);
  rows.back()[n / 2] = 0.0f;
  std::vector<float> ties(n), rising(n), extreme(n, -kMax), peaked = normal_row(rng, n, 0.5f);
  for (std::size_t i = 0; i < n; ++i) ties[i] = static_cast<float>(rng.next() % 3);
  for (std::size_t i = 0; i < n; ++i) rising[i] = 20.0f * static_cast<float>(i) / static_cast<float>(n);
  extreme[n - 1] = kMax;
  extreme[n / 3] = kMax;
  peaked[n / 4] = 12.0f;
  for (auto* row : {&ties, &rising, &extreme, &peaked}) rows.push_back(*row);
  return rows;
}

inline constexpr std::size_t kVocabs[] = {1, 2, 15, 16, 17, 63, 64, 65, 300, 4095, 4096, 4097};

}  // namespace octavo::sampling_tests
