// The cut of a step's attention into items. Nothing here can change a bit of the result.
#include "ops/attention.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <tuple>

namespace octavo {
namespace {

constexpr std::int64_t kTileVectors =
    24;  // query vectors (rows x heads of the group) that share one reading of K and V

// A run of the plan's rows: an item for each KV head, or more when it is cut by segments.
struct Tile {
  std::int64_t row_begin, row_end, segments, cost;
};

std::int64_t table_blocks(const SequenceRows& s) {
  return (s.first_position + s.row_end - s.row_begin - 1) / kBlockTokens + 1;
}

// Blocks at the start of both tables that are the same.
std::int64_t shared_blocks(const SequenceRows& a, const SequenceRows& b) {
  const std::int64_t blocks = std::min(table_blocks(a), table_blocks(b));
  return std::mismatch(a.block_table, a.block_table + blocks, b.block_table).first - a.block_table;
}

// An order of block tables that makes neighbours of those with the longest common prefixes: by the bytes of their ids.
bool before(const SequenceRows& a, const SequenceRows& b) {
  const std::int64_t blocks = std::min(table_blocks(a), table_blocks(b));
  const int order = std::memcmp(a.block_table, b.block_table, static_cast<std::size_t>(blocks) * sizeof(std::int32_t));
  return order != 0 ? order < 0 : table_blocks(a) < table_blocks(b);
}

std::vector<AttentionRow> order_rows(const AttentionJob& job, bool cascade) {
  std::vector<SequenceRows> order(job.sequences, job.sequences + job.sequence_count);
  if (cascade) std::stable_sort(order.begin(), order.end(), before);
  std::vector<AttentionRow> rows;
  for (std::size_t s = 0; s < order.size(); ++s) {
    const SequenceRows& own = order[s];
    std::int64_t shared = cascade && s > 0 ? shared_blocks(order[s - 1], own) * kBlockTokens : 0;
    for (std::int64_t row = own.row_begin; row < own.row_end; ++row, shared = kAllShared) {
      rows.push_back({row, own.first_position + row - own.row_begin, own.block_table, shared});
    }
  }
  return rows;
}

// Cuts the rows into tiles of at most `tile_rows`. A tile reads once what its rows share, so a cut costs a second
// reading of what the rows beside it share: the cuts are those with the least sum, and the fewest of those. Rows that
// share no whole span are always cut apart.
std::vector<Tile> cut_rows(const std::vector<AttentionRow>& rows, std::int64_t tile_rows) {
  const auto count = static_cast<std::int64_t>(rows.size());
  struct Best {
    std::int64_t cost, tiles, begin;  // of the best cut of the first rows; where its last tile begins
    std::int64_t price;               // of a cut behind them
  };
  std::vector<Best> best(rows.size() + 1, Best{0, 0, 0, 0});
  std::int64_t first_position = 0;  // in memory before the step; within a sequence every cut costs the same
  for (std::int64_t end = 1; end <= count; ++end) {
    const AttentionRow& last = rows[static_cast<std::size_t>(end - 1)];
    if (last.shared != kAllShared) first_position = last.position;
    best[static_cast<std::size_t>(end - 1)].price = std::min(last.shared, first_position);
    Best& mine = best[static_cast<std::size_t>(end)];
    mine.cost = kAllShared;
    for (std::int64_t begin = end - 1; begin >= 0 && begin >= end - tile_rows; --begin) {
      const Best& rest = best[static_cast<std::size_t>(begin)];
      const std::int64_t cost = rest.cost + rest.price, tiles = rest.tiles + 1;
      if (std::tie(cost, tiles) < std::tie(mine.cost, mine.tiles)) mine = {cost, tiles, begin, 0};
      if (rows[static_cast<std::size_t>(begin)].shared < kSpanTokens) break;
    }
  }
  std::vector<Tile> tiles;
  for (std::int64_t end = count; end > 0; end = tiles.back().row_begin) {
    Tile tile{best[static_cast<std::size_t>(end)].begin, end, 0, 0};
    for (std::int64_t r = tile.row_begin; r < end; ++r) {
      const std::int64_t position = rows[static_cast<std::size_t>(r)].position;
      tile.segments = std::max(tile.segments, position / kSegmentTokens + 1);
      tile.cost += position + 1;
    }
    tiles.push_back(tile);
  }
  return tiles;
}

}  // namespace

AttentionPlan attention_plan(const AttentionJob& job, int threads, bool cascade) {
  AttentionPlan plan;
  plan.rows = order_rows(job, cascade);
  const std::int64_t kv_heads = job.layout.kv_heads, group = job.heads / kv_heads;
  const std::int64_t wanted = threads > 1 ? 4 * threads : 1;
  std::int64_t tile_rows = std::max<std::int64_t>(kTileVectors / group, 1);
  std::vector<Tile> tiles = cut_rows(plan.rows, tile_rows);
  const auto pieces = [&] {  // the items there would be if every tile were cut by segments
    return std::accumulate(tiles.begin(), tiles.end(), std::int64_t{0},
                           [&](std::int64_t sum, const Tile& t) { return sum + t.segments * kv_heads; });
  };
  while (tile_rows > 1 && pieces() < wanted) {
    tile_rows /= 2;
    tiles = cut_rows(plan.rows, tile_rows);
  }
  std::stable_sort(tiles.begin(), tiles.end(), [](const Tile& a, const Tile& b) { return a.cost > b.cost; });
  std::int64_t total = 0;
  for (const Tile& t : tiles) total += t.cost * kv_heads;

  std::int64_t partials = 0;
  // Cutting the dearest tiles by segment costs a merge, so only those that would keep the other threads waiting.
  std::size_t next = 0;
  for (; next < tiles.size() && tiles[next].cost * wanted > total; ++next) {
    const Tile& t = tiles[next];
    if (t.segments == 1) continue;
    const std::int64_t rows = t.row_end - t.row_begin;
    for (std::int64_t h = 0; h < kv_heads; ++h) {
      plan.merges.push_back({t.row_begin, t.row_end, h, partials});
      for (std::int64_t s = 0; s < t.segments; ++s, partials += rows * group) {
        plan.items.push_back({t.row_begin, t.row_end, h, s, s + 1, partials});
      }
    }
  }
  for (std::size_t i = 0; i < tiles.size(); ++i) {
    const Tile& t = tiles[i];
    if (i < next && t.segments > 1) continue;
    for (std::int64_t h = 0; h < kv_heads; ++h) plan.items.push_back({t.row_begin, t.row_end, h, 0, t.segments, -1});
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
