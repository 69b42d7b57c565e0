// ops/attention.h in AVX2: the query vectors of an item (rows x heads of the group) share each reading of K and V.
// Scores hold 16 tokens in lanes and values hold head dimensions in lanes, so every FMA chain is the scalar one.
#include "ops/attention_vectors.h"
#include "simd/declarations.h"
#include "simd/math_avx2.h"
#include "simd/sum_avx2.h"

namespace octavo::avx2 {
namespace {

inline __m256 load8(const std::uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline __m256 load8(const float* p) { return _mm256_loadu_ps(p); }
inline __m256 load8(const std::int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

// Scores of R vectors from v on with the B blocks from `block` on, into columns `column` onwards of e. With Prefetch
// (the first vectors of a span) the values of these blocks and the keys of the B blocks after them are called in.
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
  __m256 acc[B][R][2];
  OCTAVO_UNROLL
  for (int b = 0; b < B; ++b) {
    OCTAVO_UNROLL
    for (int r = 0; r < R; ++r) acc[b][r][0] = acc[b][r][1] = _mm256_setzero_ps();
  }
  for (std::int64_t d = 0; d < tile.head_dim; ++d, q += tile.vectors) {
    OCTAVO_UNROLL
    for (int b = 0; b < B; ++b) {
      const T* p = k[b] + d * kBlockTokens;
      if constexpr (Prefetch) {
        _mm_prefetch(reinterpret_cast<const char*>(p + value_offset), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(ahead[b] + d * kBlockTokens), _MM_HINT_T0);
      }
      const __m256 k0 = load8(p), k1 = load8(p + 8);
      OCTAVO_UNROLL
      for (int r = 0; r < R; ++r) {
        const __m256 qr = _mm256_broadcast_ss(q + r);
        acc[b][r][0] = _mm256_fmadd_ps(k0, qr, acc[b][r][0]);
        acc[b][r][1] = _mm256_fmadd_ps(k1, qr, acc[b][r][1]);
      }
    }
  }
  OCTAVO_UNROLL
  for (int b = 0; b < B; ++b) {
    if constexpr (kScaled<T>) {
      const __m256 s0 = _mm256_loadu_ps(tile.scales(k[b])), s1 = _mm256_loadu_ps(tile.scales(k[b]) + 8);
      OCTAVO_UNROLL
      for (int r = 0; r < R; ++r) {
        acc[b][r][0] = _mm256_mul_ps(acc[b][r][0], s0);
        acc[b][r][1] = _mm256_mul_ps(acc[b][r][1], s1);
      }
    }
    OCTAVO_UNROLL
    for (int r = 0; r < R; ++r) {
      _mm256_storeu_ps(e + r * kSpanTokens + b * kBlockTokens, acc[b][r][0]);
      _mm256_storeu_ps(e + r * kSpanTokens + b * kBlockTokens + 8, acc[b][r][1]);
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
template <class T>
void soften_span(const Tile<T>& tile, std::int64_t v, std::int64_t begin, std::int64_t blocks) {
  float* e = tile.e + v * kSpanTokens;
  const std::int64_t vectors = blocks * 2;  // of 8 tokens
  if (tile.soft_cap > 0.0f) {
    const __m256 cap = set_(tile.soft_cap);
    for (std::int64_t i = 0; i < vectors; ++i) {
      _mm256_storeu_ps(e + 8 * i, _mm256_mul_ps(cap, tanh_(_mm256_div_ps(_mm256_loadu_ps(e + 8 * i), cap))));
    }
  }
  const std::int64_t first = tile.first_token(v) - begin, last = tile.row_position(v) - begin;
  for (std::int64_t t = 0; t < first; ++t) e[t] = -scalar::infinity_();
  for (std::int64_t t = last + 1; t < blocks * kBlockTokens; ++t) e[t] = -scalar::infinity_();

  __m256 top = _mm256_loadu_ps(e);
  for (std::int64_t i = 1; i < vectors; ++i) top = _mm256_max_ps(top, _mm256_loadu_ps(e + 8 * i));
  __m128 top4 = _mm_max_ps(_mm256_castps256_ps128(top), _mm256_extractf128_ps(top, 1));
  top4 = _mm_max_ps(top4, _mm_movehl_ps(top4, top4));
  top4 = _mm_max_ss(top4, _mm_movehdup_ps(top4));
  const float m = max_(tile.m[v], _mm_cvtss_f32(top4));

  const __m256 shift = set_(m);
  __m256 low = _mm256_setzero_ps(), high = low;
  for (std::int64_t i = 0; i < vectors; i += 2) {
    const __m256 e0 = exp_(_mm256_sub_ps(_mm256_loadu_ps(e + 8 * i), shift));
    const __m256 e1 = exp_(_mm256_sub_ps(_mm256_loadu_ps(e + 8 * i + 8), shift));
    _mm256_storeu_ps(e + 8 * i, e0);
    _mm256_storeu_ps(e + 8 * i + 8, e1);
    low = _mm256_add_ps(low, e0);
    high = _mm256_add_ps(high, e1);
  }
  if constexpr (kScaled<T>) {
    for (std::int64_t i = 0; i < vectors; ++i) {
      const float* scales = tile.scales(tile.values(begin / kBlockTokens + i / 2)) + i % 2 * 8;
      _mm256_storeu_ps(e + 8 * i, _mm256_mul_ps(_mm256_loadu_ps(e + 8 * i), _mm256_loadu_ps(scales)));
    }
  }
  const float a = scalar::exp_(tile.m[v] - m);
  tile.m[v] = m;
  tile.a[v] = a;
  tile.l[v] = scalar::fma_(tile.l[v], a, tree_sum(low, high));
}

// o = o * a, then the FMA chains over the span's tokens, for R vectors and C times 8 dimensions from d on.
template <class T, int R, int C>
void add_values(const Tile<T>& tile, std::int64_t v, std::int64_t block, std::int64_t count, std::int64_t d) {
  float* o = tile.o + v * tile.head_dim + d;
  const float* e = tile.e + v * kSpanTokens;
  __m256 acc[R][C];
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r) {
    const __m256 a = _mm256_broadcast_ss(tile.a + v + r);
    OCTAVO_UNROLL
    for (int c = 0; c < C; ++c) acc[r][c] = _mm256_mul_ps(_mm256_loadu_ps(o + r * tile.head_dim + 8 * c), a);
  }
  for (std::int64_t b = 0; b < count; ++b) {
    const T* value = tile.values(block + b) + d;
    for (std::int64_t t = 0; t < kBlockTokens; ++t, ++e, value += tile.head_dim) {
      if constexpr (R <= C) {
        __m256 weight[R];
        OCTAVO_UNROLL
        for (int r = 0; r < R; ++r) weight[r] = _mm256_broadcast_ss(e + r * kSpanTokens);
        OCTAVO_UNROLL
        for (int c = 0; c < C; ++c) {
          const __m256 x = load8(value + 8 * c);
          OCTAVO_UNROLL
          for (int r = 0; r < R; ++r) acc[r][c] = _mm256_fmadd_ps(weight[r], x, acc[r][c]);
        }
      } else {
        __m256 x[C];
        OCTAVO_UNROLL
        for (int c = 0; c < C; ++c) x[c] = load8(value + 8 * c);
        OCTAVO_UNROLL
        for (int r = 0; r < R; ++r) {
          const __m256 weight = _mm256_broadcast_ss(e + r * kSpanTokens);
          OCTAVO_UNROLL
          for (int c = 0; c < C; ++c) acc[r][c] = _mm256_fmadd_ps(weight, x[c], acc[r][c]);
        }
      }
    }
  }
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r) {
    OCTAVO_UNROLL
    for (int c = 0; c < C; ++c) _mm256_storeu_ps(o + r * tile.head_dim + 8 * c, acc[r][c]);
  }
}

template <class T, int R, int C>
void add_values_from(const Tile<T>& tile, std::int64_t v, std::int64_t block, std::int64_t count, std::int64_t d) {
  for (; d + 8 * C <= tile.head_dim; d += 8 * C) add_values<T, R, C>(tile, v, block, count, d);
  if constexpr (C > 1) add_values_from<T, R, C / 2>(tile, v, block, count, d);
}

struct Spans {
  static constexpr int kVectors = 6;

  // Sizes are such that 8 to 12 chains run at once.
  template <class T, int R>
  static void update(const Tile<T>& tile, std::int64_t v, std::int64_t begin, std::int64_t count,
                     std::int64_t last_block, bool prefetch) {
    constexpr int B = R == 1 ? 4 : R == 2 ? 2 : 1, C = R == 1 ? 8 : R <= 3 ? 4 : 2;
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
  if (job.layout.head_dim % 8 != 0) return scalar::attention(job, item, scratch);
  attention_items<Spans>(job, item, scratch);
}

void attention_merge(const AttentionJob& job, const AttentionPlan& plan, std::int64_t row_begin, std::int64_t row_end) {
  const std::int64_t head_dim = job.layout.head_dim, group = job.heads / job.layout.kv_heads;
  if (head_dim % 8 != 0) return scalar::attention_merge(job, plan, row_begin, row_end);
  for (const AttentionMerge& piece : plan.merges) {
    const std::int64_t count = piece.row_end - piece.row_begin;
    for (std::int64_t r = piece.row_begin; r < piece.row_end; ++r) {
      if (r < row_begin || r >= row_end) continue;
      const AttentionRow& row = plan.rows[static_cast<std::size_t>(r)];
      const bool windowed = job.window > 0 && row.position >= job.window;
      const std::int64_t first = windowed ? (row.position - job.window + 1) / kSegmentTokens : 0;
      for (std::int64_t g = 0; g < group; ++g) {
        const auto partial = [&](std::int64_t s) {
          return job.partials + (piece.partial + (s * count + r - piece.row_begin) * group + g) * (2 + head_dim);
        };
        float* all = partial(first);  // overwritten: every partial is read once
        for (std::int64_t s = first + 1; s <= row.position / kSegmentTokens; ++s) {
          const float* p = partial(s);
          merge(all[0], all[1], all + 2, p[0], p[1], p + 2, head_dim);
        }
        write_out(all + 2, all[1], head_dim,
                  job.out + row.row * job.out_stride + (piece.kv_head * group + g) * head_dim);
      }
    }
  }
}

}  // namespace octavo::avx2
