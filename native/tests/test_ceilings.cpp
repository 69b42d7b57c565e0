// The roofline's loops run for every table, on teams of one and more, and read no byte outside their buffer (ASan).
#include "bench/ceilings.h"
#include "check.h"

using namespace octavo;

int main() {
  for (const std::string& name : kernel_names()) {
    const Kernels& kernels = *find_kernels(name);
    for (int threads = 1; threads <= 3; ++threads) {
      Ceilings ceilings(threads, kernels, 12345 * threads);  // rounded down to whole parts
      CHECK(ceilings.integer(1) > 0.0);
      CHECK(ceilings.integer(1000) > 0.0);
      CHECK(ceilings.floats(1) > 0.0);
      CHECK(ceilings.read(1) > 0.0);
      CHECK(ceilings.read(4) > 0.0);
    }
  }
  return 0;
}
