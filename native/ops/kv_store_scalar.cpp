#include "formats/fp16.h"
#include "ops/linear.h"
#include "simd/declarations.h"
#include "simd/math_scalar.h"

namespace octavo::scalar {
namespace {

// One vector to int8: element d to q[d * step]. Returns its scale.
float quantise(const float* x, std::int64_t head_dim, std::byte* q, std::int64_t step) {
  std::uint32_t largest = 0;  // bits of |x| order like |x|, with infinity and NaN above all
  for (std::int64_t d = 0; d < head_dim; ++d) {
    const std::uint32_t magnitude = bits_of(x[d]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  const bool finite = largest < 0x7f800000u;
  const float amax = float_of(largest);
  const bool stored = finite && amax >= kTinyBlock;
  const float inverse = stored ? 127.0f / amax : 0.0f;
  for (std::int64_t d = 0; d < head_dim; ++d) {
    // Adding and taking away 1.5 * 2^23 rounds to the nearest integer, ties to even.
    const float rounded = stored ? (x[d] * inverse + math::kRoundMagic) - math::kRoundMagic : 0.0f;
    q[d * step] = static_cast<std::byte>(static_cast<std::int8_t>(rounded));
  }
  return !finite ? nan_() : stored ? amax / 127.0f : 0.0f;
}

}  // namespace

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
      if (layout.type == KVType::Int8) {
        std::byte* values = keys + layout.head_bytes() / 2;
        const float scale_k = quantise(k, layout.head_dim, keys + t, kBlockTokens);
        const float scale_v = quantise(v, layout.head_dim, values + t * layout.head_dim, 1);
        std::memcpy(keys + layout.data_bytes() + t * 4, &scale_k, sizeof scale_k);
        std::memcpy(values + layout.data_bytes() + t * 4, &scale_v, sizeof scale_v);
        finite = finite && scale_k == scale_k && scale_v == scale_v;
        continue;
      }
      for (std::int64_t d = 0; d < layout.head_dim; ++d) {
        put(keys, d * kBlockTokens + t, k[d]);
        put(keys + layout.head_bytes() / 2, t * layout.head_dim + d, v[d]);
      }
    }
    if (!finite) job.finite[row] = 0;
  }
}

}  // namespace octavo::scalar
