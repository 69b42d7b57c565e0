// The specification of ops/attention.h: one query row and one query head at a time, in the order written there.
#include "formats/fp16.h"
#include "simd/declarations.h"
#include "simd/math_scalar.h"

namespace octavo::scalar {
namespace {

float load(const std::byte* base, std::int64_t index, KVType type) {
  if (type == KVType::Int8) return static_cast<float>(static_cast<std::int8_t>(base[index]));
  if (type == KVType::F32) {
    float x;
    std::memcpy(&x, base + index * 4, sizeof x);
    return x;
  }
  std::uint16_t h;
  std::memcpy(&h, base + index * 2, sizeof h);
  return half_to_float(h);
}

// The scale of one token of K or V at `base`, or 1 when the type has none: a product with 1 is exact.
float scale_of(const std::byte* base, std::int64_t token, const KVLayout& layout) {
  if (layout.scale_bytes() == 0) return 1.0f;
  float x;
  std::memcpy(&x, base + layout.data_bytes() + token * 4, sizeof x);
  return x;
}

float max_(float a, float b) {
  return a > b ? a : b;
}  // may drop a NaN; its exponential, and so l, is NaN all the same

// A query's state over the tokens seen: running maximum, sum of exponentials, weighted sum of values.
struct State {
  float m, l;
  float* o;  // [head_dim]
  void clear(std::int64_t head_dim) {
    m = -infinity_();
    l = 0.0f;
    for (std::int64_t d = 0; d < head_dim; ++d) o[d] = 0.0f;
  }
};

void merge(State& all, const State& segment, std::int64_t head_dim) {
  const float m = max_(all.m, segment.m);
  const float a = exp_(all.m - m), b = exp_(segment.m - m);
  all.l = fma_(all.l, a, segment.l * b);
  for (std::int64_t d = 0; d < head_dim; ++d) all.o[d] = fma_(all.o[d], a, segment.o[d] * b);
  all.m = m;
}

void write_out(const State& all, std::int64_t head_dim, float* out) {
  for (std::int64_t d = 0; d < head_dim; ++d) out[d] = all.o[d] / all.l;
}

struct Query {
  const AttentionJob& job;
  const std::int32_t* block_table;
  std::int64_t kv_head, position, first_token;  // tokens first_token .. position are unmasked
  const float* q;                               // [head_dim], scaled

  const std::byte* keys(std::int64_t block) const {
    return job.pool + block_table[block] * job.layout.block_bytes() + job.layer * job.layout.layer_bytes() +
           kv_head * job.layout.head_bytes();
  }
  const std::byte* values(std::int64_t block) const { return keys(block) + job.layout.head_bytes() / 2; }
};

float score(const Query& query, std::int64_t token) {
  const AttentionJob& job = query.job;
  const std::byte* k = query.keys(token / kBlockTokens);
  float s = 0.0f;
  for (std::int64_t d = 0; d < job.layout.head_dim; ++d) {
    s = fma_(query.q[d], load(k, d * kBlockTokens + token % kBlockTokens, job.layout.type), s);
  }
  s *= scale_of(k, token % kBlockTokens, job.layout);
  return job.soft_cap > 0.0f ? job.soft_cap * tanh_(s / job.soft_cap) : s;
}

// Tokens [begin, end) of one span, whole blocks, at least one of them unmasked.
void update_span(const Query& query, std::int64_t begin, std::int64_t end, State& state) {
  const std::int64_t head_dim = query.job.layout.head_dim;
  float e[kSpanTokens];
  float m = state.m;
  for (std::int64_t t = begin; t < end; ++t) {
    e[t - begin] = score(query, t);
    if (t >= query.first_token && t <= query.position) m = max_(m, e[t - begin]);
  }
  float sum[16] = {};
  for (std::int64_t t = begin; t < end; ++t) {
    const bool masked = t < query.first_token || t > query.position;
    e[t - begin] = masked ? 0.0f : exp_(e[t - begin] - m);
    sum[t % 16] += e[t - begin];
    e[t - begin] *= scale_of(query.values(t / kBlockTokens), t % kBlockTokens, query.job.layout);
  }
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) sum[i] += sum[i + width];
  }
  const float a = exp_(state.m - m);
  state.m = m;
  state.l = fma_(state.l, a, sum[0]);
  for (std::int64_t d = 0; d < head_dim; ++d) {
    float o = state.o[d] * a;
    for (std::int64_t t = begin; t < end; ++t) {
      const std::byte* v = query.values(t / kBlockTokens);
      o = fma_(e[t - begin], load(v, t % kBlockTokens * head_dim + d, query.job.layout.type), o);
    }
    state.o[d] = o;
  }
}

void update_segment(const Query& query, std::int64_t segment, State& state) {
  const std::int64_t block_end = (query.position / kBlockTokens + 1) * kBlockTokens;
  for (std::int64_t begin = segment * kSegmentTokens; begin < (segment + 1) * kSegmentTokens; begin += kSpanTokens) {
    const std::int64_t end = begin + kSpanTokens < block_end ? begin + kSpanTokens : block_end;
    if (begin <= query.position && end > query.first_token) update_span(query, begin, end, state);
  }
}

std::int64_t first_token(const AttentionJob& job, std::int64_t position) {
  return job.window > 0 && position >= job.window ? position - job.window + 1 : 0;
}

}  // namespace

void attention(const AttentionJob& job, const AttentionItem& item, AttentionScratch& scratch) {
  const std::int64_t head_dim = job.layout.head_dim, group = job.heads / job.layout.kv_heads;
  float* q = attention_scratch(scratch, static_cast<std::size_t>(3 * head_dim));
  State all{0.0f, 0.0f, q + head_dim}, segment{0.0f, 0.0f, q + 2 * head_dim};
  for (std::int64_t r = item.row_begin; r < item.row_end; ++r) {
    const AttentionRow& row = job.rows[r];
    for (std::int64_t g = 0; g < group; ++g) {
      const std::int64_t head = item.kv_head * group + g;
      const float* source = job.q + row.row * job.q_stride + head * head_dim;
      for (std::int64_t d = 0; d < head_dim; ++d) q[d] = source[d] * job.scale;
      const Query query{job, row.block_table, item.kv_head, row.position, first_token(job, row.position), q};
      const std::int64_t first_segment = query.first_token / kSegmentTokens;
      const std::int64_t own_end = row.position / kSegmentTokens + 1;
      all.clear(head_dim);
      for (std::int64_t s = item.segment_begin > first_segment ? item.segment_begin : first_segment;
           s < item.segment_end && s < own_end; ++s) {
        State& state = s == first_segment || item.partial >= 0 ? all : segment;
        state.clear(head_dim);
        update_segment(query, s, state);
        if (&state == &segment) merge(all, segment, head_dim);
      }
      if (item.partial < 0) {
        write_out(all, head_dim, job.out + row.row * job.out_stride + head * head_dim);
      } else {
        float* partial = job.partials + (item.partial + (r - item.row_begin) * group + g) * (2 + head_dim);
        partial[0] = all.m;
        partial[1] = all.l;
        for (std::int64_t d = 0; d < head_dim; ++d) partial[2 + d] = all.o[d];
      }
    }
  }
}

void attention_merge(const AttentionJob& job, const AttentionPlan& plan, std::int64_t row_begin, std::int64_t row_end) {
  const std::int64_t head_dim = job.layout.head_dim, group = job.heads / job.layout.kv_heads;
  for (const AttentionMerge& piece : plan.merges) {
    const std::int64_t count = piece.row_end - piece.row_begin;
    for (std::int64_t r = piece.row_begin; r < piece.row_end; ++r) {
      if (r < row_begin || r >= row_end) continue;
      const AttentionRow& row = plan.rows[static_cast<std::size_t>(r)];
      const std::int64_t first_segment = first_token(job, row.position) / kSegmentTokens;
      for (std::int64_t g = 0; g < group; ++g) {
        const auto partial = [&](std::int64_t s) {
          const std::int64_t index = piece.partial + (s * count + r - piece.row_begin) * group + g;
          float* p = job.partials + index * (2 + head_dim);
          return State{p[0], p[1], p + 2};
        };
        State all = partial(first_segment);  // its o is overwritten: every partial is read once
        for (std::int64_t s = first_segment + 1; s <= row.position / kSegmentTokens; ++s)
          merge(all, partial(s), head_dim);
        write_out(all, head_dim, job.out + row.row * job.out_stride + (piece.kv_head * group + g) * head_dim);
      }
    }
  }
}

}  // namespace octavo::scalar
