// A Python SamplingRows (src/octavo/executor/interface.py) as the native SamplingView.
#pragma once
#include <cstring>
#include <list>
#include <string>
#include <vector>

#include "arrays.h"
#include "ops/sample_rows.h"

namespace octavo::python {

// Holds the arrays for as long as the view is used. Types, sizes and contiguity are checked here; values by validate().
class SamplingArrays {
 public:
  // The fields of a SamplingRows of `count` rows.
  SamplingArrays(nanobind::handle scalars, nanobind::handle position, nanobind::handle edits, std::int64_t count,
                 std::int64_t vocab) {
    view_.rows = count;
    view_.vocab = vocab;
    read_scalars(scalars);
    view_.position = sized<std::int64_t>(integers64_, position, "position", count);
    if (edits.is_none()) {
      no_edits();
    } else {
      read_edits(edits);
    }
  }
  SamplingArrays(const SamplingArrays&) = delete;
  SamplingArrays& operator=(const SamplingArrays&) = delete;

  const SamplingView& view() const { return view_; }

 private:
  // A record of `scalars`: SCALARS of interface.py.
  struct Scalars {
    std::uint64_t seed;
    float temperature, top_p, min_p, typical_p, presence, frequency, repetition;
    std::int32_t top_k, n_index, target, num_logprobs, unused;
  };
  static_assert(sizeof(Scalars) == 56);

  void read_scalars(nanobind::handle scalars) {
    const Buffer<std::uint8_t> packed(scalars, "scalars");
    const auto n = static_cast<std::size_t>(view_.rows);
    if (packed.size() != view_.rows * static_cast<std::int64_t>(sizeof(Scalars))) wrong("scalars");
    seeds_.resize(n);
    floats_.resize(7 * n);
    ints_.resize(4 * n);
    for (std::size_t r = 0; r < n; ++r) {
      Scalars row;
      std::memcpy(&row, packed.data() + r * sizeof(Scalars), sizeof(Scalars));
      seeds_[r] = row.seed;
      const float floats[] = {row.temperature, row.top_p,     row.min_p,     row.typical_p,
                              row.presence,    row.frequency, row.repetition};
      for (std::size_t i = 0; i < 7; ++i) floats_[i * n + r] = floats[i];
      const std::int32_t ints[] = {row.top_k, row.n_index, row.target, row.num_logprobs};
      for (std::size_t i = 0; i < 4; ++i) ints_[i * n + r] = ints[i];
    }
    view_.seed = seeds_.data();
    const float** float_columns[] = {&view_.temperature, &view_.top_p,     &view_.min_p,     &view_.typical_p,
                                     &view_.presence,    &view_.frequency, &view_.repetition};
    for (std::size_t i = 0; i < 7; ++i) *float_columns[i] = floats_.data() + i * n;
    const std::int32_t** int_columns[] = {&view_.top_k, &view_.n_index, &view_.target, &view_.num_logprobs};
    for (std::size_t i = 0; i < 4; ++i) *int_columns[i] = ints_.data() + i * n;
  }

  // No masks, and every ragged array empty.
  void no_edits() {
    const auto n = static_cast<std::size_t>(view_.rows);
    none_.assign(n, -1);
    none_.resize(2 * n + 1, 0);
    view_.mask_index = none_.data();
    view_.banned_offsets = view_.bias_offsets = view_.seen_offsets = none_.data() + n;
  }

  void read_edits(nanobind::handle edits) {
    const std::int64_t n = view_.rows;
    const auto ints = [&](const char* name, std::int64_t size) {
      return sized<std::int32_t>(integers_, edits.attr(name), name, size);
    };
    const auto flat = [&](const char* name, std::int64_t& size) {
      const Buffer<std::int32_t>& array = integers_.emplace_back(edits.attr(name), name);
      size = array.size();
      return array.data();
    };
    view_.mask_index = ints("mask_index", n);
    const Buffer<std::uint32_t>& masks = masks_.emplace_back(edits.attr("masks"), "masks", 2);
    if (masks.size() > 0 && masks.size(1) != (view_.vocab + 31) / 32) wrong("masks");
    view_.masks = masks.data();
    view_.mask_count = masks.size();
    view_.banned_offsets = ints("banned_offsets", n + 1);
    view_.banned_ids = flat("banned_ids", view_.banned_size);
    view_.bias_offsets = ints("bias_offsets", n + 1);
    view_.bias_ids = flat("bias_ids", view_.bias_size);
    view_.bias_values = sized<float>(reals_, edits.attr("bias_values"), "bias_values", view_.bias_size);
    view_.seen_offsets = ints("seen_offsets", n + 1);
    view_.seen_ids = flat("seen_ids", view_.seen_size);
    view_.seen_counts = ints("seen_counts", view_.seen_size);
  }

  // A buffer holds on to its array: `rows` may make it anew at each reading, or another thread may replace it.
  template <class T>
  static const T* sized(std::list<Buffer<T>>& kept, nanobind::handle array, const char* name, std::int64_t size) {
    const Buffer<T>& buffer = kept.emplace_back(array, name);
    if (buffer.size() != size) wrong(name);
    return buffer.data();
  }
  [[noreturn]] static void wrong(const char* name) {
    throw nanobind::value_error((std::string(name) + ": an array of the wrong type or size").c_str());
  }

  SamplingView view_;
  std::vector<std::uint64_t> seeds_;
  std::vector<float> floats_;
  std::vector<std::int32_t> ints_, none_;
  std::list<Buffer<std::int64_t>> integers64_;
  std::list<Buffer<std::int32_t>> integers_;
  std::list<Buffer<std::uint32_t>> masks_;
  std::list<Buffer<float>> reals_;
};

}  // namespace octavo::python
