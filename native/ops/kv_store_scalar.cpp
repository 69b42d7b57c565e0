#include "formats/fp16.h"
#include "simd/declarations.h"
#include "simd/math_scalar.h"

namespace octavo::scalar {

void kv_store(const KVStoreJob& job, std::int64_t sequence, std::int64_t row_begin, std::int64_t row_end) {
  const KVLayout& layout = job.layout;
  const SequenceRows& rows = job.sequences[sequence];
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    const std::int64_t position = rows.first_position + row - rows.row_begin, t = position % kBlockTokens;
    std::byte* keys =
        job.pool + rows.block_table[position / kBlockTokens] * layout.block_bytes() + job.layer * layout.layer_bytes();
    bool finite = true;
    const auto put = [&](std::byte* base, std::int64_t index, float x) {
      if (layout.type == KVType::F32) {
        std::memcpy(base + index * 4, &x, sizeof x);
        finite = finite && (bits_of(x) & 0x7f800000u) != 0x7f800000u;
      } else {
        const std::uint16_t h = float_to_half(x);
        std::memcpy(base + index * 2, &h, sizeof h);
        finite = finite && (h & 0x7c00u) != 0x7c00u;
      }
    };
    for (std::int64_t h = 0; h < layout.kv_heads; ++h, keys += layout.head_bytes()) {
      const float* k = job.k + row * job.stride + h * layout.head_dim;
      const float* v = job.v + row * job.stride + h * layout.head_dim;
      for (std::int64_t d = 0; d < layout.head_dim; ++d) {
        put(keys, d * kBlockTokens + t, k[d]);
        put(keys + layout.head_bytes() / 2, t * layout.head_dim + d, v[d]);
      }
    }
    if (!finite) job.finite[row] = 0;
  }
}

}  // namespace octavo::scalar
