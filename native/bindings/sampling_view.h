// A Python SamplingRows (src/octavo/executor/interface.py) as the native SamplingView.
#pragma once
#include <string>
#include <vector>

#include "arrays.h"
#include "ops/sample_rows.h"

namespace octavo::python {

// Holds the arrays for as long as the view is used. Types, sizes and contiguity are checked here; values by validate().
class SamplingArrays {
 public:
  SamplingArrays(nanobind::handle rows, std::int64_t count, std::int64_t vocab) : rows_(rows) {
    view_.rows = count;
    view_.vocab = vocab;
    const auto n = static_cast<std::size_t>(count);
    view_.temperature = scalars<float>("temperature", n);
    view_.top_k = scalars<std::int32_t>("top_k", n);
    view_.top_p = scalars<float>("top_p", n);
    view_.min_p = scalars<float>("min_p", n);
    view_.typical_p = scalars<float>("typical_p", n);
    view_.presence = scalars<float>("presence", n);
    view_.frequency = scalars<float>("frequency", n);
    view_.repetition = scalars<float>("repetition", n);
    view_.seed = scalars<std::uint64_t>("seed", n);
    view_.position = scalars<std::int64_t>("position", n);
    view_.n_index = scalars<std::int32_t>("n_index", n);
    view_.target = scalars<std::int32_t>("target", n);
    view_.num_logprobs = scalars<std::int32_t>("num_logprobs", n);
    view_.mask_index = scalars<std::int32_t>("mask_index", n);

    const auto masks = field<Array2<std::uint32_t>>("masks");
    if (masks.shape(0) > 0 && static_cast<std::int64_t>(masks.shape(1)) != (vocab + 31) / 32) wrong("masks");
    view_.masks = masks.data();
    view_.mask_count = static_cast<std::int64_t>(masks.shape(0));

    view_.banned_offsets = scalars<std::int32_t>("banned_offsets", n + 1);
    view_.banned_ids = flat<std::int32_t>("banned_ids", view_.banned_size);
    view_.bias_offsets = scalars<std::int32_t>("bias_offsets", n + 1);
    view_.bias_ids = flat<std::int32_t>("bias_ids", view_.bias_size);
    view_.bias_values = scalars<float>("bias_values", static_cast<std::size_t>(view_.bias_size));
    view_.seen_offsets = scalars<std::int32_t>("seen_offsets", n + 1);
    view_.seen_ids = flat<std::int32_t>("seen_ids", view_.seen_size);
    view_.seen_counts = scalars<std::int32_t>("seen_counts", static_cast<std::size_t>(view_.seen_size));
  }

  const SamplingView& view() const { return view_; }

 private:
  // The attribute is kept: `rows` may make it anew at each reading, or another thread may replace it.
  template <class Array>
  Array field(const char* name) {
    kept_.push_back(rows_.attr(name));
    Array array;
    // No conversion: a converted copy would be gone when the view is read.
    if (!nanobind::try_cast(kept_.back(), array, false) || !aligned(array)) wrong(name);
    return array;
  }
  template <class T>
  const T* flat(const char* name, std::int64_t& size) {
    const auto array = field<Array1<T>>(name);
    size = static_cast<std::int64_t>(array.shape(0));
    return array.data();
  }
  template <class T>
  const T* scalars(const char* name, std::size_t size) {
    std::int64_t found = 0;
    const T* data = flat<T>(name, found);
    if (static_cast<std::size_t>(found) != size) wrong(name);
    return data;
  }
  [[noreturn]] static void wrong(const char* name) {
    throw nanobind::value_error((std::string(name) + ": an array of the wrong type or size").c_str());
  }

  nanobind::handle rows_;
  std::vector<nanobind::object> kept_;
  SamplingView view_;
};

}  // namespace octavo::python
