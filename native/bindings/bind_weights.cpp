#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>

#include "arrays.h"
#include "formats/pack.h"
#include "module.h"
#include "simd/float_environment.h"
#include "simd/kernels.h"

namespace nb = nanobind;
using namespace octavo;
using octavo::python::Array1;
using octavo::python::owned_array;

namespace {

// data, encoding, rows, cols, row_order
using PythonPart =
    std::tuple<Array1<std::uint8_t>, std::string, std::int64_t, std::int64_t, std::optional<Array1<std::int32_t>>>;

WeightPart part_of(const PythonPart& from) {
  const auto& [data, encoding_name, rows, cols, row_order] = from;
  const std::optional<Encoding> encoding = parse_encoding(encoding_name);
  if (!encoding) throw nb::value_error(("unknown encoding " + encoding_name).c_str());
  WeightPart part;
  part.data = data.data();
  part.bytes = static_cast<std::int64_t>(data.shape(0));
  part.encoding = *encoding;
  part.rows = rows;
  part.cols = cols;
  if (row_order) {
    if (!python::aligned(*row_order)) throw nb::value_error("row_order: an array at an odd address");
    part.row_order = row_order->data();
    part.row_order_count = static_cast<std::int64_t>(row_order->shape(0));
  }
  return part;
}

Weight pack_weight(const std::vector<PythonPart>& from, const std::string& format_name, bool interleave, int threads) {
  const std::optional<Format> format = parse_format(format_name);
  if (!format) throw nb::value_error(("unknown format " + format_name + "; f32, f16, bf16, q8, q4 exist").c_str());
  if (threads < 1) throw nb::value_error("threads must be at least 1");
  std::vector<WeightPart> parts;
  for (const PythonPart& part : from) parts.push_back(part_of(part));
  Packed packed;
  {
    nb::gil_scoped_release release;
    packed = pack(parts, *format, interleave, threads);
  }
  if (!packed.error.empty()) throw nb::value_error(packed.error.c_str());
  return std::move(packed.weight);
}

nb::object unpack(const Weight& w) {
  float* out = nullptr;
  nb::object array = owned_array<float>({static_cast<std::size_t>(w.n), static_cast<std::size_t>(w.k)}, out);
  nb::gil_scoped_release release;
  const FloatEnvironment environment;
  const Kernels* kernels = find_kernels("auto");
  for (std::int64_t row = 0; row < w.n; ++row) kernels->unpack_row(w, row, out + row * w.k);
  return array;
}

nb::dict features() {
  const CpuFeatures f = cpu_features();
  nb::dict out;
  out["avx2"] = f.avx2;
  out["avx512"] = f.avx512;
  out["avx512_vnni"] = f.avx512_vnni;
  out["avx_vnni"] = f.avx_vnni;
  out["amx_int8"] = f.amx_int8;
  return out;
}

}  // namespace

void bind_weights(nb::module_& m) {
  nb::class_<Weight>(m, "Weight", "A matrix [n outputs][k inputs], packed as the kernels read it; made by `pack`.")
      .def_prop_ro("format", [](const Weight& w) { return std::string(format_name(w.format)); })
      .def_ro("n", &Weight::n)
      .def_ro("k", &Weight::k)
      .def_prop_ro("nbytes", &Weight::bytes)
      .def("unpack", &unpack, "The weights as the kernels see them: float32 [n, k].");
  m.def("pack", &pack_weight, nb::arg("parts").noconvert(), nb::arg("format"), nb::arg("interleave") = false,
        nb::arg("threads") = 2,
        "Packs parts (data uint8 [bytes], encoding, rows, cols, row_order int32 [rows] or None), one after another\n"
        "along the outputs; interleave: two parts of equal rows (gate, up), 8 + 8 rows in each panel of 16.\n"
        "ValueError says which part, and which row, cannot be packed.");
  m.def("cpu_features", &features, "Instruction sets the CPU has and the operating system lets programs use.");
  m.def("kernel_names", &kernel_names, "Names of the kernel tables this CPU can run, the best last.");
}
