// The border of a step: what passes here cannot make it read or write out of bounds.
#include <algorithm>

#include "executor.h"

namespace octavo {
namespace {

std::string at(const char* what, std::int64_t index) {
  return std::string(what) + " at index " + std::to_string(index);
}

}  // namespace

std::string Executor::check(const BatchView& b) const {
  if (b.rows < 1 || b.rows > options_.max_rows)
    return "a step takes 1 to " + std::to_string(options_.max_rows) + " rows, not " + std::to_string(b.rows);
  if (b.sequences < 1) return "a step needs a sequence";
  for (std::int64_t r = 0; r < b.rows; ++r) {
    if (b.token_ids[r] < 0 || b.token_ids[r] >= vocab()) return at("a token id outside the vocabulary", r);
  }
  if (b.sequence_rows[0] != 0 || b.sequence_rows[b.sequences] != b.rows || b.block_offsets[0] != 0 ||
      b.block_offsets[b.sequences] != b.block_table_size) {
    return "sequence rows or block offsets do not cover the batch";
  }
  for (std::int64_t s = 0; s < b.sequences; ++s) {
    const std::int64_t begin = b.sequence_rows[s], end = b.sequence_rows[s + 1];
    const std::int64_t table = static_cast<std::int64_t>(b.block_offsets[s + 1]) - b.block_offsets[s];
    if (begin < 0 || end <= begin || end > b.rows || table < 0)
      return at("a bad row or block range of the sequence", s);
    // A sequence cannot have more blocks than there are; so positions are bounded, and the rope tables with them.
    const std::int64_t capacity = std::min(table, options_.num_blocks) * kBlockTokens;
    if (b.positions[begin] < 0) return at("a negative position", begin);
    if (b.positions[begin] > capacity - (end - begin)) return at("a block table too short for the sequence", s);
    for (std::int64_t r = begin + 1; r < end; ++r) {
      if (b.positions[r] != b.positions[r - 1] + 1) return at("positions that are not consecutive", r);
    }
  }
  for (std::int64_t i = 0; i < b.block_table_size; ++i) {
    if (b.block_tables[i] < 0 || b.block_tables[i] >= options_.num_blocks)
      return at("an unknown block in a block table", i);
  }
  for (std::int64_t i = 0; i < b.logit_row_count; ++i) {
    if (b.logit_rows[i] < 0 || b.logit_rows[i] >= b.rows || (i > 0 && b.logit_rows[i] <= b.logit_rows[i - 1])) {
      return at("a bad logit row", i);
    }
  }
  for (std::int64_t i = 0; i < b.block_op_count; ++i) {
    const std::int32_t* op = b.block_ops + 3 * i;
    if (op[0] < 0 || op[0] >= options_.num_blocks || op[1] < -1 || op[1] >= options_.num_blocks || op[0] == op[1] ||
        op[2] < 0 || op[2] > kBlockTokens) {
      return at("a bad block operation", i);
    }
  }
  return "";
}

}  // namespace octavo
