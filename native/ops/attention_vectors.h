// How the vector kernels of ops/attention.h walk an item: rows, segments and spans. What they do with the query vectors
// of one span is each kernel file's own, a class `Spans` with
//   kVectors                                     the most query vectors that share one reading of K and V
//   update<T, R>(tile, v, begin, count, last_block, prefetch)
//       brings vectors v .. v + R - 1, which take the same `count` blocks of the span from token `begin` on, up to
//       date; with `prefetch` it calls in what comes next, up to `last_block`
// Compiled once for each instruction set, hence without external names.
#pragma once
#include <cstring>
#include <type_traits>

#include "ops/attention.h"
#include "simd/math_scalar.h"

// Without it GCC 12 keeps accumulator arrays in memory: it splits an array into registers before it unrolls.
#if defined(__clang__)
#define OCTAVO_UNROLL _Pragma("unroll")
#else
#define OCTAVO_UNROLL _Pragma("GCC unroll 16")
#endif

namespace octavo {
namespace {

constexpr std::int64_t kSpanBlocks = kSpanTokens / kBlockTokens;

inline float max_(float a, float b) { return a > b ? a : b; }

template <class T>
inline constexpr bool kScaled = std::is_same_v<T, std::int8_t>;

// One item's KV head and what is known of its query vectors. Vector v is row v / group, head v % group.
template <class T>
struct Tile {
  const AttentionRow* rows;
  const std::int32_t* block_table;  // of the rows at hand
  const std::byte* head;            // this layer's and KV head's K in block 0
  std::int64_t block_bytes, head_dim, row_count, vectors, group;
  std::int64_t window, first;  // the first token that any vector takes
  float soft_cap;
  float* q;  // [head_dim][vectors], scaled
  float* e;  // [vectors][64]: scores, then exponentials of the span, as they weigh the values
  float* m;  // [vectors], and so on: the segment's state
  float* l;
  float* a;  // exp(m - m') of the span
  float* o;  // [vectors][head_dim]

  const T* keys(std::int64_t block) const {
    return reinterpret_cast<const T*>(head + block_table[block] * block_bytes);
  }
  const T* values(std::int64_t block) const { return keys(block) + value_offset(); }
  std::int64_t value_offset() const { return head_dim * kBlockTokens + (kScaled<T> ? kBlockTokens * 4 : 0); }
  const float* scales(const T* data) const { return reinterpret_cast<const float*>(data + head_dim * kBlockTokens); }
  std::int64_t row_position(std::int64_t v) const { return rows[v / group].position; }
  std::int64_t first_token(std::int64_t v) const {
    const std::int64_t p = row_position(v);
    return window > 0 && p >= window ? p - window + 1 : 0;
  }
  // Blocks of the span that starts at `begin` that vector v takes: none when all are masked.
  std::int64_t span_blocks(std::int64_t v, std::int64_t begin) const {
    const std::int64_t p = row_position(v);
    if (begin > p || begin + kSpanTokens <= first_token(v)) return 0;
    const std::int64_t blocks = (p - begin) / kBlockTokens + 1;
    return blocks < kSpanBlocks ? blocks : kSpanBlocks;
  }
};

template <class Spans, class T, int R = Spans::kVectors>
void update_vectors(std::int64_t size, const Tile<T>& tile, std::int64_t v, std::int64_t begin, std::int64_t count,
                    std::int64_t last_block, bool prefetch) {
  if (size == R) {
    Spans::template update<T, R>(tile, v, begin, count, last_block, prefetch);
  } else if constexpr (R > 1) {
    update_vectors<Spans, T, R - 1>(size, tile, v, begin, count, last_block, prefetch);
  }
}

// One span for the vectors [v, v_end), which find it in the same blocks.
template <class Spans, class T>
void update_span(const Tile<T>& tile, std::int64_t v, std::int64_t v_end, std::int64_t begin, std::int64_t last_block) {
  bool first = true;
  while (v < v_end) {
    const std::int64_t count = tile.span_blocks(v, begin);
    std::int64_t end = v + tile.group;  // a run of vectors that take the same blocks
    while (end < v_end && tile.span_blocks(end, begin) == count) end += tile.group;
    if (count == 0) {
      v = end;
      continue;
    }
    while (v < end) {
      const std::int64_t left = end - v, pieces = (left + Spans::kVectors - 1) / Spans::kVectors;
      const std::int64_t size = (left + pieces - 1) / pieces;
      update_vectors<Spans>(size, tile, v, begin, count, last_block, first);
      first = false;
      v += size;
    }
  }
}

// The spans from `begin` on, of one segment, for rows that share what is before `begin`. Rows share each span until
// their block tables part; from there on each part goes on by itself.
template <class Spans, class T>
void update_rows(Tile<T>& tile, std::int64_t row_begin, std::int64_t row_end, std::int64_t begin) {
  const std::int64_t segment_end = (begin / kSegmentTokens + 1) * kSegmentTokens;
  std::int64_t shared = kAllShared, last = tile.rows[row_begin].position;
  for (std::int64_t r = row_begin + 1; r < row_end; ++r) {
    if (tile.rows[r].shared < shared) shared = tile.rows[r].shared;
    if (tile.rows[r].position > last) last = tile.rows[r].position;
  }
  if (last >= segment_end) last = segment_end - 1;
  const AttentionRow& reader = tile.rows[row_end - 1];  // the last of its sequence: its table has all that is read
  tile.block_table = reader.block_table;
  const std::int64_t last_block = (reader.position < last ? reader.position : last) / kBlockTokens;
  for (; begin <= last && begin + kSpanTokens <= shared; begin += kSpanTokens) {
    update_span<Spans>(tile, row_begin * tile.group, row_end * tile.group, begin, last_block);
  }
  if (begin > last) return;
  for (std::int64_t r = row_begin; r < row_end;) {
    const std::int64_t part = r;
    for (++r; r < row_end && tile.rows[r].shared >= begin + kSpanTokens;) ++r;
    update_rows<Spans>(tile, part, r, begin);
  }
}

template <class Spans, class T>
void update_segment(Tile<T>& tile, std::int64_t segment) {
  for (std::int64_t v = 0; v < tile.vectors; ++v) {
    tile.m[v] = -scalar::infinity_();
    tile.l[v] = 0.0f;
  }
  std::memset(tile.o, 0, static_cast<std::size_t>(tile.vectors * tile.head_dim) * sizeof(float));
  std::int64_t begin = tile.first / kSpanTokens * kSpanTokens;
  if (begin < segment * kSegmentTokens) begin = segment * kSegmentTokens;
  if (begin < (segment + 1) * kSegmentTokens) update_rows<Spans>(tile, 0, tile.row_count, begin);
}

// (M, L, O) = (M, L, O) merged with the segment (m, l, o).
inline void merge(float& all_m, float& all_l, float* all_o, float m, float l, const float* o, std::int64_t head_dim) {
  const float top = max_(all_m, m);
  const float a = scalar::exp_(all_m - top), b = scalar::exp_(m - top);
  all_l = scalar::fma_(all_l, a, l * b);
  all_m = top;
  for (std::int64_t d = 0; d < head_dim; ++d) all_o[d] = scalar::fma_(all_o[d], a, o[d] * b);
}

inline void write_out(const float* o, float l, std::int64_t head_dim, float* out) {
  for (std::int64_t d = 0; d < head_dim; ++d) out[d] = o[d] / l;
}

template <class Spans, class T>
void attention_item(const AttentionJob& job, const AttentionItem& item, AttentionScratch& scratch) {
  const std::int64_t head_dim = job.layout.head_dim, group = job.heads / job.layout.kv_heads;
  const std::int64_t vectors = (item.row_end - item.row_begin) * group, padded = (vectors + 15) / 16 * 16;
  float* next = attention_scratch(scratch, attention_scratch_floats(vectors, head_dim));
  const auto take = [&](std::int64_t floats) {
    float* p = next;
    next += padded * floats;
    return p;
  };
  Tile<T> tile;
  tile.rows = job.rows + item.row_begin;
  tile.row_count = item.row_end - item.row_begin;
  tile.head = job.pool + job.layer * job.layout.layer_bytes() + item.kv_head * job.layout.head_bytes();
  tile.block_bytes = job.layout.block_bytes();
  tile.head_dim = head_dim;
  tile.vectors = vectors;
  tile.group = group;
  tile.window = job.window;
  tile.first = tile.first_token(0);
  for (std::int64_t v = group; v < vectors; v += group) {
    if (tile.first_token(v) < tile.first) tile.first = tile.first_token(v);
  }
  tile.soft_cap = job.soft_cap;
  tile.e = take(kSpanTokens);
  tile.q = take(head_dim);
  tile.o = take(head_dim);
  tile.m = take(1);
  tile.l = take(1);
  tile.a = take(1);
  float *all_o = take(head_dim), *all_m = take(1), *all_l = take(1);

  const auto place = [&](float* base, std::int64_t stride, std::int64_t v) {  // vector v's columns of q or out
    return base + tile.rows[v / group].row * stride + (item.kv_head * group + v % group) * head_dim;
  };
  for (std::int64_t v = 0; v < vectors; ++v) {
    const float* q = place(const_cast<float*>(job.q), job.q_stride, v);
    for (std::int64_t d = 0; d < head_dim; ++d) tile.q[d * vectors + v] = q[d] * job.scale;
  }
  if (item.partial >= 0) {
    update_segment<Spans>(tile, item.segment_begin);
    for (std::int64_t v = 0; v < vectors; ++v) {
      float* partial = job.partials + (item.partial + v) * (2 + head_dim);
      partial[0] = tile.m[v];
      partial[1] = tile.l[v];
      std::memcpy(partial + 2, tile.o + v * head_dim, static_cast<std::size_t>(head_dim) * sizeof(float));
    }
    return;
  }
  for (std::int64_t s = tile.first / kSegmentTokens; s < item.segment_end; ++s) {
    update_segment<Spans>(tile, s);
    for (std::int64_t v = 0; v < vectors; ++v) {
      const float* o = tile.o + v * head_dim;
      const std::int64_t own_first = tile.first_token(v) / kSegmentTokens;
      const std::int64_t own_last = tile.row_position(v) / kSegmentTokens;
      if (s == own_last && s == own_first) {
        write_out(o, tile.l[v], head_dim, place(job.out, job.out_stride, v));
      } else if (s == own_first) {
        all_m[v] = tile.m[v];
        all_l[v] = tile.l[v];
        std::memcpy(all_o + v * head_dim, o, static_cast<std::size_t>(head_dim) * sizeof(float));
      } else if (s > own_first && s <= own_last) {
        merge(all_m[v], all_l[v], all_o + v * head_dim, tile.m[v], tile.l[v], o, head_dim);
        if (s == own_last) write_out(all_o + v * head_dim, all_l[v], head_dim, place(job.out, job.out_stride, v));
      }
    }
  }
}

// By the type of the KV memory.
template <class Spans>
void attention_items(const AttentionJob& job, const AttentionItem& item, AttentionScratch& scratch) {
  switch (job.layout.type) {
    case KVType::F16:
      return attention_item<Spans, std::uint16_t>(job, item, scratch);
    case KVType::F32:
      return attention_item<Spans, float>(job, item, scratch);
    case KVType::Int8:
      return attention_item<Spans, std::int8_t>(job, item, scratch);
  }
}

}  // namespace
}  // namespace octavo
