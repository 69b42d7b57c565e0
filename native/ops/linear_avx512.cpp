// linear.h for AVX-512 with VNNI: vpdpbusd multiplies 64 unsigned by signed bytes and adds fours, exactly. A register
// holds a panel's 16 outputs, so each output's float operations come in the canonical order. Signed weights are read as
// the unsigned w + 128, which the activations' corrections take back.
//
// A tile is R rows by P panels; R is 1 where P > 1. With one row the kernel waits for memory, so P panels from distant
// places are read side by side. For more than a few rows q4 is unpacked once a panel; for fewer the multipliers are
// applied to the sums.
#include "ops/linear_avx512.h"

#include <cstring>

#include "simd/declarations.h"

namespace octavo::avx512 {
namespace {

constexpr int kTileRows = 12;
constexpr std::int64_t kUnpackRows = 4;     // from so many on unpacking is cheaper
constexpr std::int64_t kAheadBytes = 2048;  // how far ahead of its use a stream of floats is fetched

static inline __m512i broadcast4(const std::int8_t* q) {
  std::int32_t four;
  std::memcpy(&four, q, sizeof four);
  return _mm512_set1_epi32(four);
}

struct Rows {  // quantised, `stride` bytes apart
  const std::byte* at;
  std::int64_t stride, blocks;

  QRow<const std::byte> operator[](int r) const { return {at + r * stride, blocks}; }
};

// acc += block b of R rows. quants: bytes in the layout of q8, of weights w or, where kBiased, w + 128.
template <bool kBiased, int R>
[[gnu::always_inline]] inline void add_bytes(const std::byte* quants, __m512 scale, Rows x, std::int64_t b,
                                             __m512 (&acc)[R]) {
  __m512i dots[R];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) dots[r] = _mm512_set1_epi32(x[r].corrections()[b]);
#pragma GCC unroll 16
  for (int s = 0; s < 16; ++s) {
    __m512i w = load_integers(quants + 64 * s);
    if constexpr (!kBiased) w = _mm512_xor_si512(w, _mm512_set1_epi8(-128));
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) dots[r] = _mm512_dpbusd_epi32(dots[r], w, broadcast4(x[r].q() + b * kBlock + 4 * s));
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) add_block(dots[r], scale, x[r].scales()[b], acc[r]);
}

// The same for q4 as it lies: dot = sum over groups of multiplier * (nibbles . x) + offset * sum(x).
template <int R>
[[gnu::always_inline]] inline void add_nibbles(const std::byte* quants, const std::byte* terms, Rows x, std::int64_t b,
                                               __m512 (&acc)[R]) {
  const auto load = [](const std::byte* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); };
  const __m128i offset0 = load(terms + kOffsetsAt), offset1 = load(terms + kOffsetsAt + kPanel);
  const __m512i offsets =
      _mm512_cvtepi8_epi16(_mm256_setr_m128i(_mm_unpacklo_epi8(offset0, offset1), _mm_unpackhi_epi8(offset0, offset1)));
  __m512i dots[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    std::int32_t sums;
    std::memcpy(&sums, x[r].sums() + b, sizeof sums);
    dots[r] = _mm512_dpwssd_epi32(_mm512_setzero_si512(), offsets, _mm512_set1_epi32(sums));
  }
#pragma GCC unroll 2
  for (int g = 0; g < 2; ++g) {
    __m512i of_group[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) of_group[r] = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int v = 4 * g; v < 4 * g + 4; ++v) {
      const __m512i both = load_integers(quants + 64 * v);
      const __m512i low = low_nibbles(both), high = high_nibbles(both);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const std::int8_t* q = x[r].q() + b * kBlock + 8 * v;
        of_group[r] = _mm512_dpbusd_epi32(of_group[r], low, broadcast4(q));
        of_group[r] = _mm512_dpbusd_epi32(of_group[r], high, broadcast4(q + 4));
      }
    }
    const __m512i multiplier = _mm512_cvtepu8_epi32(load(terms + kPanel * g));
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) dots[r] = _mm512_add_epi32(dots[r], _mm512_mullo_epi32(of_group[r], multiplier));
  }
  const __m512 scale = load_halves(terms + kQ4ScalesAt);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) add_block(dots[r], scale, x[r].scales()[b], acc[r]);
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

// A tile's quantised rows, from `row` on.
static inline Rows rows_from(const LinearJob& job, std::int64_t row) {
  return {job.row(row).at, q_row_bytes(job.w->blocks()), job.w->blocks()};
}

// Rows row .. row + R - 1 of panels panel, panel + apart, ... (P of them), the weights read as they lie;
// `ahead` lines are fetched at each step.
template <Format F, int R, int P>
void tile(const LinearJob& job, std::int64_t row, std::int64_t panel, std::int64_t apart, std::int64_t ahead) {
  const Weight& w = *job.w;
  const std::byte* at = w.panel(panel);
  const std::int64_t apart_bytes = apart * w.panel_bytes();
  __m512 acc[P][R];
#pragma GCC unroll 8
  for (int p = 0; p < P; ++p) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) acc[p][r] = _mm512_setzero_ps();
  }
  const std::int64_t steps = is_quantised(F) ? w.blocks() : w.k;
  for (std::int64_t i = 0; i < steps; ++i, at += kStep<F>) {
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
      const std::byte* step = at + p * apart_bytes;
      fetch(reinterpret_cast<std::uintptr_t>(step) + kAheadBytes, ahead);
      if constexpr (F == Format::Q8) {
        const __m512 scale = load_halves(step + quants_bytes(F));
        add_bytes<false, R>(step, scale, rows_from(job, row), i, acc[p]);
      } else if constexpr (F == Format::Q4) {
        add_nibbles<R>(step, step + quants_bytes(F), rows_from(job, row), i, acc[p]);
      } else {
        add_input<F, R>(step, job.x + row * job.x_stride + i, job.x_stride, acc[p]);
      }
    }
  }
#pragma GCC unroll 8
  for (int p = 0; p < P; ++p) finish<R>(job, row, panel + p * apart, acc[p]);
}

// Rows row .. row + R - 1 of a q4 panel that lies unpacked, as w + 128, in the job's scratch. ahead: as above, of the
// next panel.
template <int R>
void unpacked_tile(const LinearJob& job, std::int64_t row, std::int64_t panel, std::int64_t ahead) {
  const Weight& w = *job.w;
  const Rows x = rows_from(job, row);
  const std::byte* block = w.panel(panel);
  const std::int64_t panel_bytes = w.panel_bytes();
  __m512 acc[R];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) acc[r] = _mm512_setzero_ps();
  for (std::int64_t b = 0; b < w.blocks(); ++b, block += kStep<Format::Q4>) {
    fetch(reinterpret_cast<std::uintptr_t>(block) + static_cast<std::uintptr_t>(panel_bytes), ahead);
    const __m512 scale = load_halves(block + quants_bytes(Format::Q4) + kQ4ScalesAt);
    add_bytes<true, R>(job.scratch + b * kBlock * kPanel, scale, x, b, acc);
  }
  finish<R>(job, row, panel, acc);
}

template <Format F>
void one_row(const LinearJob& job, std::int64_t panel_begin, std::int64_t panel_end) {
  constexpr int kStreams = 4;
  const std::int64_t apart = (panel_end - panel_begin) / kStreams;
  for (std::int64_t p = 0; p < apart; ++p) tile<F, 1, kStreams>(job, 0, panel_begin + p, apart, kLines<F>);
  for (std::int64_t p = panel_begin + kStreams * apart; p < panel_end; ++p) tile<F, 1, 1>(job, 0, p, 0, kLines<F>);
}

template <Format F, int R>
void tile_of(std::int64_t rows, const LinearJob& job, std::int64_t row, std::int64_t panel, std::int64_t ahead) {
  if (rows == R) {
    if constexpr (F == Format::Q4 && R >= kUnpackRows) {
      unpacked_tile<R>(job, row, panel, ahead);
    } else {
      tile<F, R, 1>(job, row, panel, 0, ahead);
    }
  } else if constexpr (R > 1) {
    tile_of<F, R - 1>(rows, job, row, panel, ahead);
  }
}

// In tiles as equal as can be: of four rows and more none has fewer than four.
template <Format F>
void many_rows(const LinearJob& job, std::int64_t panel_begin, std::int64_t panel_end) {
  const std::int64_t tiles = (job.rows + kTileRows - 1) / kTileRows;
  for (std::int64_t panel = panel_begin; panel < panel_end; ++panel) {
    if (F == Format::Q4 && job.rows >= kUnpackRows) unpack_q4(*job.w, job.w->panel(panel), -128, job.scratch);
    for (std::int64_t t = 0; t < tiles; ++t) {
      const std::int64_t row = t * job.rows / tiles, end = (t + 1) * job.rows / tiles;
      tile_of<F, kTileRows>(end - row, job, row, panel, t == 0 ? kLines<F> : 0);  // later tiles find what they need
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
  }
}

}  // namespace octavo::avx512
