// What the AVX-512 and AMX kernels of ops/linear.h share: loads, the unpacking of q4, and the end of an output's sum.
// 16 lanes hold a panel.
#pragma once
#include <immintrin.h>

#include "formats/weight.h"
#include "ops/linear.h"
#include "simd/math_avx512.h"

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

// Bytes, and cache lines, of a panel's block of 64 inputs, or of one input of a float format.
template <Format F>
constexpr std::int64_t kStep = is_quantised(F) ? block_bytes(F) : step_bytes(F);
template <Format F>
constexpr std::int64_t kLines = (kStep<F> + 63) / 64;

static inline __m512i low_nibbles(__m512i both) { return _mm512_and_si512(both, _mm512_set1_epi8(15)); }
static inline __m512i high_nibbles(__m512i both) { return low_nibbles(_mm512_srli_epi16(both, 4)); }

static inline __m512i broadcast_terms(const std::byte* sixteen) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(sixteen)));
}

// A panel's q4 weights as bytes (multiplier * q + offset + bias, modulo 256) in the layout of q8. One product of 16
// bits makes two: multiplier * q fits a byte, so nothing is carried from the lower into the upper.
static inline void unpack_q4(const Weight& w, const std::byte* panel, std::int8_t bias, std::byte* out) {
  alignas(64) static constexpr std::int8_t kHalves[64] = {
      0,  -1, 0,  -1, 1,  -1, 1,  -1, 2,  -1, 2,  -1, 3,  -1, 3,  -1, 4,  -1, 4,  -1, 5,  -1,
      5,  -1, 6,  -1, 6,  -1, 7,  -1, 7,  -1, 8,  -1, 8,  -1, 9,  -1, 9,  -1, 10, -1, 10, -1,
      11, -1, 11, -1, 12, -1, 12, -1, 13, -1, 13, -1, 14, -1, 14, -1, 15, -1, 15, -1};
  const __m512i halves = _mm512_load_si512(kHalves);
  const __m512i bytes = _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaa, halves, _mm512_slli_epi16(halves, 8));
  for (std::int64_t b = 0; b < w.blocks(); ++b, panel += block_bytes(Format::Q4), out += kBlock * kPanel) {
    const std::byte *quants = panel, *terms = panel + quants_bytes(Format::Q4);
#pragma GCC unroll 2
    for (int g = 0; g < 2; ++g) {
      const __m512i multiplier = _mm512_shuffle_epi8(broadcast_terms(terms + kPanel * g), halves);
      const __m512i offset = _mm512_add_epi8(
          _mm512_shuffle_epi8(broadcast_terms(terms + kOffsetsAt + kPanel * g), bytes), _mm512_set1_epi8(bias));
#pragma GCC unroll 4
      for (int v = 4 * g; v < 4 * g + 4; ++v) {
        const __m512i both = load_integers(quants + 64 * v);
        const __m512i low = _mm512_mullo_epi16(low_nibbles(both), multiplier);
        const __m512i high = _mm512_mullo_epi16(high_nibbles(both), multiplier);
        _mm512_store_si512(out + 128 * v, _mm512_add_epi8(low, offset));
        _mm512_store_si512(out + 128 * v + 64, _mm512_add_epi8(high, offset));
      }
    }
  }
}

// acc += one block whose integer dot product is known, in the canonical order.
[[gnu::always_inline]] static inline void add_block(__m512i dot, __m512 scale, float x_scale, __m512& acc) {
  acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(scale, _mm512_set1_ps(x_scale)), acc);
}

// Bias, epilogue and store of rows row .. row + rows - 1 of a panel, whose sums are acc[0 .. rows); outputs past n are
// neither read nor written.
[[gnu::noinline, maybe_unused]] static void finish(const LinearJob& job, std::int64_t row, std::int64_t rows,
                                                   std::int64_t panel, float (*acc)[kPanel]) {
  const std::int64_t first = panel * kPanel, stride = job.y_stride;
  if (job.bias != nullptr) {
    const __m512 bias = _mm512_loadu_ps(job.bias + first);
    for (std::int64_t r = 0; r < rows; ++r) _mm512_store_ps(acc[r], _mm512_add_ps(_mm512_load_ps(acc[r]), bias));
  }
  if (job.epilogue == Epilogue::SiluMul) {  // two rows' gates, then their ups, in a register
    const std::int64_t left = job.w->n / 2 - panel * 8;
    const auto present = static_cast<__mmask8>(left >= 8 ? 0xff : (1u << left) - 1);
    float* y = job.y + row * stride + panel * 8;
    for (std::int64_t r = 0; r < rows; r += 2, y += 2 * stride) {
      const bool both = r + 1 < rows;
      const __m512 one = _mm512_load_ps(acc[r]), two = _mm512_load_ps(acc[both ? r + 1 : r]);
      const __m512 gates = _mm512_shuffle_f32x4(one, two, 0x44), ups = _mm512_shuffle_f32x4(one, two, 0xee);
      const __m512 product = _mm512_mul_ps(silu_(gates), ups);
      _mm256_mask_storeu_ps(y, present, _mm512_castps512_ps256(product));
      if (both) _mm256_mask_storeu_ps(y + stride, present, _mm512_extractf32x8_ps(product, 1));
    }
    return;
  }
  const std::int64_t left = job.w->n - first;
  const auto present = static_cast<__mmask16>(left >= kPanel ? 0xffff : (1u << left) - 1);
  float* y = job.y + row * stride + first;
  if (job.epilogue == Epilogue::Add) {
    const float* residual = job.residual + row * stride + first;
    for (std::int64_t r = 0; r < rows; ++r) {
      const __m512 sum = _mm512_add_ps(_mm512_maskz_loadu_ps(present, residual + r * stride), _mm512_load_ps(acc[r]));
      _mm512_mask_storeu_ps(y + r * stride, present, sum);
    }
    return;
  }
  for (std::int64_t r = 0; r < rows; ++r) _mm512_mask_storeu_ps(y + r * stride, present, _mm512_load_ps(acc[r]));
}

template <int R>
[[gnu::always_inline]] inline void finish(const LinearJob& job, std::int64_t row, std::int64_t panel,
                                          const __m512 (&acc)[R]) {
  alignas(64) float sums[R][kPanel];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) _mm512_store_ps(sums[r], acc[r]);
  finish(job, row, R, panel, sums);
}

}  // namespace octavo::avx512
