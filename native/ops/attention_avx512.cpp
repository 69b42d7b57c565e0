// ops/attention.h in AVX-512: a register holds a block's 16 tokens for scores and 16 head dimensions for values, so
// every FMA chain is the scalar one. Up to 12 query vectors share each reading of K and V.
#include "ops/attention_vectors.h"
#include "simd/declarations.h"
#include "simd/math_avx512.h"

namespace octavo::avx512 {
namespace {

inline __m512 load16(const std::uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline __m512 load16(const float* p) { return _mm512_loadu_ps(p); }
inline __m512 load16(const std::int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

// Scores of R vectors from v on with the B blocks from `block` on, into e onwards. With Prefetch (the first vectors of
// a span) the values of these blocks and the keys of the B blocks after them are called in.
template <class T, int R, int B, bool Prefetch>
void score_blocks(const Tile<T>& tile, std::int64_t v, std::int64_t block, std::int64_t last_block, float* e) {
  const T* k[B];
  const T* ahead[B];
  OCTAVO_UNROLL
  for (int b = 0; b < B; ++b) {
    k[b] = tile.keys(block + b);
    ahead[b] = tile.keys(block + b + B <= last_block ? block + b + B : last_block);
  }
  const std::int64_t value_offset = tile.value_offset();
  const float* q = tile.q + v;
  __m512 acc[B][R];
  OCTAVO_UNROLL
  for (int b = 0; b < B; ++b) {
    OCTAVO_UNROLL
    for (int r = 0; r < R; ++r) acc[b][r] = _mm512_setzero_ps();
  }
  for (std::int64_t d = 0; d < tile.head_dim; ++d, q += tile.vectors) {
    __m512 x[B];
    OCTAVO_UNROLL
    for (int b = 0; b < B; ++b) {
      const T* p = k[b] + d * kBlockTokens;
      if constexpr (Prefetch) {
        _mm_prefetch(reinterpret_cast<const char*>(p + value_offset), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(ahead[b] + d * kBlockTokens), _MM_HINT_T0);
      }
      x[b] = load16(p);
    }
    OCTAVO_UNROLL
    for (int r = 0; r < R; ++r) {
      const __m512 qr = _mm512_set1_ps(q[r]);
      OCTAVO_UNROLL
      for (int b = 0; b < B; ++b) acc[b][r] = _mm512_fmadd_ps(x[b], qr, acc[b][r]);
    }
  }
  OCTAVO_UNROLL
  for (int b = 0; b < B; ++b) {
    OCTAVO_UNROLL
    for (int r = 0; r < R; ++r) {
      if constexpr (kScaled<T>) acc[b][r] = _mm512_mul_ps(acc[b][r], _mm512_loadu_ps(tile.scales(k[b])));
      _mm512_storeu_ps(e + r * kSpanTokens + b * kBlockTokens, acc[b][r]);
    }
  }
}

template <class T, int R, int B, bool Prefetch>
void score_span(const Tile<T>& tile, std::int64_t v, std::int64_t block, std::int64_t count, std::int64_t last_block,
                float* e) {
  for (; count >= B; count -= B, block += B, e += B * kBlockTokens) {
    score_blocks<T, R, B, Prefetch>(tile, v, block, last_block, e);
  }
  if constexpr (B > 1) score_span<T, R, B / 2, Prefetch>(tile, v, block, count, last_block, e);
}

// Scores to exponentials (int8: times the scales of V), and the new m, l and a of vector v. Masked scores become -inf,
// their exponentials +0. A NaN score may drop out of the maximum, but its own exponential is NaN and so is l.
template <class T, int Blocks>
void soften_span(const Tile<T>& tile, std::int64_t v, std::int64_t begin) {
  float* e = tile.e + v * kSpanTokens;
  const std::int64_t first = tile.first_token(v) - begin, last = tile.row_position(v) - begin;
  const __m512 infinite = set_(-scalar::infinity_());
  __m512 score[Blocks], top = infinite;
  OCTAVO_UNROLL
  for (int b = 0; b < Blocks; ++b) {
    score[b] = _mm512_loadu_ps(e + b * kBlockTokens);
    if (tile.soft_cap > 0.0f) {
      const __m512 cap = set_(tile.soft_cap);
      score[b] = _mm512_mul_ps(cap, tanh_(_mm512_div_ps(score[b], cap)));
    }
    const std::int64_t from = first - b * kBlockTokens, to = last - b * kBlockTokens;  // tokens that count, in lanes
    if (from > 0 || to < kBlockTokens - 1) {
      const unsigned past = from >= kBlockTokens ? 0xffffu : from > 0 ? (1u << from) - 1 : 0;
      const unsigned held = to >= kBlockTokens - 1 ? 0xffffu : (2u << to) - 1;
      score[b] = _mm512_mask_mov_ps(infinite, static_cast<__mmask16>(held & ~past), score[b]);
    }
    top = _mm512_max_ps(top, score[b]);
  }
  const float m = max_(tile.m[v], _mm512_reduce_max_ps(top));
  const __m512 shift = set_(m);
  __m512 sum = _mm512_setzero_ps();
  OCTAVO_UNROLL
  for (int b = 0; b < Blocks; ++b) {
    __m512 weight = exp_(_mm512_sub_ps(score[b], shift));
    sum = _mm512_add_ps(sum, weight);
    if constexpr (kScaled<T>) {
      weight = _mm512_mul_ps(weight, _mm512_loadu_ps(tile.scales(tile.values(begin / kBlockTokens + b))));
    }
    _mm512_storeu_ps(e + b * kBlockTokens, weight);
  }
  const float a = scalar::exp_(tile.m[v] - m);
  tile.m[v] = m;
  tile.a[v] = a;
  tile.l[v] = scalar::fma_(tile.l[v], a, tree_sum(sum));
}

template <class T, int Blocks = kSpanBlocks>
void soften_span(const Tile<T>& tile, std::int64_t v, std::int64_t begin, std::int64_t blocks) {
  if (blocks == Blocks) {
    soften_span<T, Blocks>(tile, v, begin);
  } else if constexpr (Blocks > 1) {
    soften_span<T, Blocks - 1>(tile, v, begin, blocks);
  }
}

// o = o * a, then the FMA chains over the span's tokens, for R vectors and C times 16 dimensions from d on.
template <class T, int R, int C>
void add_values(const Tile<T>& tile, std::int64_t v, std::int64_t block, std::int64_t count, std::int64_t d) {
  float* o = tile.o + v * tile.head_dim + d;
  const float* e = tile.e + v * kSpanTokens;
  __m512 acc[R][C];
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r) {
    const __m512 a = _mm512_set1_ps(tile.a[v + r]);
    OCTAVO_UNROLL
    for (int c = 0; c < C; ++c) acc[r][c] = _mm512_mul_ps(_mm512_loadu_ps(o + r * tile.head_dim + 16 * c), a);
  }
  for (std::int64_t b = 0; b < count; ++b) {
    const T* value = tile.values(block + b) + d;
    for (std::int64_t t = 0; t < kBlockTokens; ++t, ++e, value += tile.head_dim) {
      __m512 x[C];
      OCTAVO_UNROLL
      for (int c = 0; c < C; ++c) x[c] = load16(value + 16 * c);
      OCTAVO_UNROLL
      for (int r = 0; r < R; ++r) {
        const __m512 weight = _mm512_set1_ps(e[r * kSpanTokens]);
        OCTAVO_UNROLL
        for (int c = 0; c < C; ++c) acc[r][c] = _mm512_fmadd_ps(weight, x[c], acc[r][c]);
      }
    }
  }
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r) {
    OCTAVO_UNROLL
    for (int c = 0; c < C; ++c) _mm512_storeu_ps(o + r * tile.head_dim + 16 * c, acc[r][c]);
  }
}

template <class T, int R, int C>
void add_values_from(const Tile<T>& tile, std::int64_t v, std::int64_t block, std::int64_t count, std::int64_t d) {
  for (; d + 16 * C <= tile.head_dim; d += 16 * C) add_values<T, R, C>(tile, v, block, count, d);
  if constexpr (C > 1) add_values_from<T, R, C / 2>(tile, v, block, count, d);
}

struct Spans {
  static constexpr int kVectors = 12;

  // Sizes are such that 8 to 24 chains run at once.
  template <class T, int R>
  static void update(const Tile<T>& tile, std::int64_t v, std::int64_t begin, std::int64_t count,
                     std::int64_t last_block, bool prefetch) {
    constexpr int B = R <= 6 ? 4 : 2, C = R <= 1 ? 8 : R <= 6 ? 4 : 2;
    const std::int64_t block = begin / kBlockTokens;
    float* e = tile.e + v * kSpanTokens;
    if (prefetch) {
      score_span<T, R, B, true>(tile, v, block, count, last_block, e);
    } else {
      score_span<T, R, B, false>(tile, v, block, count, last_block, e);
    }
    for (int r = 0; r < R; ++r) soften_span(tile, v + r, begin, count);
    add_values_from<T, R, C>(tile, v, block, count, 0);
  }
};

}  // namespace

void attention(const AttentionJob& job, const AttentionItem& item, AttentionScratch& scratch) {
  if (job.layout.head_dim % 16 != 0) return avx2::attention(job, item, scratch);
  attention_items<Spans>(job, item, scratch);
}

}  // namespace octavo::avx512
