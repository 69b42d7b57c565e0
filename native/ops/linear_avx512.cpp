// linear.h for AVX-512 with VNNI: vpdpbusd multiplies 64 unsigned by signed bytes and adds fours, exactly. A register
// holds a panel's 16 outputs, so each output's float operations come in the canonical order.
//
// A tile is R rows by P panels; R is 1 where P > 1. With one row the kernel waits for memory, so P panels from distant
// places are read side by side.
#include "ops/linear_avx512.h"

#include <cstring>

#include "simd/declarations.h"

namespace octavo::avx512 {
namespace {

constexpr int kTileRows = 12;
constexpr std::int64_t kAheadBytes = 2048;  // how far ahead of its use a stream is fetched

static inline __m512i broadcast4(const std::int8_t* q) {
  std::int32_t four;
  std::memcpy(&four, q, sizeof four);
  return _mm512_set1_epi32(four);
}

// acc += one group of 32 inputs. q8 weights are read as w + 128, which the block's offset takes back.
template <Format F, int R>
[[gnu::always_inline]] inline void add_block(const std::byte* block, const QBlock* x, std::int64_t x_stride,
                                             __m512 (&acc)[R]) {
  __m512i dots[R];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    dots[r] = F == Format::Q8 ? _mm512_set1_epi32(x[r * x_stride].offset) : _mm512_setzero_si512();
  }
#pragma GCC unroll 8
  for (int s = 0; s < 8; ++s) {
    __m512i w;
    if constexpr (F == Format::Q8) {
      w = _mm512_xor_si512(load_integers(block + 64 * s), _mm512_set1_epi8(-128));
    } else {
      const __m512i both = load_integers(block + 64 * (s / 2));
      w = s % 2 == 0 ? low_nibbles(both) : high_nibbles(both);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) dots[r] = _mm512_dpbusd_epi32(dots[r], w, broadcast4(x[r * x_stride].q + 4 * s));
  }
  const __m512 scale = block_scale<F>(block), min = F == Format::Q8 ? _mm512_setzero_ps() : block_min<F>(block);
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) add_group<F>(dots[r], scale, min, x[r * x_stride], acc[r]);
}

template <Format F, int R>
[[gnu::always_inline]] inline void add_input(const std::byte* step, const float* x, std::int64_t x_stride,
                                             __m512 (&acc)[R]) {
  __m512 w;
  if constexpr (F == Format::F32) {
    w = load_floats(step);
  } else if constexpr (F == Format::F16) {
    w = load_halves(step);
  } else {
    const __m256i bf16 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(step));
    w = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16));
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) acc[r] = _mm512_fmadd_ps(w, _mm512_set1_ps(x[r * x_stride]), acc[r]);
}

// Rows row .. row + R - 1 of panels panel, panel + apart, ... (P of them); `ahead` lines are fetched at each step.
template <Format F, int R, int P>
void tile(const LinearJob& job, std::int64_t row, std::int64_t panel, std::int64_t apart, std::int64_t ahead) {
  const Weight& w = *job.w;
  const std::byte* at = w.panel(panel);
  const std::int64_t apart_bytes = apart * w.panel_bytes();
  const std::int64_t steps = is_quantised(F) ? w.blocks() : w.k;
  __m512 acc[P][R];
#pragma GCC unroll 8
  for (int p = 0; p < P; ++p) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) acc[p][r] = _mm512_setzero_ps();
  }
  for (std::int64_t i = 0; i < steps; ++i, at += panel_step_bytes(F)) {
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
      const std::byte* step = at + p * apart_bytes;
      fetch(reinterpret_cast<std::uintptr_t>(step) + kAheadBytes, ahead);
      if constexpr (is_quantised(F)) {
        add_block<F, R>(step, job.xq + row * steps + i, steps, acc[p]);
      } else {
        add_input<F, R>(step, job.x + row * job.x_stride + i, job.x_stride, acc[p]);
      }
    }
  }
#pragma GCC unroll 8
  for (int p = 0; p < P; ++p) finish_rows<R>(job, row, R, panel + p * apart, acc[p]);
}

template <Format F>
void one_row(const LinearJob& job, std::int64_t panel_begin, std::int64_t panel_end) {
  constexpr int kStreams = 4;
  const std::int64_t apart = (panel_end - panel_begin) / kStreams;
  for (std::int64_t p = 0; p < apart; ++p) tile<F, 1, kStreams>(job, 0, panel_begin + p, apart, kLines<F>);
  for (std::int64_t p = panel_begin + kStreams * apart; p < panel_end; ++p) tile<F, 1, 1>(job, 0, p, 0, kLines<F>);
}

template <Format F, int R = kTileRows>
void tile_of(std::int64_t rows, const LinearJob& job, std::int64_t row, std::int64_t panel, std::int64_t ahead) {
  if (rows == R) {
    tile<F, R, 1>(job, row, panel, 0, ahead);
  } else if constexpr (R > 1) {
    tile_of<F, R - 1>(rows, job, row, panel, ahead);
  }
}

// In tiles as equal as can be.
template <Format F>
void many_rows(const LinearJob& job, std::int64_t panel_begin, std::int64_t panel_end) {
  const std::int64_t tiles = (job.rows + kTileRows - 1) / kTileRows;
  for (std::int64_t panel = panel_begin; panel < panel_end; ++panel) {
    for (std::int64_t t = 0; t < tiles; ++t) {
      const std::int64_t row = t * job.rows / tiles, end = (t + 1) * job.rows / tiles;
      tile_of<F>(end - row, job, row, panel, t == 0 ? kLines<F> : 0);  // later tiles find the panel in the cache
    }
  }
}

template <Format F>
void linear_in(const LinearJob& job, std::int64_t panel_begin, std::int64_t panel_end) {
  if (job.rows == 1) {
    one_row<F>(job, panel_begin, panel_end);
  } else {
    many_rows<F>(job, panel_begin, panel_end);
  }
}

}  // namespace

void linear(const LinearJob& job, std::int64_t panel_begin, std::int64_t panel_end) {
  switch (job.w->format) {
    case Format::F32:
      return linear_in<Format::F32>(job, panel_begin, panel_end);
    case Format::F16:
      return linear_in<Format::F16>(job, panel_begin, panel_end);
    case Format::BF16:
      return linear_in<Format::BF16>(job, panel_begin, panel_end);
    case Format::Q8:
      return linear_in<Format::Q8>(job, panel_begin, panel_end);
    case Format::Q4:
      return linear_in<Format::Q4>(job, panel_begin, panel_end);
    case Format::Q4F:
      return linear_in<Format::Q4F>(job, panel_begin, panel_end);
  }
}

}  // namespace octavo::avx512
