#include "simd/declarations.h"

namespace octavo {

const Kernels& scalar_kernels() {
  static constexpr Kernels table{
      "scalar",           scalar::quantize, scalar::linear,    scalar::unpack_row,
      scalar::rms_norm,   scalar::silu_mul, scalar::add,       scalar::all_finite,
      scalar::rope,       scalar::kv_store, scalar::attention, scalar::attention_merge,
      scalar::sample_row,
  };
  return table;
}

}  // namespace octavo
