// linear.h for q8 with AMX: one tile instruction multiplies 16 rows of activations by a panel's 16 outputs over a group
// of 32 inputs, exactly; the float part is that of AVX-512. Everything else is left to the AVX-512 kernel: with four
// bits the nibbles must be spread first, and where two hardware threads share a core that costs what the tiles save.
//
// The tile unit works a few groups ahead of the vector units, across tiles and panels, so that neither waits.
#include <cstring>

#include "ops/linear_avx512.h"
#include "simd/declarations.h"

namespace octavo::amx {
namespace {

constexpr std::int64_t kTileRows = 16;
constexpr std::int64_t kMinRows = 8;  // with fewer the AVX-512 kernel is as fast
constexpr std::int64_t kAhead = 2;    // groups multiplied before their sums are needed
constexpr std::int64_t kRing = kAhead + 1;
constexpr std::uintptr_t kAheadBytes = 4096;  // how far ahead of their use weights are fetched

// Tiles 0 and 1 take integer sums, 2 and 3 activations, 4 and 5 weights. Our own assembly, for GCC 12's intrinsics do
// not say what memory they use (its bug 114098).
struct alignas(64) TileShapes {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};

  explicit TileShapes(std::int64_t activation_rows) {
    for (int tile = 0; tile < 6; ++tile) {
      row_bytes[tile] = tile == 2 || tile == 3 ? kGroup : 64;
      rows[tile] = static_cast<std::uint8_t>(tile < 4 ? activation_rows : kGroup / 4);
    }
  }
  void load() const { __asm__ volatile("ldtilecfg %0" : : "m"(*this)); }
};

// sums = x (rows of int8, `stride` bytes apart) times w (8 rows of 64 bytes: four inputs of 16 outputs). Two sets of
// tiles in turn, so that one group need not wait for another.
static inline void multiply(bool odd, const std::int8_t* x, std::int64_t stride, const std::byte* w,
                            std::int32_t (*sums)[kPanel]) {
#define OCTAVO_MULTIPLY(sums_tile, x_tile, w_tile)                                                                    \
  __asm__ volatile("tilezero %%" sums_tile "\n\ttileloadd (%0,%1,1), %%" x_tile "\n\ttileloadd (%2,%3,1), %%" w_tile  \
                   "\n\ttdpbssd %%" w_tile ", %%" x_tile ", %%" sums_tile "\n\ttilestored %%" sums_tile ", (%4,%3,1)" \
                   :                                                                                                  \
                   : "r"(x), "r"(stride), "r"(w), "r"(std::int64_t{64}), "r"(sums)                                    \
                   : "memory")
  if (odd) {
    OCTAVO_MULTIPLY("tmm1", "tmm3", "tmm5");
  } else {
    OCTAVO_MULTIPLY("tmm0", "tmm2", "tmm4");
  }
#undef OCTAVO_MULTIPLY
}

struct Rows {  // tiles of `rows` rows
  std::int64_t begin, end, rows;
};

// Integer dot products of all (panel, tile of rows, group) in this order, into a ring.
class Products {
 public:
  Products(const LinearJob& job, Rows rows, std::int64_t panel_begin, std::int64_t panel_end)
      : w_(*job.w), xq_(job.xq), rows_(rows), row_(rows.begin), panel_(panel_begin), panel_end_(panel_end) {
    std::memset(sums_, 0, sizeof sums_);  // of rows that a small tile lacks
  }

  void compute_next() {
    if (panel_ == panel_end_) return;
    const std::int64_t blocks = w_.blocks();
    const std::byte* block = w_.panel(panel_) + block_ * panel_step_bytes(Format::Q8);
    if (row_ == rows_.begin) {  // later tiles find the panel in the cache
      avx512::fetch(reinterpret_cast<std::uintptr_t>(block) + kAheadBytes, avx512::kLines<Format::Q8>);
    }
    multiply(made_ % 2 == 1, xq_[row_ * blocks + block_].q, blocks * static_cast<std::int64_t>(sizeof(QBlock)), block,
             sums_[made_ % kRing]);
    ++made_;
    if (++block_ < blocks) return;
    block_ = 0;
    row_ += rows_.rows;
    if (row_ < rows_.end) return;
    row_ = rows_.begin;
    ++panel_;
  }

  const std::int32_t (&take())[kTileRows][kPanel] { return sums_[taken_++ % kRing]; }

 private:
  const Weight& w_;
  const QBlock* xq_;
  const Rows rows_;
  std::int64_t row_, panel_, panel_end_, block_ = 0, made_ = 0, taken_ = 0;
  alignas(64) std::int32_t sums_[kRing][kTileRows][kPanel];
};

template <int R>  // at least rows.rows
void tiles(const LinearJob& job, Rows rows, std::int64_t panel_begin, std::int64_t panel_end) {
  const std::int64_t blocks = job.w->blocks();
  TileShapes(rows.rows).load();
  Products products(job, rows, panel_begin, panel_end);
  for (std::int64_t i = 0; i < kAhead; ++i) products.compute_next();
  for (std::int64_t panel = panel_begin; panel < panel_end; ++panel) {
    for (std::int64_t row = rows.begin; row < rows.end; row += rows.rows) {
      __m512 acc[R];
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) acc[r] = _mm512_setzero_ps();
      const std::byte* block = job.w->panel(panel);
      const QBlock* x = job.xq + row * blocks;
      for (std::int64_t b = 0; b < blocks; ++b, block += panel_step_bytes(Format::Q8), ++x) {
        products.compute_next();
        const auto& sums = products.take();
        const __m512 scale = avx512::block_scale<Format::Q8>(block);
        const QBlock* of_row = x;
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          avx512::add_group<Format::Q8>(_mm512_load_si512(sums[r]), scale, _mm512_setzero_ps(), *of_row, acc[r]);
          if (R == kTileRows || r + 1 < rows.rows) of_row += blocks;  // sums of rows that are not there go nowhere
        }
      }
      avx512::finish_rows<R>(job, row, rows.rows, panel, acc);
    }
  }
}

}  // namespace

void linear(const LinearJob& job, std::int64_t panel_begin, std::int64_t panel_end) {
  if (job.w->format != Format::Q8 || job.rows < kMinRows) return avx512::linear(job, panel_begin, panel_end);
  const std::int64_t rest = job.rows % kTileRows, whole = job.rows - rest;
  if (whole > 0) tiles<16>(job, {0, whole, kTileRows}, panel_begin, panel_end);
  if (rest > 8) {
    tiles<15>(job, {whole, job.rows, rest}, panel_begin, panel_end);
  } else if (rest > 0) {
    tiles<8>(job, {whole, job.rows, rest}, panel_begin, panel_end);
  }
  __asm__ volatile("tilerelease");
}

}  // namespace octavo::amx
