#include "simd/declarations.h"

namespace octavo {

const Kernels& avx512_kernels() {
  static const Kernels table = [] {
    Kernels kernels = avx2_kernels();
    kernels.name = "avx512";
    kernels.linear = avx512::linear;
    kernels.attention = avx512::attention;
    return kernels;
  }();
  return table;
}

const Kernels& amx_kernels() {
  static const Kernels table = [] {
    Kernels kernels = avx512_kernels();
    kernels.name = "amx";
    kernels.linear = amx::linear;
    return kernels;
  }();
  return table;
}

}  // namespace octavo
