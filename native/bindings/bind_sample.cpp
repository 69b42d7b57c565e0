#include <nanobind/stl/string.h>

#include <vector>

#include "arrays.h"
#include "module.h"
#include "sampling_view.h"
#include "simd/float_environment.h"
#include "simd/kernels.h"

namespace nb = nanobind;
using namespace octavo;
using octavo::python::Array2;
using octavo::python::owned_array;

namespace {

nb::tuple sample(const Array2<float>& logits, nb::handle rows, const std::string& kernel_name) {
  const Kernels* kernels = find_kernels(kernel_name);
  if (kernels == nullptr)
    throw nb::value_error(("kernels " + kernel_name + " do not exist or do not run here").c_str());
  if (!python::aligned(logits)) throw nb::value_error("logits: an array at an odd address");
  const auto count = static_cast<std::int64_t>(logits.shape(0)), vocab = static_cast<std::int64_t>(logits.shape(1));
  const nb::object scalars = rows.attr("scalars"), position = rows.attr("position"), edits = rows.attr("edits");
  const python::SamplingArrays arrays(scalars, position, edits, count, vocab);
  const SamplingView& view = arrays.view();
  if (const std::string problem = validate(view); !problem.empty()) throw nb::value_error(problem.c_str());

  const std::size_t n = logits.shape(0), k = static_cast<std::size_t>(max_logprobs(view));
  std::int32_t *ids, *ranks, *top_ids;
  float *logprobs, *top_logprobs;
  std::uint8_t* ok;
  nb::object id_array = owned_array({n}, ids), logprob_array = owned_array({n}, logprobs);
  nb::object rank_array = owned_array({n}, ranks), top_id_array = owned_array({n, k}, top_ids);
  nb::object top_logprob_array = owned_array({n, k}, top_logprobs), ok_array = owned_array({n}, ok);
  {
    nb::gil_scoped_release release;
    const FloatEnvironment environment;
    std::vector<float> copy(static_cast<std::size_t>(vocab));  // a row is edited in place
    SampleScratch scratch;
    for (std::int64_t r = 0; r < count; ++r) {
      copy.assign(logits.data() + r * vocab, logits.data() + (r + 1) * vocab);
      SampleRow row = sample_row_view(view, r);
      row.logits = copy.data();
      SampleResult result;
      result.top_ids = top_ids + r * static_cast<std::int64_t>(k);
      result.top_logprobs = top_logprobs + r * static_cast<std::int64_t>(k);
      kernels->sample_row(row, scratch, result);
      ids[r] = result.id;
      logprobs[r] = result.logprob;
      ranks[r] = result.rank;
      ok[r] = result.ok;
    }
  }
  return nb::make_tuple(id_array, logprob_array, rank_array, top_id_array, top_logprob_array, ok_array);
}

}  // namespace

void bind_sample(nb::module_& m) {
  m.def("sample", &sample, nb::arg("logits"), nb::arg("rows"), nb::arg("kernels") = "auto",
        "Samples each row of logits (float32 [R, vocab], left as they are) as `rows` (SamplingRows) says.\n\n"
        "Returns (ids, logprobs, ranks, top_ids, top_logprobs, ok) as in StepResult. ValueError names a bad field.");
}
