#include "faulty_kernels.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>

#include "simd/kernels.h"
#include "simd/math_scalar.h"

namespace octavo {
namespace {

const Kernels& base() {
  static const Kernels* const best = find_kernels("auto");
  return *best;
}

// A single row is multiplied in another order than several rows are.
void linear_in_another_order(const LinearJob& job, std::int64_t panel_begin, std::int64_t panel_end) {
  const Weight& w = *job.w;
  if (job.rows != 1 || job.xq == nullptr || job.epilogue == Epilogue::SiluMul) {
    base().linear(job, panel_begin, panel_end);
    return;
  }
  std::vector<float> row(static_cast<std::size_t>(w.k));
  for (std::int64_t o = panel_begin * kPanel; o < std::min(panel_end * kPanel, w.n); ++o) {
    base().unpack_row(w, o, row.data());
    float acc = 0.0f;
    for (std::int64_t k = 0; k < w.k; ++k) {
      const auto x = job.row(0);
      acc = std::fma(row[static_cast<std::size_t>(k)], x.scales()[k / kBlock] * static_cast<float>(x.q()[k]), acc);
    }
    if (job.bias != nullptr) acc += job.bias[o];
    job.y[o] = job.epilogue == Epilogue::Add ? job.residual[o] + acc : acc;
  }
}

// Merges the partials of one query from the last segment to the first: segment s of head g is partials[s * group + g].
void merge_backwards(const AttentionJob& job, const float* partials, std::int64_t segments, std::int64_t row,
                     std::int64_t kv_head) {
  const std::int64_t group = job.heads / job.layout.kv_heads, d = job.layout.head_dim, size = d + 2;
  for (std::int64_t g = 0; g < group; ++g) {
    std::vector<float> total(static_cast<std::size_t>(size), 0.0f);
    total[0] = -std::numeric_limits<float>::infinity();
    for (std::int64_t s = segments - 1; s >= 0; --s) {
      const float* part = partials + (s * group + g) * size;
      const float most = std::max(total[0], part[0]);
      const float a = scalar::exp_(total[0] - most), b = scalar::exp_(part[0] - most);
      for (std::size_t i = 1; i < total.size(); ++i) total[i] = std::fma(total[i], a, part[i] * b);
      total[0] = most;
    }
    float* out = job.out + row * job.out_stride + (kv_head * group + g) * d;
    for (std::size_t i = 2; i < total.size(); ++i) out[i - 2] = total[i] / total[1];
  }
}

// A query that is alone in its item merges its segments backwards.
void attention_merging_backwards(const AttentionJob& job, const AttentionItem& item, AttentionScratch& scratch) {
  const std::int64_t segments = item.segment_end - item.segment_begin;
  if (item.row_end - item.row_begin != 1 || item.partial >= 0 || segments < 2) {
    base().attention(job, item, scratch);
    return;
  }
  const std::int64_t group = job.heads / job.layout.kv_heads;
  std::vector<float> partials(static_cast<std::size_t>(segments * group * (job.layout.head_dim + 2)));
  AttentionJob split = job;
  split.partials = partials.data();
  for (std::int64_t s = 0; s < segments; ++s) {
    AttentionItem one = item;
    one.segment_begin = item.segment_begin + s;
    one.segment_end = one.segment_begin + 1;
    one.partial = s * group;
    base().attention(split, one, scratch);
  }
  merge_backwards(job, partials.data(), segments, job.rows[item.row_begin].row, item.kv_head);
}

// Sequences that share an item merge their segments backwards: what they share comes last.
void attention_merging_the_prefix_last(const AttentionJob& job, const AttentionItem& item, AttentionScratch& scratch) {
  bool shared = false;
  for (std::int64_t r = item.row_begin + 1; r < item.row_end; ++r) shared |= job.rows[r].shared != kAllShared;
  if (!shared || item.partial >= 0) {
    base().attention(job, item, scratch);
    return;
  }
  for (std::int64_t r = item.row_begin; r < item.row_end; ++r) {
    const std::int64_t segments = job.rows[r].position / kSegmentTokens + 1;
    attention_merging_backwards(job, {r, r + 1, item.kv_head, 0, segments, -1}, scratch);
  }
}

void attention_merge_backwards(const AttentionJob& job, const AttentionPlan& plan, std::int64_t row_begin,
                               std::int64_t row_end) {
  base().attention_merge(job, plan, row_begin, row_end);
  for (const AttentionMerge& merge : plan.merges) {
    if (merge.row_end - merge.row_begin != 1 || merge.row_begin < row_begin || merge.row_begin >= row_end) continue;
    const AttentionRow& row = plan.rows[static_cast<std::size_t>(merge.row_begin)];
    merge_backwards(job, job.partials + merge.partial * (job.layout.head_dim + 2), row.position / kSegmentTokens + 1,
                    row.row, merge.kv_head);
  }
}

// Whether the sum is taken in partial sums depends on where the row lies.
void norm_by_address(const float* x, const float* weight, std::int64_t n, float eps, float* y) {
  if ((reinterpret_cast<std::uintptr_t>(x) / 256) % 2 == 0) {
    base().rms_norm(x, weight, n, eps, y);
    return;
  }
  float sum = 0.0f;
  for (std::int64_t i = 0; i < n; ++i) sum = std::fma(x[i], x[i], sum);
  const float r = 1.0f / std::sqrt(sum / static_cast<float>(n) + eps);
  for (std::int64_t i = 0; i < n; ++i) y[i] = (x[i] * r) * weight[i];
}

// Every other row of a step takes its log-sum-exp in one running sum.
void log_sum_exp_by_row(const SampleRow& row, SampleScratch& scratch, SampleResult& result) {
  const bool odd =
      reinterpret_cast<std::uintptr_t>(row.logits) / (static_cast<std::uintptr_t>(row.vocab) * sizeof(float)) % 2 == 1;
  const std::vector<float> raw(row.logits, row.logits + row.vocab);
  base().sample_row(row, scratch, result);
  if (!odd || row.num_logprobs < 0 || !result.ok) return;
  const float most = *std::max_element(raw.begin(), raw.end());
  float sum = 0.0f;
  for (float logit : raw) sum += scalar::exp_(logit - most);
  result.logprob = raw[static_cast<std::size_t>(result.id)] - most - scalar::log_(sum);
}

// The random numbers come in the order of the calls, not by their address.
void sample_by_call(const SampleRow& row, SampleScratch& scratch, SampleResult& result) {
  static std::atomic<std::uint64_t> calls{0};
  SampleRow moved = row;
  moved.position = calls.fetch_add(1);
  base().sample_row(moved, scratch, result);
}

// The right bits in three times the time, as after a bad change: the speed guard must notice.
template <class Work>
void three_times_as_slow(Work work) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point begin = Clock::now();
  work();
  const Clock::time_point end = begin + 3 * (Clock::now() - begin);
  while (Clock::now() < end) {
  }
}

void linear_slowly(const LinearJob& job, std::int64_t panel_begin, std::int64_t panel_end) {
  three_times_as_slow([&] { base().linear(job, panel_begin, panel_end); });
}

void attention_slowly(const AttentionJob& job, const AttentionItem& item, AttentionScratch& scratch) {
  three_times_as_slow([&] { base().attention(job, item, scratch); });
}

void register_slow_kernels() {
  static Kernels slow = base();
  slow.name = "faulty-slow";
  slow.linear = linear_slowly;
  slow.attention = attention_slowly;
  register_kernels(&slow);
}

}  // namespace

void register_faulty_kernels() {
  static Kernels linear = base(), merge = base(), norm = base(), lse = base(), randomness = base(), cascade = base();
  static bool done = false;
  if (done) return;
  done = true;
  register_slow_kernels();
  linear.name = "faulty-linear-order";
  linear.linear = linear_in_another_order;
  merge.name = "faulty-segment-merge";
  merge.attention = attention_merging_backwards;
  merge.attention_merge = attention_merge_backwards;
  cascade.name = "faulty-cascade";
  cascade.attention = attention_merging_the_prefix_last;
  norm.name = "faulty-norm-sums";
  norm.rms_norm = norm_by_address;
  lse.name = "faulty-log-sum-exp";
  lse.sample_row = log_sum_exp_by_row;
  randomness.name = "faulty-randomness";
  randomness.sample_row = sample_by_call;
  for (const Kernels* table : {&linear, &merge, &cascade, &norm, &lse, &randomness}) register_kernels(table);
}

}  // namespace octavo
