// A small paged KV memory with sequences in it, and attention over it written a second time from ops/attention.h.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "formats/fp16.h"
#include "simd/kernels.h"
#include "simd/math_scalar.h"
#include "tests/check.h"

namespace octavo::world {

struct Span {
  std::int64_t first, rows;  // positions first .. first + rows - 1 are rows of the batch; those before are in memory
};

struct Shape {
  std::int64_t heads, kv_heads, head_dim;
};

enum class Order { Canonical, LinearSum, OneSegment, NormalisedMerge, LastTokenFirst, ScaledKeys, ScaledSum };

// Every buffer is a heap allocation of its exact size, so that a sanitizer sees one byte too far.
struct World {
  KVLayout layout;
  AttentionJob job;
  std::vector<Span> spans;
  std::vector<std::vector<std::int32_t>> tables;
  std::vector<SequenceRows> sequences;
  std::vector<std::byte> pool;
  std::vector<float> q, out, partials;
  std::vector<std::vector<float>> k, v;  // [sequence][position][kv_head][head_dim], as given to kv_store
  // What a block holds of them once stored: value = element * scale[sequence][position][kv_head]; no scales: 1.
  std::vector<std::vector<float>> k_elements, v_elements, k_scales, v_scales;
  std::vector<std::uint8_t> finite;
  std::int64_t rows = 0;

  World(const Shape& shape, KVType type, std::vector<Span> what, std::byte stale = std::byte{0})
      : spans(std::move(what)) {
    layout = {2, shape.kv_heads, shape.head_dim, type};
    Rng rng{static_cast<std::uint64_t>(shape.heads * 1000 + shape.head_dim)};
    std::int32_t blocks = 0;
    for (const Span& s : spans) {
      const std::int64_t tokens = s.first + s.rows;
      std::vector<std::int32_t> table(static_cast<std::size_t>((tokens + kBlockTokens - 1) / kBlockTokens));
      std::iota(table.begin(), table.end(), blocks);
      blocks += static_cast<std::int32_t>(table.size());
      std::reverse(table.begin(), table.end());  // so that neighbours in the sequence are not neighbours in memory
      tables.push_back(table);
      sequences.push_back({rows, rows + s.rows, s.first, nullptr});
      rows += s.rows;
      Rng tokens_rng{static_cast<std::uint64_t>(shape.head_dim) + 5};  // the same tokens in every sequence
      std::vector<float> keys(static_cast<std::size_t>(tokens * width())), values(keys.size());
      for (float& x : keys) x = tokens_rng.uniform(-1.5f, 1.5f);
      tokens_rng.state = 99;
      for (float& x : values) x = tokens_rng.uniform(-1.0f, 1.0f);
      k.push_back(keys);
      v.push_back(values);
    }
    pool.assign(static_cast<std::size_t>(blocks * layout.block_bytes()), stale);
    finite.assign(static_cast<std::size_t>(rows), 1);
    q.resize(static_cast<std::size_t>(rows * shape.heads * shape.head_dim));
    for (std::size_t s = 0; s < spans.size(); ++s) {  // q depends on the position only, like k and v
      for (std::int64_t r = 0; r < spans[s].rows; ++r) {
        rng.state = static_cast<std::uint64_t>(spans[s].first + r + 77);
        float* row = q.data() + (sequences[s].row_begin + r) * shape.heads * shape.head_dim;
        for (std::int64_t i = 0; i < shape.heads * shape.head_dim; ++i) row[i] = rng.uniform(-2.0f, 2.0f);
      }
      sequences[s].block_table = tables[s].data();
    }
    out.resize(q.size());
    job.q = q.data();
    job.q_stride = job.out_stride = shape.heads * shape.head_dim;
    job.out = out.data();
    job.pool = pool.data();
    job.layout = layout;
    job.layer = 1;
    job.heads = shape.heads;
    job.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
    job.sequences = sequences.data();
    job.sequence_count = static_cast<std::int64_t>(sequences.size());
  }
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  std::int64_t width() const { return layout.kv_heads * layout.head_dim; }

  void store(const Kernels& kernels) {
    k_elements = k;
    v_elements = v;
    k_scales.assign(k.size(), {});
    v_scales.assign(v.size(), {});
    for (std::size_t s = 0; s < spans.size(); ++s) {
      const std::int64_t tokens = spans[s].first + spans[s].rows;
      round(k_elements[s], k_scales[s]);
      round(v_elements[s], v_scales[s]);
      std::vector<std::uint8_t> flags(static_cast<std::size_t>(tokens), 1);
      const SequenceRows all{0, tokens, 0, tables[s].data()};
      KVStoreJob write;
      write.k = k[s].data();
      write.v = v[s].data();
      write.stride = width();
      write.pool = pool.data();
      write.layout = layout;
      write.layer = job.layer;
      write.sequences = &all;
      write.sequence_count = 1;
      write.finite = flags.data();
      kernels.kv_store(write, 0, 0, tokens / 2);
      kernels.kv_store(write, 0, tokens / 2, tokens);
      for (std::int64_t r = 0; r < spans[s].rows; ++r) {
        finite[static_cast<std::size_t>(sequences[s].row_begin + r)] =
            flags[static_cast<std::size_t>(spans[s].first + r)];
      }
    }
  }

  const std::vector<float>& run(const Kernels& kernels, const AttentionPlan& plan) {
    std::fill(out.begin(), out.end(), -77.0f);
    partials.assign(plan.partial_floats, std::numeric_limits<float>::quiet_NaN());
    partials.shrink_to_fit();
    job.partials = partials.data();
    job.rows = plan.rows.data();
    for (auto item = plan.items.rbegin(); item != plan.items.rend(); ++item) {
      AttentionScratch scratch;
      kernels.attention(job, *item, scratch);
    }
    kernels.attention_merge(job, plan, 0, rows / 2);
    kernels.attention_merge(job, plan, rows / 2, rows);
    return out;
  }

  // A cut by hand: tiles of `tile_rows` rows in the order of the batch, every segment an item of its own.
  AttentionPlan cut(std::int64_t tile_rows, bool split_segments) const {
    AttentionPlan plan;
    std::int64_t partials_used = 0;
    for (const SequenceRows& seq : sequences) {
      for (std::int64_t row = seq.row_begin; row < seq.row_end; ++row) {
        plan.rows.push_back(
            {row, seq.first_position + row - seq.row_begin, seq.block_table, row > seq.row_begin ? kAllShared : 0});
      }
      for (std::int64_t row = seq.row_begin; row < seq.row_end;) {
        const std::int64_t p = plan.rows[static_cast<std::size_t>(row)].position, segments = p / kSegmentTokens + 1;
        const std::int64_t end = std::min({row + tile_rows, seq.row_end, row + segments * kSegmentTokens - p});
        for (std::int64_t h = 0; h < layout.kv_heads; ++h) {
          if (!split_segments) {
            plan.items.push_back({row, end, h, 0, segments, -1});
            continue;
          }
          plan.merges.push_back({row, end, h, partials_used});
          for (std::int64_t g = 0; g < segments; ++g) {
            plan.items.push_back({row, end, h, g, g + 1, partials_used});
            partials_used += (end - row) * (job.heads / layout.kv_heads);
          }
        }
        row = end;
      }
    }
    plan.partial_floats = static_cast<std::size_t>(partials_used * (2 + layout.head_dim));
    return plan;
  }

  // Values to elements and scales, for values that are finite and not tiny.
  void round(std::vector<float>& values, std::vector<float>& scales) const {
    const auto n = static_cast<std::size_t>(layout.head_dim);
    scales.assign(values.size() / n, 1.0f);
    for (std::size_t i = 0; i < scales.size(); ++i) {
      float* const x = values.data() + i * n;
      float largest = 0.0f;
      for (std::size_t d = 0; d < n; ++d) largest = std::max(largest, std::fabs(x[d]));
      if (layout.type == KVType::Int8) scales[i] = largest / 127.0f;
      for (std::size_t d = 0; d < n; ++d) {
        if (layout.type == KVType::F16) x[d] = half_to_float(float_to_half(x[d]));
        if (layout.type == KVType::Int8) x[d] = std::nearbyint(x[d] * (127.0f / largest));
      }
    }
  }
  std::size_t vector_of(std::int64_t t, std::int64_t kv_head) const {
    return static_cast<std::size_t>(t * layout.kv_heads + kv_head);
  }
  float key(std::size_t s, std::int64_t t, std::int64_t kv_head, std::int64_t d) const {
    return k_elements[s]
                     [vector_of(t, kv_head) * static_cast<std::size_t>(layout.head_dim) + static_cast<std::size_t>(d)];
  }
  float value(std::size_t s, std::int64_t t, std::int64_t kv_head, std::int64_t d) const {
    return v_elements[s]
                     [vector_of(t, kv_head) * static_cast<std::size_t>(layout.head_dim) + static_cast<std::size_t>(d)];
  }
  float key_scale(std::size_t s, std::int64_t t, std::int64_t kv_head) const {
    return k_scales[s][vector_of(t, kv_head)];
  }
  float value_scale(std::size_t s, std::int64_t t, std::int64_t kv_head) const {
    return v_scales[s][vector_of(t, kv_head)];
  }

  // One row and head by the words of ops/attention.h, or in an order that is not ours.
  std::vector<float> reference(std::size_t s, std::int64_t position, std::int64_t row, std::int64_t head,
                               Order order) const {
    using namespace scalar;
    const std::int64_t hd = layout.head_dim, kv_head = head / (job.heads / layout.kv_heads);
    const std::int64_t segment_tokens = order == Order::OneSegment ? 1 << 20 : kSegmentTokens;
    const std::int64_t low = job.window > 0 ? std::max<std::int64_t>(position - job.window + 1, 0) : 0;
    const std::int64_t known = spans[s].first + spans[s].rows;
    std::vector<float> O, o;
    float M = 0, L = 0, m = 0, l = 0;
    for (std::int64_t segment = low / segment_tokens; segment <= position / segment_tokens; ++segment) {
      o.assign(static_cast<std::size_t>(hd), 0.0f);
      m = -infinity_();
      l = 0.0f;
      const std::int64_t end = std::min((segment + 1) * segment_tokens, position + 1);
      for (std::int64_t span = std::max(segment * segment_tokens, low / kSpanTokens * kSpanTokens); span < end;
           span += kSpanTokens) {
        std::vector<float> e;
        for (std::int64_t t = span; t < span + kSpanTokens && t / kBlockTokens <= position / kBlockTokens; ++t) {
          float x = 0.0f;
          const float scale = t < known ? key_scale(s, t, kv_head) : 0.0f;
          for (std::int64_t d = 0; d < hd; ++d) {
            const float qd = q[static_cast<std::size_t>((row * job.heads + head) * hd + d)] * job.scale;
            const float element = t < known ? key(s, t, kv_head, d) : 0.0f;
            x = fma_(qd, order == Order::ScaledKeys ? element * scale : element, x);
          }
          if (order != Order::ScaledKeys) x *= scale;
          if (job.soft_cap > 0) x = job.soft_cap * tanh_(x / job.soft_cap);
          e.push_back(t < low || t > position ? -infinity_() : x);
        }
        const float top = std::max(m, *std::max_element(e.begin(), e.end()));
        std::vector<float> weights;
        float sums[16] = {}, linear = 0.0f;
        for (std::size_t i = 0; i < e.size(); ++i) {
          e[i] = exp_(e[i] - top);
          const std::int64_t t = span + static_cast<std::int64_t>(i);
          weights.push_back(t < known ? e[i] * value_scale(s, t, kv_head) : 0.0f);
          if (order == Order::ScaledSum) e[i] = weights[i];
          sums[i % 16] += e[i];
          linear += e[i];
        }
        float eight[8], four[4];
        for (int i = 0; i < 8; ++i) eight[i] = sums[i] + sums[i + 8];
        for (int i = 0; i < 4; ++i) four[i] = eight[i] + eight[i + 4];
        const float sum = order == Order::LinearSum ? linear : (four[0] + four[2]) + (four[1] + four[3]);
        const float a = exp_(m - top);
        l = fma_(l, a, sum);
        m = top;
        for (std::int64_t d = 0; d < hd; ++d) {
          float x = o[static_cast<std::size_t>(d)] * a;
          for (std::size_t i = 0; i < e.size(); ++i) {
            const std::size_t j = order == Order::LastTokenFirst ? e.size() - 1 - i : i;
            const std::int64_t t = span + static_cast<std::int64_t>(j);
            x = fma_(weights[j], t < known ? value(s, t, kv_head, d) : 0.0f, x);
          }
          o[static_cast<std::size_t>(d)] = x;
        }
      }
      if (O.empty()) {
        O = o;
        M = m;
        L = l;
        continue;
      }
      const float top = std::max(M, m), A = exp_(M - top), B = exp_(m - top), before = L;
      L = fma_(L, A, l * B);
      for (std::size_t d = 0; d < O.size(); ++d) {
        O[d] = order == Order::NormalisedMerge ? (O[d] / before * (before * A) + o[d] / l * (l * B))
                                               : fma_(O[d], A, o[d] * B);
      }
      M = top;
    }
    for (float& x : O) x /= L;
    return O;
  }

  // Softmax attention in double, over what is stored.
  std::vector<double> exact(std::size_t s, std::int64_t position, std::int64_t row, std::int64_t head) const {
    const std::int64_t hd = layout.head_dim, kv_head = head / (job.heads / layout.kv_heads);
    const std::int64_t low = job.window > 0 ? std::max<std::int64_t>(position - job.window + 1, 0) : 0;
    std::vector<double> o(static_cast<std::size_t>(hd), 0.0);
    double sum = 0.0;
    for (std::int64_t t = low; t <= position; ++t) {
      double x = 0.0;
      for (std::int64_t d = 0; d < hd; ++d) {
        x +=
            static_cast<double>(q[static_cast<std::size_t>((row * job.heads + head) * hd + d)]) * key(s, t, kv_head, d);
      }
      x *= static_cast<double>(job.scale) * static_cast<double>(key_scale(s, t, kv_head));
      if (job.soft_cap > 0) x = job.soft_cap * std::tanh(x / job.soft_cap);
      const double e = std::exp(x);
      sum += e;
      for (std::int64_t d = 0; d < hd; ++d) {
        o[static_cast<std::size_t>(d)] += e * value_scale(s, t, kv_head) * static_cast<double>(value(s, t, kv_head, d));
      }
    }
    for (double& x : o) x /= sum;
    return o;
  }
};

}  // namespace octavo::world
