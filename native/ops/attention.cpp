// The cut of a step's attention into items. Nothing here can change a bit of the result.
#include "ops/attention.h"

#include <algorithm>

namespace octavo {
namespace {

constexpr std::int64_t kTileVectors =
    24;  // query vectors (rows x heads of the group) that share one reading of K and V

struct Tile {
  std::int64_t sequence, row_begin, row_end, segments, cost;
};

// Tiles never straddle a segment's end, so all rows of a tile have the same number of segments.
std::vector<Tile> cut_rows(const AttentionJob& job, std::int64_t tile_rows) {
  std::vector<Tile> tiles;
  for (std::int64_t s = 0; s < job.sequence_count; ++s) {
    const SequenceRows& rows = job.sequences[s];
    for (std::int64_t row = rows.row_begin; row < rows.row_end;) {
      const std::int64_t position = rows.first_position + row - rows.row_begin;
      const std::int64_t to_boundary = kSegmentTokens - position % kSegmentTokens;
      const std::int64_t count = std::min({tile_rows, rows.row_end - row, to_boundary});
      tiles.push_back({s, row, row + count, position / kSegmentTokens + 1, (position + count) * count});
      row += count;
    }
  }
  return tiles;
}

}  // namespace

AttentionPlan attention_plan(const AttentionJob& job, int threads) {
  const std::int64_t kv_heads = job.layout.kv_heads, group = job.heads / kv_heads;
  const std::int64_t wanted = threads > 1 ? 4 * threads : 1;
  std::int64_t tile_rows = std::max<std::int64_t>(kTileVectors / group, 1);
  std::vector<Tile> tiles = cut_rows(job, tile_rows);
  while (tile_rows > 1 && static_cast<std::int64_t>(tiles.size()) * kv_heads < wanted) {
    tile_rows /= 2;
    tiles = cut_rows(job, tile_rows);
  }
  std::stable_sort(tiles.begin(), tiles.end(), [](const Tile& a, const Tile& b) { return a.cost > b.cost; });
  std::int64_t total = 0;
  for (const Tile& t : tiles) total += t.cost * kv_heads;

  AttentionPlan plan;
  std::int64_t partials = 0;
  // Cutting the dearest tiles by segment costs a merge, so only those that would keep the other threads waiting.
  std::size_t next = 0;
  for (; next < tiles.size() && tiles[next].cost * wanted > total; ++next) {
    const Tile& t = tiles[next];
    if (t.segments == 1) continue;
    const std::int64_t rows = t.row_end - t.row_begin;
    for (std::int64_t h = 0; h < kv_heads; ++h) {
      plan.merges.push_back({t.sequence, t.row_begin, t.row_end, h, t.segments, partials});
      for (std::int64_t s = 0; s < t.segments; ++s, partials += rows * group) {
        plan.items.push_back({t.sequence, t.row_begin, t.row_end, h, s, s + 1, partials});
      }
    }
  }
  for (std::size_t i = 0; i < tiles.size(); ++i) {
    const Tile& t = tiles[i];
    if (i < next && t.segments > 1) continue;
    for (std::int64_t h = 0; h < kv_heads; ++h)
      plan.items.push_back({t.sequence, t.row_begin, t.row_end, h, 0, t.segments, -1});
  }
  plan.partial_floats = static_cast<std::size_t>(partials * (2 + job.layout.head_dim));
  return plan;
}

std::size_t attention_scratch_floats(std::int64_t vectors, std::int64_t head_dim) {
  return static_cast<std::size_t>((vectors + 15) / 16 * 16 * (3 * head_dim + kSpanTokens + 5));
}

void reserve_attention_scratch(AttentionScratch& scratch, const KVLayout& layout, std::int64_t heads) {
  const std::int64_t vectors = std::max(heads / layout.kv_heads, kTileVectors);
  attention_scratch(scratch, attention_scratch_floats(vectors, layout.head_dim));
}

float* attention_scratch(AttentionScratch& scratch, std::size_t floats) {
  if (scratch.buffer.size() < floats + 16) scratch.buffer.resize(floats + 16);
  const auto address = reinterpret_cast<std::uintptr_t>(scratch.buffer.data());
  return scratch.buffer.data() + (64 - address % 64) % 64 / sizeof(float);
}

}  // namespace octavo
