// linear.h for quantised weights with AMX: one tile instruction multiplies 16 rows of activations by a panel's 16
// outputs over a block of 64 inputs, exactly; the float part is that of AVX-512. Panels of q4 are unpacked to bytes
// first. Everything else, and few rows, are left to the AVX-512 kernel.
//
// Rows go in pairs of tiles, which share the loading of the weights. The tile unit works a block ahead of the vector
// units, so that neither waits.
#include <algorithm>
#include <cstring>

#include "ops/linear_avx512.h"
#include "simd/declarations.h"

namespace octavo::amx {
namespace {

constexpr std::int64_t kTileRows = 16;
constexpr std::int64_t kMinRows = 5;  // with fewer the AVX-512 kernel is as fast

// Tiles 0 and 1 take the integer sums of the pair's first and second rows, 2 and 3 hold their activations, 4 the
// weights. Our own assembly, for GCC 12's intrinsics do not say what memory they use (its bug 114098).
struct alignas(64) TileShapes {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};

  explicit TileShapes(std::int64_t pair_rows) {
    const auto first = static_cast<std::uint8_t>(std::min(pair_rows, kTileRows));
    const auto second = static_cast<std::uint8_t>(std::max(pair_rows - kTileRows, std::int64_t{1}));
    for (int tile = 0; tile < 5; ++tile) {
      row_bytes[tile] = 64;
      rows[tile] = tile == 4 ? kBlock / 4 : tile % 2 == 0 ? first : second;
    }
  }
  void load() const { __asm__ volatile("ldtilecfg %0" : : "m"(*this)); }
};

using Sums = std::int32_t[2][kTileRows][kPanel];

// sums = x (int8, rows `stride` bytes apart) times w (16 rows of 64 bytes: four inputs of 16 outputs).
template <bool kTwo>
static inline void multiply(const std::byte* x, std::int64_t stride, const std::byte* w, Sums& sums) {
  constexpr std::int64_t kLine = 64;
  __asm__ volatile(
      "tileloadd (%0,%1,1), %%tmm4\n\ttileloadd (%2,%3,1), %%tmm2\n\t"
      "tilezero %%tmm0\n\ttdpbssd %%tmm4, %%tmm2, %%tmm0\n\ttilestored %%tmm0, (%4,%1,1)"
      :
      : "r"(w), "r"(kLine), "r"(x), "r"(stride), "r"(sums[0])
      : "memory");
  if constexpr (kTwo) {
    __asm__ volatile(
        "tileloadd (%2,%3,1), %%tmm3\n\t"
        "tilezero %%tmm1\n\ttdpbssd %%tmm4, %%tmm3, %%tmm1\n\ttilestored %%tmm1, (%4,%1,1)"
        :
        : "r"(w), "r"(kLine), "r"(x + kTileRows * stride), "r"(stride), "r"(sums[1])
        : "memory");
  }
}

// acc[r] += one block of `rows` rows.
static inline void add_block(const std::int32_t (*sums)[kPanel], __m512 scale, const float* x_scale,
                             std::int64_t x_stride, std::int64_t rows, float (*acc)[kPanel]) {
  const auto add_row = [&](std::int64_t r) {
    __m512 row = _mm512_load_ps(acc[r]);
    avx512::add_block(_mm512_load_si512(sums[r]), scale, x_scale[r * x_stride], row);
    _mm512_store_ps(acc[r], row);
  };
  if (rows == kTileRows) {
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) add_row(r);
  } else {
#pragma GCC unroll 1
    for (std::int64_t r = 0; r < rows; ++r) add_row(r);
  }
}

struct Bytes {  // a panel's weights as int8: 1,024 bytes a block, `stride` bytes apart
  const std::byte* at;
  std::int64_t stride;
};

// Rows row .. row + rows - 1 of a panel; 32 at most, more than 16 where kTwo. The first pair fetches the next panel.
template <bool kTwo>
void pair(const LinearJob& job, std::int64_t row, std::int64_t rows, std::int64_t panel, Bytes bytes) {
  const Weight& w = *job.w;
  const std::int64_t blocks = w.blocks(), stride = q_row_bytes(blocks), block = block_bytes(w.format);
  const std::int64_t scale_stride = stride / static_cast<std::int64_t>(sizeof(float));
  const std::byte* x = job.row(row).at;
  const float* x_scales = job.row(row).scales();
  const std::byte* scales = w.panel(panel) + quants_bytes(w.format) + (w.format == Format::Q4 ? kQ4ScalesAt : 0);
  const auto next = reinterpret_cast<std::uintptr_t>(w.panel(panel)) + static_cast<std::uintptr_t>(w.panel_bytes());
  alignas(64) Sums sums[2];
  alignas(64) float acc[2 * kTileRows][kPanel];
  std::memset(acc, 0, static_cast<std::size_t>(rows) * sizeof acc[0]);

  const auto add = [&](std::int64_t b) {
    const __m512 scale = avx512::load_halves(scales + b * block);
    const std::int64_t first = kTwo ? kTileRows : rows;
    add_block(sums[b % 2][0], scale, x_scales + b, scale_stride, first, acc);
    if constexpr (kTwo) {
      const float* second = x_scales + b + kTileRows * scale_stride;
      add_block(sums[b % 2][1], scale, second, scale_stride, rows - kTileRows, acc + kTileRows);
    }
  };
  for (std::int64_t b = 0; b < blocks; ++b) {
    if (row == 0) avx512::fetch(next + static_cast<std::uintptr_t>(b * block), (block + 63) / 64);
    multiply<kTwo>(x + b * kBlock, stride, bytes.at + b * bytes.stride, sums[b % 2]);
    if (b > 0) add(b - 1);
  }
  add(blocks - 1);
  avx512::finish(job, row, rows, panel, acc);
}

}  // namespace

void linear(const LinearJob& job, std::int64_t panel_begin, std::int64_t panel_end) {
  const Weight& w = *job.w;
  if (!is_quantised(w.format) || job.rows < kMinRows) return avx512::linear(job, panel_begin, panel_end);
  const std::int64_t rest = job.rows % (2 * kTileRows), whole = job.rows - rest;
  const TileShapes whole_tiles(2 * kTileRows), rest_tiles(rest);
  const bool both = whole > 0 && rest > 0;
  if (!both) (whole > 0 ? whole_tiles : rest_tiles).load();
  for (std::int64_t panel = panel_begin; panel < panel_end; ++panel) {
    Bytes bytes{w.panel(panel), block_bytes(Format::Q8)};
    if (w.format == Format::Q4) {
      avx512::unpack_q4(w, bytes.at, 0, job.scratch);
      bytes = {job.scratch, kBlock * kPanel};
    }
    if (both) whole_tiles.load();
    for (std::int64_t row = 0; row < whole; row += 2 * kTileRows) pair<true>(job, row, 2 * kTileRows, panel, bytes);
    if (both) rest_tiles.load();
    if (rest > kTileRows) {
      pair<true>(job, whole, rest, panel, bytes);
    } else if (rest > 0) {
      pair<false>(job, whole, rest, panel, bytes);
    }
  }
  __asm__ volatile("tilerelease");
}

}  // namespace octavo::amx
