// Weights, filters and draws: scalar and AVX2 give the same bits, both agree with the reference, draws follow the
// weights.
#include "ops/sample_filters.h"
#include "sample_reference.h"

using namespace octavo;
using namespace octavo::sampling_tests;

namespace {

void test_philox_gives_the_published_vectors() {
  using Four = std::array<std::uint32_t, 4>;
  CHECK((philox4x32_10({0, 0, 0, 0}, {0, 0}) == Four{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}));
  const std::uint32_t f = 0xffffffffu;
  CHECK((philox4x32_10({f, f, f, f}, {f, f}) == Four{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}));
  CHECK((philox4x32_10({0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}, {0xa4093822u, 0x299f31d0u}) ==
         Four{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}));
}

void check_against_reference(SampleRow row, const std::vector<float>& logits) {
  const Answer got = run_all(row, logits);
  CHECK(got.ok);
  CHECK(got.id == reference_draw(row, reference_survivors(row, logits)));
}

void test_each_filter_and_all_together_match_the_sorting_reference() {
  Rng rng{11};
  for (std::size_t n : kVocabs)
    for (const auto& logits : rows_of(rng, n))
      for (int round = 0; round < 12; ++round) {
        SampleRow row;
        row.seed = rng.next();
        row.position = rng.next();
        row.n_index = static_cast<std::uint32_t>(rng.next() % 16);
        row.temperature = round % 4 == 3 ? rng.uniform(0.01f, 4.0f) : 1.0f;
        const auto use = [&](int filter) { return round == filter || (round > 4 && rng.next() % 2 == 0); };
        if (use(1)) row.min_p = round == 1 ? 0.05f : rng.uniform(0, 1);
        if (use(2)) row.top_k = static_cast<std::int32_t>(1 + rng.next() % (n + 2));
        if (use(3)) row.typical_p = rng.uniform(0.001f, 1);
        if (use(4)) row.top_p = round == 4 ? 0.9f : rng.uniform(0.001f, 1);
        check_against_reference(row, logits);
      }
}

// The set itself, not only one draw from it, on weights of every kind, small ones too (where rounding a mass shows).
void test_filters_keep_exactly_the_reference_set() {
  Rng rng{19};
  SampleScratch scratch;
  scratch.reserve(5000);
  for (int round = 0; round < 3000; ++round) {
    const std::size_t n = round % 20 == 0 ? 1 + rng.next() % 5000 : 1 + rng.next() % 200;
    const unsigned kind = static_cast<unsigned>(rng.next() % 6);
    std::vector<std::uint32_t> weights(n);
    for (auto& w : weights) {
      const std::uint64_t any = rng.next();
      w = kind == 0   ? static_cast<std::uint32_t>(any % 4)
          : kind == 1 ? static_cast<std::uint32_t>(any % (kWeightOne + 1))
          : kind == 2 ? kWeightOne >> (any % 32)
          : kind == 3 ? 7
          : kind == 4 ? (1u << 20) + static_cast<std::uint32_t>(any % 64)  // logs one unit apart
                      : static_cast<std::uint32_t>(any % 100000);
    }
    weights[rng.next() % n] = kind == 3 ? 7 : 3;
    SampleRow row;
    if (rng.next() % 2) row.top_k = static_cast<std::int32_t>(1 + rng.next() % n);
    if (rng.next() % 2) row.typical_p = rng.uniform(0.001f, 1);
    if (rng.next() % 2) row.top_p = rng.next() % 3 == 0 ? 0.5f : rng.uniform(0.001f, 1);
    std::vector<Weighted> set;
    for (std::size_t i = 0; i < n; ++i)
      if (weights[i] > 0) set.emplace_back(static_cast<std::int32_t>(i), weights[i]);
    const std::uint64_t total = total_of(set);
    set = reference_filter(row, std::move(set));
    for (const SamplePasses* passes : all_passes()) {
      std::copy(weights.begin(), weights.end(), scratch.weights.begin());
      Survivors s{scratch.weights.data(), scratch.ids.data(), static_cast<std::int64_t>(n), total, true};
      if (row.top_k > 0) keep_top_k(*passes, row.top_k, s, scratch);
      if (row.typical_p < 1.0f) keep_typical_p(*passes, row.typical_p, s, scratch);
      if (row.top_p < 1.0f) keep_top_p(*passes, row.top_p, s, scratch);
      std::vector<Weighted> kept;
      for (std::int64_t i = 0; i < s.count; ++i)
        if (s.weights[i] > 0) kept.emplace_back(static_cast<std::int32_t>(s.whole ? i : s.ids[i]), s.weights[i]);
      CHECK(kept == set && s.total == total_of(set));
    }
  }
}

void test_weights_and_logs_have_the_same_bits_and_no_clamp_shows() {
  for (float t : {1.0f, 0.3f, 1e-30f})
    for (std::uint32_t smallest : {1u, 5u, 1u << 20}) {
      std::vector<float> x;
      for (int i = 0; i < 100003; ++i) x.push_back(-23.0f * t * static_cast<float>(i) / 100003.0f);
      const auto n = static_cast<std::int64_t>(x.size());
      std::vector<std::uint32_t> expected(x.size()), got(x.size());
      std::uint64_t total = 0;
      for (std::size_t i = 0; i < x.size(); ++i) {
        const double weight = std::nearbyint(static_cast<double>(scalar::exp_(x[i] / t)) * 1073741824.0);
        expected[i] = weight < smallest ? 0 : static_cast<std::uint32_t>(weight);
        total += expected[i];
      }
      for (const SamplePasses* passes : all_passes()) {
        CHECK(passes->weights(x.data(), n, 0.0f, t, smallest, got.data()) == total);
        CHECK(got == expected);
      }
    }
  std::vector<std::uint32_t> w, first, other;
  for (std::uint32_t i = 1; i < kWeightOne - 10000; i += 9973) w.push_back(i);
  w.push_back(kWeightOne);
  first.resize(w.size());
  other.resize(w.size());
  all_passes().front()->typical_logs(w.data(), static_cast<std::int64_t>(w.size()), first.data());
  all_passes().back()->typical_logs(w.data(), static_cast<std::int64_t>(w.size()), other.data());
  CHECK(first == other);
  for (std::size_t i = 0; i < w.size(); ++i) CHECK(std::fabs(first[i] / 1048576.0 - std::log(double{1} * w[i])) < 2e-6);
}

// Every survivor turns up and nothing else.
void test_draws_cover_exactly_the_survivors() {
  Rng rng{12};
  const auto logits = normal_row(rng, 40, 1.0f);
  for (int filter = 0; filter < 4; ++filter) {
    SampleRow row;
    if (filter == 0) row.top_k = 5;
    if (filter == 1) row.top_p = 0.5f;
    if (filter == 2) row.min_p = 0.3f;
    if (filter == 3) row.typical_p = 0.4f;
    const auto expected = reference_survivors(row, logits);
    CHECK(expected.size() > 1 && expected.size() < 40);
    std::vector<int> seen(40, 0);
    for (row.seed = 0; row.seed < 3000; ++row.seed) seen[run_all(row, logits).id] += 1;
    for (std::int32_t i = 0; i < 40; ++i)
      CHECK((seen[i] > 0) == std::any_of(expected.begin(), expected.end(), [&](auto& w) { return w.first == i; }));
  }
}

void test_a_whole_vocabulary_matches_the_reference() {
  Rng rng{13};
  for (const auto& logits : rows_of(rng, 49152))
    for (int round = 0; round < 4; ++round) {
      SampleRow row;
      row.seed = rng.next();
      row.top_p = round == 0 ? 1.0f : rng.uniform(0.1f, 0.999f);
      if (round == 2) row.top_k = 50;
      if (round == 3) row.typical_p = 0.7f;
      check_against_reference(row, logits);
    }
}

void test_draw_frequencies_follow_the_weights() {
  Rng rng{14};
  const auto logits = normal_row(rng, 50, 1.0f);
  SampleRow row;
  row.top_p = 0.95f;
  const auto set = reference_survivors(row, logits);
  std::vector<double> expected(50, 0.0);
  for (const auto& w : set)
    expected[w.first] = 1e5 * static_cast<double>(w.second) / static_cast<double>(total_of(set));
  std::vector<double> seen(50, 0.0);
  SampleScratch scratch;
  row.seed = 42;
  for (row.position = 0; row.position < 100000; ++row.position)
    seen[run(*all_passes().back(), row, logits, scratch).id] += 1;
  double chi = 0;
  for (int i = 0; i < 50; ++i) {
    if (expected[i] == 0) CHECK(seen[i] == 0);
    if (expected[i] > 0) chi += (seen[i] - expected[i]) * (seen[i] - expected[i]) / expected[i];
  }
  const double freedom = static_cast<double>(set.size()) - 1;
  CHECK(chi < freedom + 4 * std::sqrt(2 * freedom));  // about one in 10^4 for another seed; this one is fixed
  CHECK(chi > freedom - 4 * std::sqrt(2 * freedom));
}

void test_every_part_of_the_address_changes_the_draw() {
  const std::vector<float> logits(1000, 0.0f);
  SampleRow base;
  base.seed = 5;
  base.position = 7;
  base.n_index = 1;
  const std::int32_t id = run_all(base, logits).id;
  SampleRow other = base;
  other.seed += std::uint64_t{1} << 40;
  CHECK(run_all(other, logits).id != id);
  other = base;
  other.position += std::uint64_t{1} << 40;
  CHECK(run_all(other, logits).id != id);
  other = base;
  other.n_index = 2;
  CHECK(run_all(other, logits).id != id);
  CHECK(run_all(base, logits).id == id);
}

void test_greedy_takes_the_first_of_the_largest() {
  Rng rng{15};
  for (std::size_t n : kVocabs)
    for (const auto& logits : rows_of(rng, n)) {
      SampleRow row;
      row.temperature = 0.0f;
      row.top_k = 3;
      row.top_p = 0.5f;
      const auto best = std::max_element(logits.begin(), logits.end()) - logits.begin();
      CHECK(run_all(row, logits).id == best);
    }
}

}  // namespace

int main() {
  test_philox_gives_the_published_vectors();
  test_each_filter_and_all_together_match_the_sorting_reference();
  test_filters_keep_exactly_the_reference_set();
  test_weights_and_logs_have_the_same_bits_and_no_clamp_shows();
  test_draws_cover_exactly_the_survivors();
  test_a_whole_vocabulary_matches_the_reference();
  test_draw_frequencies_follow_the_weights();
  test_every_part_of_the_address_changes_the_draw();
  test_greedy_takes_the_first_of_the_largest();
  return 0;
}
