// What an executor runs: instructions over numbered buffers, made once from a Program
// (src/octavo/executor/lowering.py).
//
// Float buffers are [rows][width] f32; quantised ones are [rows] QRow. Instructions up to the one Select run
// over the rows of the batch; those after it over the rows whose logits are wanted, a chunk at a time.
#pragma once
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "ops/linear.h"

namespace octavo {

struct EmbedOp {
  const Weight* table;
  int dst;
};

struct NormOp {  // dst or qdst is -1; heads 0: over the whole width, else over each of `heads` heads
  int src, dst, qdst;
  std::vector<float> weight;
  std::int64_t heads;
  float eps;
};

struct QuantizeOp {
  int src, qdst;
};

struct LinearPart {
  const Weight* weight;
  std::vector<float> bias;  // empty, or padded to whole panels
  int dst;
};

struct LinearOp {  // src for float weights, qsrc for quantised ones; the parts share their input
  int src, qsrc;
  std::vector<LinearPart> parts;
  Epilogue epilogue;
  int residual;
};

struct RopeTarget {
  int buffer;
  std::int64_t heads;
};

struct RopeOp {  // in place
  std::vector<RopeTarget> targets;
  std::int64_t head_dim;
  int table;
};

struct KVStoreOp {
  int k, v;
  std::int64_t layer;
};

struct RopeStoreOp {  // both of the above in one pass over the rows
  RopeOp rope;
  KVStoreOp store;
};

struct AttentionOp {
  int q, dst;
  std::int64_t layer, heads, window;
  float scale, soft_cap;
};

struct AddOp {
  int a, b, dst;
};

struct SiluMulOp {
  int gate, up, dst;
};

struct SelectOp {
  int src, dst;
};

using Instruction = std::variant<EmbedOp, NormOp, QuantizeOp, LinearOp, RopeOp, KVStoreOp, RopeStoreOp, AttentionOp,
                                 AddOp, SiluMulOp, SelectOp>;

inline constexpr std::int64_t kMaxWidth = std::int64_t{1} << 31;  // of a buffer

struct BufferSpec {
  std::int64_t width;  // floats, or inputs to be quantised
  bool quantised;
};

struct RopeFrequencies {
  std::int64_t rotary_dim;
  std::vector<double> inverse;  // [rotary_dim / 2], radians a position
};

struct Plan {
  std::vector<BufferSpec> buffers;
  std::vector<RopeFrequencies> ropes;
  std::vector<Instruction> instructions;
  int logits = -1;  // the buffer that holds them at the end

  // Empty when every index, width and weight fits together; else what does not. `head_dim`, `kv_heads`, `layers` are
  // those of the KV memory.
  std::string check(std::int64_t layers, std::int64_t kv_heads, std::int64_t head_dim) const;
};

}  // namespace octavo
