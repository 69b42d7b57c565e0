#include <nanobind/stl/string.h>

#include "bench/ceilings.h"
#include "module.h"

namespace nb = nanobind;
using namespace octavo;

namespace {

constexpr std::int64_t kMaxBuffer = std::int64_t{1} << 40;

void make_ceilings(Ceilings* self, int threads, const std::string& name, std::int64_t buffer_bytes) {
  const Kernels* kernels = find_kernels(name);
  if (kernels == nullptr) throw nb::value_error(("no kernels named " + name + " for this CPU").c_str());
  if (threads < 1 || threads > 1024) throw nb::value_error("threads: 1 to 1024");
  if (buffer_bytes < 1024 * threads || buffer_bytes > kMaxBuffer)
    throw nb::value_error("buffer_bytes: 1 KiB a thread to 1 TiB");
  new (self) Ceilings(threads, *kernels, buffer_bytes);
}

std::int64_t checked_rounds(std::int64_t rounds) {
  if (rounds < 1 || rounds > std::int64_t{1} << 40) throw nb::value_error("rounds: 1 to 2^40");
  return rounds;
}

}  // namespace

void bind_bench(nb::module_& m) {
  nb::class_<Ceilings>(m, "Ceilings",
                       "Hardware limits under a kernel table's instructions; see native/bench/ceilings.h.")
      .def("__init__", &make_ceilings, nb::arg("threads"), nb::arg("kernels"), nb::arg("buffer_bytes"))
      .def(
          "integer",
          [](Ceilings& self, std::int64_t rounds) {
            checked_rounds(rounds);
            nb::gil_scoped_release release;
            return self.integer(rounds);
          },
          nb::arg("rounds"), "Integer multiply-adds a second over one pass.")
      .def(
          "floats",
          [](Ceilings& self, std::int64_t rounds) {
            checked_rounds(rounds);
            nb::gil_scoped_release release;
            return self.floats(rounds);
          },
          nb::arg("rounds"), "float32 multiply-adds a second over one pass.")
      .def(
          "read",
          [](Ceilings& self, int streams) {
            if (streams != 1 && streams != 4) throw nb::value_error("streams: 1 or 4");
            double rate;
            {
              nb::gil_scoped_release release;
              rate = self.read(streams);
            }
            if (rate == 0.0) PyErr_NoMemory(), throw nb::python_error();
            return rate;
          },
          nb::arg("streams"), "Bytes a second, each thread reading its own part of the buffer once. MemoryError.");
}
