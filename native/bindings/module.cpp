#include "module.h"

#ifdef OCTAVO_DEV
#include "tests/faulty_kernels.h"
#endif

NB_MODULE(_native, m) {
  m.doc() = "Octavo's native core: packed weights, kernels, the executor.";
  bind_weights(m);
  bind_sample(m);
  bind_executor(m);
  bind_bench(m);
#ifdef OCTAVO_DEV
  m.def("register_faulty_kernels", &octavo::register_faulty_kernels);
#else
  nanobind::set_leak_warnings(false);  // a user's interpreter that ends abruptly need not read about it
#endif
}
