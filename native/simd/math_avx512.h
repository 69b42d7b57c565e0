// math_scalar.h for sixteen floats at a time, bit for bit, and the sum of sixteen. Only for files compiled with
// AVX-512.
#pragma once
#include <immintrin.h>

#include "simd/math_avx2.h"

namespace octavo::avx512 {

static inline __m512 set_(float x) { return _mm512_set1_ps(x); }

static inline __m512 exp_(__m512 x) {
  using namespace math;
  const __m512 magic = set_(kRoundMagic);
  const __m512 shifted = _mm512_fmadd_ps(x, set_(kLog2E), magic);
  const __m512 n = _mm512_sub_ps(shifted, magic);
  __m512 r = _mm512_fmadd_ps(n, set_(-kLn2High), x);
  r = _mm512_fmadd_ps(n, set_(-kLn2Low), r);
  __m512 p = _mm512_fmadd_ps(set_(kExp[4]), r, set_(kExp[3]));
  p = _mm512_fmadd_ps(p, r, set_(kExp[2]));
  p = _mm512_fmadd_ps(p, r, set_(kExp[1]));
  p = _mm512_fmadd_ps(p, r, set_(kExp[0]));
  const __m512 y = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(r, r), p, r), set_(1.0f));
  const __m512i exponent = _mm512_sub_epi32(_mm512_castps_si512(shifted), _mm512_castps_si512(magic));
  const __m512 out = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(y), _mm512_slli_epi32(exponent, 23)));
  // What the lanes outside the range computed is discarded here.
  const __m512 high =
      _mm512_mask_mov_ps(out, _mm512_cmp_ps_mask(x, set_(kExpHigh), _CMP_GT_OQ), set_(scalar::infinity_()));
  const __m512 low = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, set_(kExpLow), _CMP_NLT_UQ), high);
  return _mm512_mask_mov_ps(low, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), set_(scalar::nan_()));
}

static inline __m512 tanh_(__m512 x) {
  using namespace math;
  const __m512 sign = _mm512_and_ps(x, set_(-0.0f));
  const __m512 a = _mm512_xor_ps(x, sign);
  const __m512 z = _mm512_mul_ps(a, a);
  __m512 p = _mm512_fmadd_ps(set_(kTanh[4]), z, set_(kTanh[3]));
  p = _mm512_fmadd_ps(p, z, set_(kTanh[2]));
  p = _mm512_fmadd_ps(p, z, set_(kTanh[1]));
  p = _mm512_fmadd_ps(p, z, set_(kTanh[0]));
  const __m512 small = _mm512_fmadd_ps(_mm512_mul_ps(a, z), p, a);
  const __m512 e = _mm512_add_ps(exp_(_mm512_add_ps(a, a)), set_(1.0f));
  const __m512 large = _mm512_sub_ps(set_(1.0f), _mm512_div_ps(set_(2.0f), e));
  const __m512 y = _mm512_mask_mov_ps(large, _mm512_cmp_ps_mask(a, set_(kTanhSmall), _CMP_LT_OQ), small);
  return _mm512_mask_mov_ps(_mm512_or_ps(y, sign), _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), set_(scalar::nan_()));
}

static inline __m512 silu_(__m512 x) {
  return _mm512_div_ps(x, _mm512_add_ps(set_(1.0f), exp_(_mm512_xor_ps(x, set_(-0.0f)))));
}

// The tree i + i+8, i + i+4, i + i+2, i + i+1.
static inline float tree_sum(__m512 x) {
  const __m256 s8 = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
}

}  // namespace octavo::avx512
