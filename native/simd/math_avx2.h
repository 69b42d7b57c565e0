// math_scalar.h for eight floats at a time, bit for bit. Only for files compiled with AVX2 and FMA.
#pragma once
#include <immintrin.h>

#include "simd/math_scalar.h"

namespace octavo::avx2 {

static inline __m256 set_(float x) { return _mm256_set1_ps(x); }
static inline __m256 nan_() { return _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)); }
static inline __m256 infinity_() { return _mm256_castsi256_ps(_mm256_set1_epi32(0x7f800000)); }

static inline __m256 exp_(__m256 x) {
  using namespace math;
  const __m256 magic = set_(kRoundMagic);
  const __m256 shifted = _mm256_fmadd_ps(x, set_(kLog2E), magic);
  const __m256 n = _mm256_sub_ps(shifted, magic);
  __m256 r = _mm256_fmadd_ps(n, set_(-kLn2High), x);
  r = _mm256_fmadd_ps(n, set_(-kLn2Low), r);
  __m256 p = _mm256_fmadd_ps(set_(kExp[4]), r, set_(kExp[3]));
  p = _mm256_fmadd_ps(p, r, set_(kExp[2]));
  p = _mm256_fmadd_ps(p, r, set_(kExp[1]));
  p = _mm256_fmadd_ps(p, r, set_(kExp[0]));
  const __m256 y = _mm256_add_ps(_mm256_fmadd_ps(_mm256_mul_ps(r, r), p, r), set_(1.0f));
  const __m256i exponent = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_castps_si256(magic));
  __m256 out = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), _mm256_slli_epi32(exponent, 23)));
  // What the lanes outside the range computed is discarded here.
  out = _mm256_blendv_ps(out, infinity_(), _mm256_cmp_ps(x, set_(kExpHigh), _CMP_GT_OQ));
  out = _mm256_andnot_ps(_mm256_cmp_ps(x, set_(kExpLow), _CMP_LT_OQ), out);
  return _mm256_blendv_ps(out, nan_(), _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

static inline __m256 log_(__m256 x) {
  using namespace math;
  const __m256 zero = _mm256_setzero_ps();
  const __m256 denormal = _mm256_cmp_ps(x, set_(0x1p-126f), _CMP_LT_OQ);
  const __m256 scaled = _mm256_blendv_ps(x, _mm256_mul_ps(x, set_(0x1p23f)), denormal);
  const __m256i base = _mm256_set1_epi32(static_cast<int>(kSqrtHalfBits));
  const __m256i u = _mm256_sub_epi32(_mm256_castps_si256(scaled), base);
  const __m256i shift = _mm256_and_si256(_mm256_castps_si256(denormal), _mm256_set1_epi32(23));
  const __m256 e = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_srai_epi32(u, 23), shift));
  const __m256i mantissa = _mm256_add_epi32(_mm256_and_si256(u, _mm256_set1_epi32(0x007fffff)), base);
  const __m256 f = _mm256_sub_ps(_mm256_castsi256_ps(mantissa), set_(1.0f));
  __m256 p = _mm256_fmadd_ps(set_(kLog[9]), f, set_(kLog[8]));
  for (int i = 7; i >= 0; --i) p = _mm256_fmadd_ps(p, f, set_(kLog[i]));
  const __m256 tail = _mm256_fmadd_ps(e, set_(kLn2Low), _mm256_mul_ps(_mm256_mul_ps(f, f), p));
  __m256 out = _mm256_fmadd_ps(e, set_(kLn2High), _mm256_add_ps(f, tail));
  out = _mm256_blendv_ps(out, infinity_(), _mm256_cmp_ps(x, infinity_(), _CMP_EQ_OQ));
  out = _mm256_blendv_ps(out, _mm256_sub_ps(zero, infinity_()), _mm256_cmp_ps(x, zero, _CMP_EQ_OQ));
  return _mm256_blendv_ps(out, nan_(), _mm256_cmp_ps(x, zero, _CMP_NGE_UQ));
}

static inline __m256 tanh_(__m256 x) {
  using namespace math;
  const __m256 sign = _mm256_and_ps(x, set_(-0.0f));
  const __m256 a = _mm256_xor_ps(x, sign);
  const __m256 z = _mm256_mul_ps(a, a);
  __m256 p = _mm256_fmadd_ps(set_(kTanh[4]), z, set_(kTanh[3]));
  p = _mm256_fmadd_ps(p, z, set_(kTanh[2]));
  p = _mm256_fmadd_ps(p, z, set_(kTanh[1]));
  p = _mm256_fmadd_ps(p, z, set_(kTanh[0]));
  const __m256 small = _mm256_fmadd_ps(_mm256_mul_ps(a, z), p, a);
  const __m256 e = _mm256_add_ps(exp_(_mm256_add_ps(a, a)), set_(1.0f));
  const __m256 large = _mm256_sub_ps(set_(1.0f), _mm256_div_ps(set_(2.0f), e));
  const __m256 y = _mm256_blendv_ps(large, small, _mm256_cmp_ps(a, set_(kTanhSmall), _CMP_LT_OQ));
  return _mm256_blendv_ps(_mm256_or_ps(y, sign), nan_(), _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

static inline __m256 silu_(__m256 x) {
  return _mm256_div_ps(x, _mm256_add_ps(set_(1.0f), exp_(_mm256_xor_ps(x, set_(-0.0f)))));
}

}  // namespace octavo::avx2
