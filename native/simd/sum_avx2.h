// The end of every sum inside one output: 16 partial sums, then the tree i + i+8, i + i+4, i + i+2, i + i+1.
#pragma once
#include <immintrin.h>

namespace octavo::avx2 {

static inline float tree_sum(__m256 low, __m256 high) {  // partial sums 0..7 and 8..15
  const __m256 s8 = _mm256_add_ps(low, high);
  const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
}

}  // namespace octavo::avx2
