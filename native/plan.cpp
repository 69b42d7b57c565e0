#include "plan.h"

#include "ops/attention.h"

namespace octavo {
namespace {

class Checker {
 public:
  Checker(const Plan& plan, std::int64_t layers, std::int64_t kv_heads, std::int64_t head_dim)
      : plan_(plan), layers_(layers), kv_heads_(kv_heads), head_dim_(head_dim) {}

  void operator()(const EmbedOp& op) {
    in_body();
    weight(op.table);
    if (!problem.empty()) return;
    floats(op.dst, op.table->k);
    // Token ids are checked against the width of the logits.
    require(op.table->n >= plan_.buffers[plan_.logits].width, "an embedding with fewer rows than there are token ids");
  }
  void operator()(const NormOp& op) {
    const auto n = static_cast<std::int64_t>(op.weight.size());
    const std::int64_t width = product(n, op.heads > 0 ? op.heads : 1);
    floats(op.src, width);
    if (op.dst >= 0) floats(op.dst, width);
    if (op.qdst >= 0) quantised(op.qdst, width);
    require((op.dst >= 0) != (op.qdst >= 0), "a norm needs one output");
    require(op.heads == 0 || op.qdst < 0, "a per-head norm writes floats");
    require(n > 0, "an empty norm weight");
  }
  void operator()(const QuantizeOp& op) {
    const std::int64_t width = floats(op.src);
    quantised(op.qdst, width);
  }
  void operator()(const LinearOp& op) {
    require(!op.parts.empty(), "a linear without parts");
    for (const LinearPart& part : op.parts) {
      weight(part.weight);
      if (!problem.empty()) return;
      const Weight& w = *part.weight;
      if (is_quantised(w.format)) {
        quantised(op.qsrc, w.k);
      } else {
        floats(op.src, w.k);
      }
      const bool silu = op.epilogue == Epilogue::SiluMul;
      const std::int64_t width = floats(part.dst);
      if (!problem.empty()) return;
      // Threads write some outputs while others still read the input or write the other parts.
      require(part.dst != op.src, "a linear that overwrites its own input");
      for (const LinearPart* other = op.parts.data(); other != &part; ++other)
        require(other->dst != part.dst, "two parts of a linear in one buffer");
      require(silu ? width % 8 == 0 && 2 * width == w.n : width == w.n, "a linear's width differs from its buffer's");
      require(part.bias.empty() || static_cast<std::int64_t>(part.bias.size()) == w.panels() * kPanel,
              "a bias of the wrong size");
      if (op.epilogue == Epilogue::Add) floats(op.residual, w.n);
    }
    require(op.epilogue == Epilogue::Store || op.parts.size() == 1, "an epilogue takes one part");
  }
  void operator()(const RopeOp& op) {
    in_body();
    require(op.table >= 0 && op.table < static_cast<int>(plan_.ropes.size()), "unknown rope");
    if (!problem.empty()) return;
    const RopeFrequencies& rope = plan_.ropes[op.table];
    require(rope.rotary_dim > 0 && rope.rotary_dim <= op.head_dim && rope.rotary_dim % 2 == 0, "a bad rotary size");
    require(static_cast<std::int64_t>(rope.inverse.size()) * 2 == rope.rotary_dim, "a bad number of rope frequencies");
    for (const RopeTarget& target : op.targets) floats(target.buffer, product(target.heads, op.head_dim));
  }
  void operator()(const KVStoreOp& op) {
    in_body();
    floats(op.k, product(kv_heads_, head_dim_));
    floats(op.v, product(kv_heads_, head_dim_));
    require(op.layer >= 0 && op.layer < layers_, "a layer outside the KV memory");
  }
  void operator()(const RopeStoreOp& op) {
    (*this)(op.rope);
    (*this)(op.store);
  }
  void operator()(const AttentionOp& op) {
    in_body();
    require(op.heads > 0 && op.heads % kv_heads_ == 0, "query heads must be a multiple of KV heads");
    floats(op.q, product(op.heads, head_dim_));
    floats(op.dst, product(op.heads, head_dim_));
    require(op.layer >= 0 && op.layer < layers_, "a layer outside the KV memory");
    require(op.window >= 0, "a negative window");
    // One cut of the work into items serves every layer of a step.
    require(attention_ == nullptr || attention_->heads == op.heads, "attention layers of different shapes");
    attention_ = &op;
  }
  void operator()(const AddOp& op) {
    const std::int64_t width = floats(op.dst);
    floats(op.a, width);
    floats(op.b, width);
  }
  void operator()(const SiluMulOp& op) {
    const std::int64_t width = floats(op.dst);
    floats(op.gate, width);
    floats(op.up, width);
  }
  void operator()(const SelectOp& op) {
    in_body();
    const std::int64_t width = floats(op.src);
    require(op.dst != op.src, "a select that overwrites its own input");
    head_ = true;
    floats(op.dst, width);
  }

  std::string problem;

 private:
  void require(bool holds, const char* what) {
    if (!holds && problem.empty()) problem = what;
  }
  // What indexes the rows of the batch cannot stand behind the select.
  void in_body() { require(!head_, "an instruction behind the select that belongs before it"); }
  // a * b as the width of a buffer, or -1 when it can be none.
  static std::int64_t product(std::int64_t a, std::int64_t b) {
    return a > 0 && b > 0 && a <= kMaxWidth / b ? a * b : -1;
  }
  bool known(int buffer) const { return buffer >= 0 && buffer < static_cast<int>(plan_.buffers.size()); }
  void floats(int buffer, std::int64_t width) {
    require(known(buffer) && !plan_.buffers[buffer].quantised && plan_.buffers[buffer].width == width,
            "a float buffer is missing or has another width");
    // Only a chunk of rows is held of them.
    require(head_ || buffer != plan_.logits, "the logits' buffer is used before the select");
  }
  std::int64_t floats(int buffer) {  // of any width, which is returned
    const std::int64_t width = known(buffer) ? plan_.buffers[buffer].width : -1;
    floats(buffer, width);
    return width;
  }
  void quantised(int buffer, std::int64_t width) {
    require(known(buffer) && plan_.buffers[buffer].quantised && plan_.buffers[buffer].width == width,
            "a quantised buffer is missing or has another width");
  }
  void weight(const Weight* w) { require(w != nullptr && w->data != nullptr, "a weight is missing"); }

  const Plan& plan_;
  const AttentionOp* attention_ = nullptr;
  bool head_ = false;  // behind the select
  const std::int64_t layers_, kv_heads_, head_dim_;
};

}  // namespace

std::string Plan::check(std::int64_t layers, std::int64_t kv_heads, std::int64_t head_dim) const {
  for (const BufferSpec& buffer : buffers) {
    if (buffer.width < 1 || buffer.width > kMaxWidth) return "a buffer's width is out of range";
  }
  if (logits < 0 || logits >= static_cast<int>(buffers.size()) || buffers[logits].quantised)
    return "a plan needs logits";
  Checker checker(*this, layers, kv_heads, head_dim);
  int selects = 0;
  for (const Instruction& instruction : instructions) {
    std::visit(checker, instruction);  // by reference: it keeps what it has seen
    selects += std::holds_alternative<SelectOp>(instruction) ? 1 : 0;
    if (!checker.problem.empty()) return checker.problem;
  }
  return selects == 1 ? "" : "a plan needs exactly one select";
}

}  // namespace octavo
