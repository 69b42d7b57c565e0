// Edits, logprobs, refused rows and the check of the arrays that come from Python.
#include <numeric>

#include "ops/sample_rows.h"
#include "sample_reference.h"

using namespace octavo;
using namespace octavo::sampling_tests;

namespace {

void test_edits_follow_their_order() {
  const std::vector<float> logits = {2.0f, -2.0f, 1.0f, 0.5f, 3.0f, 4.0f, -kMax, kMax};
  SampleRow row;
  const std::uint32_t allowed = 0xffffffdfu;  // not 5
  const std::int32_t banned[] = {4}, bias_ids[] = {2, 2, 4, 6}, seen[] = {0, 1, 2, 4, 6, 7},
                     counts[] = {0, 3, 2, 1, 1, 1};
  const float bias[] = {1.0f, 0.5f, 100.0f, -kMax};
  row.allowed = &allowed;
  row.banned = banned;
  row.banned_count = 1;
  row.bias_ids = bias_ids;
  row.bias_values = bias;
  row.bias_count = 4;
  row.seen_ids = seen;
  row.seen_counts = counts;
  row.seen_count = 6;
  row.repetition = 0.5f;
  row.frequency = 0.25f;
  row.presence = 0.125f;
  const std::vector<float> expected = {4.0f,                           // in the prompt only: repetition alone
                                       -1.0f - 0.75f - 0.125f,         // negative: times r
                                       (2.5f / 0.5f) - 0.5f - 0.125f,  // both biases, then the penalties
                                       0.5f,
                                       -kInf,
                                       -kInf,  // a mask is not undone by a bias
                                       -kMax / 2,
                                       kMax};  // clamped, never infinite
  CHECK(run_all(row, logits).edited == expected);
}

void test_random_edits_give_the_same_bits_and_never_a_masked_id() {
  Rng rng{16};
  for (std::size_t n : kVocabs)
    for (const auto& logits : rows_of(rng, n)) {
      SampleRow row;
      row.seed = rng.next();
      row.temperature = rng.next() % 3 == 0 ? 0.0f : rng.uniform(0.1f, 2.0f);
      row.top_p = rng.uniform(0.3f, 1.1f) > 1.0f ? 1.0f : 0.8f;
      row.repetition = rng.uniform(0.5f, 2.0f);
      row.frequency = rng.uniform(-2, 2);
      row.presence = rng.uniform(-2, 2);
      row.num_logprobs = static_cast<std::int32_t>(rng.next() % 21);
      std::vector<std::uint32_t> allowed((n + 31) / 32);
      for (auto& word : allowed)
        word = rng.next() % 3 == 0 ? ~0u : rng.next() % 2 == 0 ? 0u : static_cast<std::uint32_t>(rng.next());
      std::vector<std::int32_t> ids, counts;
      std::vector<float> bias;
      for (int i = 0; i < 20; ++i) {
        ids.push_back(static_cast<std::int32_t>(rng.next() % n));
        counts.push_back(static_cast<std::int32_t>(rng.next() % 5));
        bias.push_back(rng.uniform(-100, 100));
      }
      row.allowed = allowed.data();
      row.banned = ids.data();
      row.banned_count = 5;
      row.bias_ids = ids.data() + 3;
      row.bias_values = bias.data();
      row.bias_count = 10;
      row.seen_ids = ids.data();
      row.seen_counts = counts.data();
      row.seen_count = 20;
      const Answer answer = run_all(row, logits);
      const auto free = [&](std::size_t i) {
        return (allowed[i / 32] >> (i % 32) & 1u) != 0 &&
               std::find(ids.begin(), ids.begin() + 5, static_cast<std::int32_t>(i)) == ids.begin() + 5;
      };
      bool left = false;
      for (std::size_t i = 0; i < n; ++i) left |= free(i);
      CHECK(answer.ok == left);
      CHECK(left ? free(static_cast<std::size_t>(answer.id)) : answer.id == -1);
    }
}

void test_logprobs_come_from_the_raw_logits() {
  Rng rng{17};
  for (std::size_t n : kVocabs)
    for (const auto& logits : rows_of(rng, n)) {
      const std::int32_t banned =
          static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
      SampleRow row;
      row.num_logprobs = static_cast<std::int32_t>(rng.next() % 21);
      row.banned = &banned;
      row.banned_count = n > 1 ? 1 : 0;
      const Answer a = run_all(row, logits);
      CHECK(a.ok);
      double sum = 0;
      const double max = logits[static_cast<std::size_t>(banned)];
      for (float v : logits) sum += std::exp(static_cast<double>(v) - max);
      const auto close = [&](float got, std::int32_t id) {
        const double want = static_cast<double>(logits[static_cast<std::size_t>(id)]) - max - std::log(sum);
        return std::fabs(want) > kMax ? got < -kMax || got == -kInf
                                      : std::fabs(got - want) <= 2e-6 * (1 + std::fabs(want));
      };
      CHECK(close(a.logprob, a.id));
      std::vector<std::int32_t> order(n);
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](auto i, auto j) { return logits[i] > logits[j]; });
      CHECK(a.rank == 1 + std::count_if(logits.begin(), logits.end(), [&](float v) { return v > logits[a.id]; }));
      for (std::size_t i = 0; i < a.top_ids.size(); ++i) {
        CHECK(a.top_ids[i] == (i < n ? order[i] : -1));
        CHECK(i < n ? close(a.top_logprobs[i], order[i]) : a.top_logprobs[i] == -kInf);
      }
      row.target = static_cast<std::int32_t>(rng.next() % n);
      const Answer scored = run_all(row, logits);
      CHECK(scored.ok && scored.id == row.target && close(scored.logprob, row.target));
      CHECK(scored.edited == logits);
    }
}

void test_a_row_with_nan_or_infinity_or_nothing_left_fails() {
  Rng rng{18};
  for (std::size_t n : kVocabs)
    for (float bad : {kInf, -kInf, std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::quiet_NaN()})
      for (std::size_t at : {std::size_t{0}, n / 2, n - 1}) {
        auto logits = normal_row(rng, n, 1.0f);
        logits[at] = bad;
        SampleRow row;
        row.num_logprobs = 2;
        row.temperature = at % 2 == 0 ? 0.0f : 1.0f;
        const Answer a = run_all(row, logits);
        CHECK(!a.ok && a.id == -1 && a.top_ids[0] == -1);
      }
  const std::uint32_t none = 0;
  SampleRow row;
  row.allowed = &none;
  CHECK(!run_all(row, {1.0f, 2.0f}).ok);
  row.temperature = 0.0f;
  CHECK(!run_all(row, {1.0f, 2.0f}).ok);
}

void test_tiny_and_huge_temperatures_are_defined() {
  SampleRow row;
  for (float t : {1e-45f, 1e-30f, 1e-4f}) {
    row.temperature = t;
    CHECK(run_all(row, {1.0f, 5.0f, 4.0f, -kMax}).id == 1);
  }
  row.temperature = 1e30f;
  std::vector<int> seen(3, 0);
  for (row.seed = 0; row.seed < 200; ++row.seed)
    seen[static_cast<std::size_t>(run_all(row, {0.0f, 1.0f, 2.0f}).id)] += 1;
  for (int count : seen) CHECK(count > 30);
}

// A view of two rows that is well formed; each test breaks one thing.
struct TwoRows {
  float ones[2] = {1, 1}, zeros[2] = {0, 0}, bias_values[1] = {1};
  std::int32_t zero[2] = {0, 0}, minus[2] = {-1, -1}, offsets[3] = {0, 0, 1}, ids[1] = {9}, counts[1] = {1};
  std::uint64_t seed[2] = {1, 2};
  std::int64_t position[2] = {0, 1};
  SamplingView view;

  TwoRows() {
    view.rows = 2;
    view.vocab = 10;
    view.temperature = view.top_p = view.typical_p = view.repetition = ones;
    view.min_p = view.presence = view.frequency = zeros;
    view.top_k = view.n_index = zero;
    view.target = view.num_logprobs = view.mask_index = minus;
    view.seed = seed;
    view.position = position;
    view.banned_offsets = view.bias_offsets = view.seen_offsets = offsets;
    view.banned_ids = view.bias_ids = view.seen_ids = ids;
    view.banned_size = view.bias_size = view.seen_size = 1;
    view.bias_values = bias_values;
    view.seen_counts = counts;
  }
  bool refused(const char* field) const { return validate(view).rfind(field, 0) == 0; }
};

void test_a_view_is_refused_by_the_name_of_what_is_wrong() {
  TwoRows good;
  CHECK(validate(good.view).empty());
  CHECK(sample_row_view(good.view, 0).banned_count == 0 && sample_row_view(good.view, 1).banned[0] == 9);
  const std::int32_t outside[2] = {0, 10}, negative[2] = {0, -1}, many[2] = {0, 21}, bad_offsets[3] = {0, 2, 1};
  const float nan[2] = {0, std::nanf("")}, over[2] = {1, 1.5f}, zeros[2] = {1, 0}, infinite[1] = {kInf};
  const std::int64_t before[2] = {0, -1};
  const auto check = [](const char* field, const std::function<void(SamplingView&)>& change) {
    TwoRows rows;
    change(rows.view);
    CHECK(rows.refused(field));
  };
  check("temperature", [&](auto& v) { v.temperature = nan; });
  check("top_p", [&](auto& v) { v.top_p = over; });
  check("min_p", [&](auto& v) { v.min_p = nan; });
  check("typical_p", [&](auto& v) { v.typical_p = over; });
  check("presence", [&](auto& v) { v.presence = nan; });
  check("frequency", [&](auto& v) { v.frequency = nan; });
  check("repetition", [&](auto& v) { v.repetition = zeros; });
  check("top_k", [&](auto& v) { v.top_k = negative; });
  check("position", [&](auto& v) { v.position = before; });
  check("n_index", [&](auto& v) { v.n_index = negative; });
  check("target", [&](auto& v) { v.target = outside; });
  check("num_logprobs", [&](auto& v) { v.num_logprobs = many; });
  check("mask_index", [&](auto& v) { v.mask_index = outside; });
  check("banned", [&](auto& v) { v.banned_ids = outside + 1; });
  check("bias", [&](auto& v) { v.bias_ids = negative + 1; });
  check("seen", [&](auto& v) { v.seen_ids = outside + 1; });
  check("banned", [&](auto& v) { v.banned_offsets = bad_offsets; });
  check("seen_counts", [&](auto& v) { v.seen_counts = negative + 1; });
  check("bias_values", [&](auto& v) { v.bias_values = infinite; });
}

}  // namespace

int main() {
  test_edits_follow_their_order();
  test_random_edits_give_the_same_bits_and_never_a_masked_id();
  test_logprobs_come_from_the_raw_logits();
  test_a_row_with_nan_or_infinity_or_nothing_left_fails();
  test_tiny_and_huge_temperatures_are_defined();
  test_a_view_is_refused_by_the_name_of_what_is_wrong();
  return 0;
}
