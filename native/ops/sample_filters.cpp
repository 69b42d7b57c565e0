#include "ops/sample_filters.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace octavo {
namespace {

using u128 = unsigned __int128;

// Keeps keys above `key` and, in order of position, keys equal to it until `need` of them (ids, or weight) is used up.
struct Cut {
  std::uint32_t key = 1;
  std::uint64_t need = 0;       // > 0
  std::uint64_t available = 0;  // what all positions with this key offer, >= need
};

// What is selected: by key, greatest first; a position offers its value, or 1 when only counting. Keys are 0 (never
// selected) or in 1 .. 2^30.
struct Selection {
  const std::uint32_t* keys;
  const std::uint32_t* values;  // may be `keys`
  std::int64_t count;
  bool counting;
  std::uint64_t total;  // offered by all keys >= 1
  std::uint64_t need;   // 1 .. total
};

// The part of a selection in which the cut is known to lie: keys in [low, high). What lies above it offers
// need_before - need, what is inside offers `inside`.
class CutSearch {
 public:
  CutSearch(const SamplePasses& passes, const Selection& s, SampleScratch& scratch)
      : passes_(passes),
        keys_(s.keys),
        values_(s.values),
        count_(s.count),
        counting_(s.counting),
        need_(s.need),
        inside_(s.total),
        own_keys_(scratch.keys.data()),
        own_values_(scratch.values.data()) {}

  Cut find() {
    for (;;) {
      if (high_ - low_ == 1) return {low_, need_, inside_};
      if (own_ && count_ <= kFew) return find_among_few();
      narrow(pivot());
    }
  }

 private:
  static constexpr std::int64_t kFew = 64;
  using Entry = std::pair<std::uint32_t, std::uint32_t>;  // key, what it offers

  std::uint32_t offer(std::int64_t i) const { return counting_ ? 1 : values_[i]; }

  // Any pivot in (low, high) gives the same cut; a good one keeps little. A sample of the keys says where the cut
  // probably is; aiming alternately a little below and a little above closes in from both sides.
  std::uint32_t pivot() {
    const std::uint32_t middle = low_ + (high_ - low_) / 2;
    if (stalled_) {
      stalled_ = false;
      return middle;
    }
    Entry sample[kFew];
    std::int64_t n = 0;
    double offered = 0;
    const std::int64_t stride = std::max<std::int64_t>(1, count_ / kFew);
    for (std::int64_t i = stride / 2; i < count_ && n < kFew; i += stride) {
      if (keys_[i] < low_ || keys_[i] >= high_) continue;
      sample[n++] = {keys_[i], offer(i)};
      offered += offer(i);
    }
    if (n == 0) return middle;
    std::sort(sample, sample + n, [](const Entry& a, const Entry& b) { return a.first > b.first; });
    const double wanted = offered * (static_cast<double>(need_) / static_cast<double>(inside_));
    std::int64_t rank = 0;
    for (double sum = 0; rank < n - 1 && (sum += sample[rank].second) < wanted;) ++rank;
    rank = std::clamp<std::int64_t>(rank + (aim_below_ ? 3 : -3), 0, n - 1);
    aim_below_ = !aim_below_;
    return std::clamp(sample[rank].first, low_ + 1, high_ - 1);
  }

  void narrow(std::uint32_t pivot) {
    const Tally upper = passes_.tally(keys_, values_, count_, pivot);
    const std::uint64_t offered = counting_ ? upper.count : upper.sum;
    if (offered >= need_) {
      low_ = pivot;
      inside_ = offered;
    } else {
      high_ = pivot;
      need_ -= offered;
      inside_ -= offered;
    }
    const bool same = counting_ || values_ == keys_;
    const std::int64_t kept =
        passes_.compact(keys_, count_, low_, high_, keys_, own_keys_, values_, same ? nullptr : own_values_);
    stalled_ = own_ && kept > count_ - count_ / 8;
    keys_ = own_keys_;
    values_ = same ? own_keys_ : own_values_;
    count_ = kept;
    own_ = true;
  }

  Cut find_among_few() const {
    Entry few[kFew];
    for (std::int64_t i = 0; i < count_; ++i) few[i] = {keys_[i], offer(i)};
    std::sort(few, few + count_, [](const Entry& a, const Entry& b) { return a.first > b.first; });
    std::uint64_t need = need_;
    for (std::int64_t i = 0;;) {
      std::uint64_t available = 0;
      const std::uint32_t key = few[i].first;
      for (; i < count_ && few[i].first == key; ++i) available += few[i].second;
      if (available >= need) return {key, need, available};
      need -= available;
    }
  }

  const SamplePasses& passes_;
  const std::uint32_t* keys_;
  const std::uint32_t* values_;
  std::int64_t count_;
  bool counting_;
  std::uint64_t need_, inside_;
  std::uint32_t* own_keys_;
  std::uint32_t* own_values_;
  bool own_ = false;  // keys_ are our copy and all within [low, high)
  std::uint32_t low_ = 1, high_ = kWeightOne + 1;
  bool aim_below_ = true, stalled_ = false;
};

// Among positions whose key equals the cut's, keeps the first ones that `need` allows.
void drop_surplus(const Cut& cut, const std::uint32_t* keys, bool counting, Survivors& s) {
  std::int64_t kept = 0;
  std::uint64_t used = 0;
  for (std::int64_t i = 0; i < s.count; ++i) {
    if (keys[i] == cut.key) {
      if (used >= cut.need) continue;
      used += counting ? 1 : s.weights[i];
    }
    s.weights[kept] = s.weights[i];
    s.ids[kept] = s.ids[i];
    ++kept;
  }
  s.count = kept;
}

void apply(const SamplePasses& passes, const Cut& cut, std::uint32_t* keys, bool counting, Survivors& s) {
  const bool by_weight = keys == s.weights;
  const std::int64_t before = s.count;
  constexpr std::uint32_t kAll = kWeightOne + 1;
  s.count = passes.compact(keys, before, cut.key, kAll, s.weights, s.weights, s.whole ? nullptr : s.ids, s.ids);
  s.whole = false;
  if (cut.available > cut.need) {
    if (!by_weight) passes.compact(keys, before, cut.key, kAll, keys, keys, nullptr, nullptr);
    drop_surplus(cut, keys, counting, s);
  }
  s.total = passes.tally(s.weights, s.weights, s.count, 0).sum;
}

// mass(p) of sample.h.
std::uint64_t mass(float p, std::uint64_t total) {
  const auto fixed = static_cast<std::uint64_t>(std::rint(static_cast<double>(p) * 4294967296.0));
  const u128 product = static_cast<u128>(fixed) * total;
  return std::max<std::uint64_t>(1, static_cast<std::uint64_t>((product + 0xffffffffu) >> 32));
}

}  // namespace

std::uint32_t min_p_weight(float min_p) {
  return std::max(1u, static_cast<std::uint32_t>(std::ceil(static_cast<double>(min_p) * kWeightOne)));
}

void keep_top_k(const SamplePasses& passes, std::int64_t k, Survivors& s, SampleScratch& scratch) {
  const std::uint64_t alive = passes.tally(s.weights, s.weights, s.count, 1).count;
  if (static_cast<std::uint64_t>(k) >= alive) return;
  const Selection all{s.weights, s.weights, s.count, true, alive, static_cast<std::uint64_t>(k)};
  apply(passes, CutSearch(passes, all, scratch).find(), s.weights, true, s);
}

void keep_typical_p(const SamplePasses& passes, float typical_p, Survivors& s, SampleScratch& scratch) {
  s.count =
      passes.compact(s.weights, s.count, 1, kWeightOne + 1, s.weights, s.weights, s.whole ? nullptr : s.ids, s.ids);
  s.whole = false;
  std::uint32_t* keys = scratch.typical.data();
  passes.typical_logs(s.weights, s.count, keys);
  u128 sum = 0;
  for (std::int64_t i = 0; i < s.count; ++i) sum += static_cast<std::uint64_t>(s.weights[i]) * keys[i];
  const auto mean = static_cast<std::int64_t>(sum / s.total);
  constexpr std::int64_t kNearest =
      1 << 26;  // logs are below 2^25, so keys stay positive; the nearest has the greatest
  for (std::int64_t i = 0; i < s.count; ++i) {
    const std::int64_t distance = std::abs(static_cast<std::int64_t>(keys[i]) - mean);
    keys[i] = static_cast<std::uint32_t>(kNearest - distance);
  }
  const std::uint64_t need = mass(typical_p, s.total);
  const Selection all{keys, s.weights, s.count, false, s.total, need};
  apply(passes, CutSearch(passes, all, scratch).find(), keys, false, s);
}

void keep_top_p(const SamplePasses& passes, float top_p, Survivors& s, SampleScratch& scratch) {
  const Selection all{s.weights, s.weights, s.count, false, s.total, mass(top_p, s.total)};
  apply(passes, CutSearch(passes, all, scratch).find(), s.weights, false, s);
}

std::int32_t id_at(const SamplePasses& passes, const Survivors& s, std::uint64_t r) {
  constexpr std::int64_t kBlock = 256;
  std::int64_t i = 0;
  for (; i + kBlock < s.count; i += kBlock) {
    const std::uint64_t sum = passes.tally(s.weights + i, s.weights + i, kBlock, 0).sum;
    if (r < sum) break;
    r -= sum;
  }
  while (r >= s.weights[i]) r -= s.weights[i++];
  return static_cast<std::int32_t>(s.whole ? i : s.ids[i]);
}

}  // namespace octavo
