#include "simd/declarations.h"

namespace octavo {

const Kernels& avx2_kernels() {
  static constexpr Kernels table{
      "avx2",           avx2::quantize,   avx2::linear, avx2::unpack_row, avx2::rms_norm,  avx2::silu_mul,
      avx2::add,        avx2::all_finite, avx2::rope,   avx2::kv_store,   avx2::attention, avx2::attention_merge,
      avx2::sample_row,
  };
  return table;
}

}  // namespace octavo
