// What the AVX-512 and AMX kernels of ops/linear.h share: loads, and the end of an output's sum. 16 lanes hold a panel.
#pragma once
#include <immintrin.h>

#include "formats/weight.h"
#include "ops/linear.h"
#include "simd/math_avx2.h"

namespace octavo::avx512 {

static inline __m512i load_integers(const std::byte* p) { return _mm512_loadu_si512(p); }
static inline __m512 load_floats(const std::byte* p) { return _mm512_loadu_ps(p); }
static inline __m512 load_halves(const std::byte* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// Calls in `lines` cache lines. An address past the weights is harmless to that, hence an integer, not a pointer.
static inline void fetch(std::uintptr_t at, std::int64_t lines) {
  for (std::int64_t i = 0; i < lines; ++i, at += 64) _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T0);
}

// Cache lines of a panel's step: a block of 32 inputs, or one input of a float format.
template <Format F>
constexpr std::int64_t kLines = (panel_step_bytes(F) + 63) / 64;

static inline __m512i low_nibbles(__m512i both) { return _mm512_and_si512(both, _mm512_set1_epi8(15)); }
static inline __m512i high_nibbles(__m512i both) { return low_nibbles(_mm512_srli_epi16(both, 4)); }

// Scales and, for q4 and q4f, minima of a quantised block: behind its integers.
template <Format F>
static inline __m512 block_scale(const std::byte* block) {
  if constexpr (F == Format::Q8) return load_halves(block + 512);
  return F == Format::Q4 ? load_halves(block + 256) : load_floats(block + 256);
}
template <Format F>
static inline __m512 block_min(const std::byte* block) {
  return F == Format::Q4 ? load_halves(block + 288) : load_floats(block + 320);
}

// acc += one group whose integer dot product is known, in the canonical order.
template <Format F>
[[gnu::always_inline]] inline void add_group(__m512i dot, __m512 scale, __m512 min, const QBlock& x, __m512& acc) {
  acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(scale, _mm512_set1_ps(x.d)), acc);
  if constexpr (F != Format::Q8) acc = _mm512_fmadd_ps(min, _mm512_set1_ps(x.s), acc);
}

// Bias, epilogue and store of one row's 16 outputs; those past n are neither read nor written.
static inline void finish(const LinearJob& job, std::int64_t row, std::int64_t panel, __m512 acc) {
  const std::int64_t first = panel * kPanel;
  if (job.bias != nullptr) acc = _mm512_add_ps(acc, _mm512_loadu_ps(job.bias + first));
  if (job.epilogue == Epilogue::SiluMul) {
    const __m256 gate = _mm512_castps512_ps256(acc), up = _mm512_extractf32x8_ps(acc, 1);
    const std::int64_t left = job.w->n / 2 - panel * 8;
    const auto present = static_cast<__mmask8>(left >= 8 ? 0xff : (1u << left) - 1);
    _mm256_mask_storeu_ps(job.y + row * job.y_stride + panel * 8, present, _mm256_mul_ps(avx2::silu_(gate), up));
    return;
  }
  const std::int64_t left = job.w->n - first;
  const auto present = static_cast<__mmask16>(left >= kPanel ? 0xffff : (1u << left) - 1);
  if (job.epilogue == Epilogue::Add) {
    acc = _mm512_add_ps(_mm512_maskz_loadu_ps(present, job.residual + row * job.y_stride + first), acc);
  }
  _mm512_mask_storeu_ps(job.y + row * job.y_stride + first, present, acc);
}

// The same for rows row .. row + rows - 1, whose sums are acc[0 .. rows). By way of memory, in a loop that stays one:
// else each kind of tile carries a copy for each of its rows.
template <int R>
[[gnu::always_inline]] inline void finish_rows(const LinearJob& job, std::int64_t row, std::int64_t rows,
                                               std::int64_t panel, const __m512 (&acc)[R]) {
  alignas(64) float sums[R][kPanel];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) _mm512_store_ps(sums[r], acc[r]);
#pragma GCC unroll 1
  for (std::int64_t r = 0; r < rows; ++r) finish(job, row + r, panel, _mm512_load_ps(sums[r]));
}

}  // namespace octavo::avx512
