#include "executor.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <limits>

namespace octavo {
namespace {

constexpr std::int64_t kHeadRows = 64;  // rows of logits held at once
constexpr std::int64_t kMaxRows = std::int64_t{1} << 20;
constexpr int kMaxThreads = 1024;

// Chunks small enough to balance the threads, large enough to be worth asking for.
std::int64_t chunk_of(std::int64_t count, int threads, std::int64_t multiple) {
  const std::int64_t chunk = count / (threads * 6) / multiple * multiple;
  return std::max(chunk, multiple);
}

// Every size derived from these fits 64 bits (those of the plan's buffers do: kMaxRows * kMaxWidth floats).
bool plausible(const ExecutorOptions& options) {
  const KVLayout& kv = options.kv;
  if (kv.layers < 1 || kv.kv_heads < 1 || kv.head_dim < 2 || options.num_blocks < 1 || options.max_rows < 1)
    return false;
  if (options.num_blocks > std::numeric_limits<std::int32_t>::max() || options.max_rows > kMaxRows) return false;
  if (options.threads < 1 || options.threads > kMaxThreads || options.kernels == nullptr) return false;
  std::int64_t bytes = 2 * kBlockTokens * 4;  // an element and its scale take at most four bytes: head_dim > 1
  for (std::int64_t factor : {kv.head_dim, kv.kv_heads, kv.layers, options.num_blocks}) {
    if (__builtin_mul_overflow(bytes, factor, &bytes)) return false;
  }
  return true;
}

}  // namespace

struct Executor::Step {
  const BatchView& batch;
  const SamplingView& sampling;
  const StepOutput& output;
  std::vector<SequenceRows> sequences;
  std::vector<std::int32_t> sequence_of_row;
  AttentionPlan attention;
};

// Floats from one row of a buffer to the next: an odd number of cache lines, for rows that lie a power of two apart
// would share a few sets of the cache.
static std::int64_t stride_of(const BufferSpec& spec) { return ((spec.width + 15) / 16 | 1) * 16; }
static std::int64_t blocks_of(const BufferSpec& spec) { return (spec.width + kBlock - 1) / kBlock; }

std::unique_ptr<Executor> Executor::make(Plan plan, const ExecutorOptions& options, std::string& error) {
  const KVLayout& kv = options.kv;
  if (!plausible(options)) {
    error = "bad executor options";
    return nullptr;
  }
  error = plan.check(kv.layers, kv.kv_heads, kv.head_dim);
  if (!error.empty()) return nullptr;
  try {
    std::unique_ptr<Executor> executor(new Executor(std::move(plan), options));
    if (executor->allocate()) return executor;
    error = "the system refused the memory for " + std::to_string(options.num_blocks) + " KV blocks of " +
            std::to_string(kv.block_bytes()) + " bytes";
  } catch (const std::exception& refused) {
    error = "the system refused memory or " + std::to_string(options.threads) + " threads: " + refused.what();
  }
  return nullptr;
}

bool Executor::allocate() {
  while (!std::holds_alternative<SelectOp>(plan_.instructions[head_begin_])) ++head_begin_;
  const std::int64_t body_rows = std::max(options_.max_rows, kHeadRows);
  for (std::size_t i = 0; i < plan_.buffers.size(); ++i) {
    const BufferSpec& spec = plan_.buffers[i];
    const std::int64_t rows = static_cast<int>(i) == plan_.logits ? kHeadRows : body_rows;
    const std::int64_t row_bytes =
        spec.quantised ? q_row_bytes(blocks_of(spec)) : stride_of(spec) * static_cast<std::int64_t>(sizeof(float));
    buffers_.push_back(allocate_aligned(static_cast<std::size_t>(rows * row_bytes)));
    if (buffers_.back() == nullptr) return false;
  }
  for (const RopeFrequencies& rope : plan_.ropes) ropes_.emplace_back(rope.inverse);
  scratch_.resize(static_cast<std::size_t>(options_.threads));
  for (ThreadScratch& scratch : scratch_) {
    if (!reserve(scratch)) return false;
  }
  pool_ = allocate_aligned(static_cast<std::size_t>(options_.num_blocks * options_.kv.block_bytes()));
  return pool_ != nullptr;
}

// All that a thread may need in any step: in a step it must not allocate, for there nobody could catch the refusal.
bool Executor::reserve(ThreadScratch& scratch) const {
  std::int64_t panel = 0;
  scratch.sample.reserve(vocab());
  for (const Instruction& instruction : plan_.instructions) {
    if (const auto* norm = std::get_if<NormOp>(&instruction)) {
      scratch.row.resize(std::max(scratch.row.size(), norm->weight.size()));
    } else if (const auto* attention = std::get_if<AttentionOp>(&instruction)) {
      reserve_attention_scratch(scratch.attention, options_.kv, attention->heads);
    } else if (const auto* linear = std::get_if<LinearOp>(&instruction)) {
      for (const LinearPart& part : linear->parts) panel = std::max(panel, linear_scratch_bytes(*part.weight));
    }
  }
  scratch.panel = allocate_aligned(static_cast<std::size_t>(panel));
  return scratch.panel != nullptr;
}

// One layer of one block operation: zero the destination, then copy the first tokens of the source.
void Executor::zero_and_copy(const std::int32_t* op, std::int64_t layer) {
  const KVLayout& kv = options_.kv;
  std::byte* dst = block(op[0]) + layer * kv.layer_bytes();
  std::memset(dst, 0, static_cast<std::size_t>(kv.layer_bytes()));
  if (op[1] < 0) return;
  const std::byte* src = block(op[1]) + layer * kv.layer_bytes();
  const std::size_t element = static_cast<std::size_t>(kv.element_bytes()), tokens = static_cast<std::size_t>(op[2]);
  const std::size_t scales = kv.scale_bytes() > 0 ? tokens * sizeof(float) : 0;
  for (std::int64_t head = 0; head < kv.kv_heads; ++head, dst += kv.head_bytes(), src += kv.head_bytes()) {
    const std::size_t row = kBlockTokens * element;
    for (std::int64_t d = 0; d < kv.head_dim; ++d) std::memcpy(dst + d * row, src + d * row, tokens * element);  // K
    const std::int64_t v = kv.head_bytes() / 2, scale = kv.data_bytes();
    std::memcpy(dst + v, src + v, tokens * static_cast<std::size_t>(kv.head_dim) * element);
    std::memcpy(dst + scale, src + scale, scales);
    std::memcpy(dst + v + scale, src + v + scale, scales);
  }
}

namespace {

// One thread's share of each instruction, for the rows at hand.
struct Runner {
  const Kernels& kernels;
  Team& team;
  const std::vector<RopeTable>& ropes;
  const KVLayout& kv;
  std::byte* pool;
  const BatchView& batch;
  const std::vector<SequenceRows>& sequences;
  const std::vector<std::int32_t>& sequence_of_row;
  const AttentionPlan& attention;
  std::uint8_t* finite;
  const std::vector<AlignedBytes>& buffers;
  const std::vector<BufferSpec>& specs;
  AttentionScratch& attention_scratch;
  std::vector<float>& row_scratch;
  std::byte* panel_scratch;
  float* partials;
  std::int64_t rows = 0;        // of this pass
  std::int64_t head_begin = 0;  // behind the Select: the first logit row of this pass

  float* floats(int buffer) const { return reinterpret_cast<float*>(buffers[buffer].get()); }
  float* row(int buffer, std::int64_t r) const { return floats(buffer) + r * stride(buffer); }
  std::int64_t width(int buffer) const { return specs[buffer].width; }
  std::int64_t stride(int buffer) const { return stride_of(specs[buffer]); }
  std::byte* q_row(int buffer, std::int64_t row) const {
    return buffers[buffer].get() + row * q_row_bytes(blocks_of(specs[buffer]));
  }

  template <class Row>
  void each_row(Row row) {
    team.share(rows, chunk_of(rows, team.size(), 1), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t r = begin; r < end; ++r) row(r);
    });
  }

  void operator()(const EmbedOp& op) {
    each_row([&](std::int64_t r) { kernels.unpack_row(*op.table, batch.token_ids[r], row(op.dst, r)); });
  }

  void operator()(const NormOp& op) {
    const auto n = static_cast<std::int64_t>(op.weight.size());
    const std::int64_t heads = std::max<std::int64_t>(op.heads, 1);
    each_row([&](std::int64_t r) {
      const float* x = row(op.src, r);
      if (op.qdst >= 0) {
        kernels.rms_norm(x, op.weight.data(), n, op.eps, row_scratch.data());
        kernels.quantize(row_scratch.data(), n, q_row(op.qdst, r));
        return;
      }
      float* y = row(op.dst, r);
      for (std::int64_t h = 0; h < heads; ++h) kernels.rms_norm(x + h * n, op.weight.data(), n, op.eps, y + h * n);
    });
  }

  void operator()(const QuantizeOp& op) {
    each_row([&](std::int64_t r) { kernels.quantize(row(op.src, r), width(op.src), q_row(op.qdst, r)); });
  }

  void operator()(const LinearOp& op) {
    std::int64_t total = 0;
    for (const LinearPart& part : op.parts) total += part.weight->panels();
    team.share(total, chunk_of(total, team.size(), 4), [&](std::int64_t begin, std::int64_t end) {
      std::int64_t first = 0;
      for (const LinearPart& part : op.parts) {
        const std::int64_t panels = part.weight->panels();
        const std::int64_t from = std::max(begin - first, std::int64_t{0}), to = std::min(end - first, panels);
        if (from < to) linear(op, part, from, to);
        first += panels;
      }
    });
  }

  void linear(const LinearOp& op, const LinearPart& part, std::int64_t panel_begin, std::int64_t panel_end) {
    LinearJob job;
    job.w = part.weight;
    if (is_quantised(part.weight->format)) {
      job.xq = q_row(op.qsrc, 0);
    } else {
      job.x = floats(op.src);
      job.x_stride = stride(op.src);
    }
    job.rows = rows;
    job.bias = part.bias.empty() ? nullptr : part.bias.data();
    job.epilogue = op.epilogue;
    job.residual = op.epilogue == Epilogue::Add ? floats(op.residual) : nullptr;
    job.y = floats(part.dst);
    job.y_stride = stride(part.dst);
    job.scratch = panel_scratch;
    kernels.linear(job, panel_begin, panel_end);
  }

  void operator()(const RopeOp& op) {
    each_row([&](std::int64_t r) { rope_row(op, r); });
  }
  void rope_row(const RopeOp& op, std::int64_t r) {
    const RopeTable& table = ropes[op.table];
    const std::int64_t position = batch.positions[r];
    for (const RopeTarget& target : op.targets) {
      kernels.rope(row(target.buffer, r), target.heads, op.head_dim, 2 * table.half(), table.cos(position),
                   table.sin(position));
    }
  }

  KVStoreJob store_job(const KVStoreOp& op) const {
    KVStoreJob job;
    job.k = floats(op.k);
    job.v = floats(op.v);
    job.stride = stride(op.k);
    job.pool = pool;
    job.layout = kv;
    job.layer = op.layer;
    job.sequences = sequences.data();
    job.sequence_count = static_cast<std::int64_t>(sequences.size());
    job.finite = finite;
    return job;
  }
  void operator()(const KVStoreOp& op) {
    const KVStoreJob job = store_job(op);
    each_row([&](std::int64_t r) { kernels.kv_store(job, sequence_of_row[r], r, r + 1); });
  }
  void operator()(const RopeStoreOp& op) {
    const KVStoreJob job = store_job(op.store);
    each_row([&](std::int64_t r) {
      rope_row(op.rope, r);
      kernels.kv_store(job, sequence_of_row[r], r, r + 1);
    });
  }

  void operator()(const AttentionOp& op) {
    AttentionJob job;
    job.q = floats(op.q);
    job.q_stride = stride(op.q);
    job.out = floats(op.dst);
    job.out_stride = stride(op.dst);
    job.pool = pool;
    job.layout = kv;
    job.layer = op.layer;
    job.heads = op.heads;
    job.scale = op.scale;
    job.window = op.window;
    job.soft_cap = op.soft_cap;
    job.sequences = sequences.data();
    job.sequence_count = static_cast<std::int64_t>(sequences.size());
    job.rows = attention.rows.data();
    job.partials = partials;
    team.share(static_cast<std::int64_t>(attention.items.size()), 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) kernels.attention(job, attention.items[i], attention_scratch);
    });
    if (attention.merges.empty()) return;
    team.next_phase();
    team.share(rows, 1,
               [&](std::int64_t begin, std::int64_t end) { kernels.attention_merge(job, attention, begin, end); });
  }

  void operator()(const AddOp& op) {
    const std::int64_t n = width(op.dst);
    each_row([&](std::int64_t r) { kernels.add(row(op.a, r), row(op.b, r), n, row(op.dst, r)); });
  }
  void operator()(const SiluMulOp& op) {
    const std::int64_t n = width(op.dst);
    each_row([&](std::int64_t r) { kernels.silu_mul(row(op.gate, r), row(op.up, r), n, row(op.dst, r)); });
  }
  void operator()(const SelectOp& op) {
    const std::int64_t n = width(op.dst);
    each_row([&](std::int64_t r) {
      std::memcpy(row(op.dst, r), row(op.src, batch.logit_rows[head_begin + r]),
                  static_cast<std::size_t>(n) * sizeof(float));
    });
  }
};

}  // namespace

void Executor::run_thread(Step& step, int thread) {
  const BatchView& batch = step.batch;
  const Kernels& kernels = *options_.kernels;
  ThreadScratch& scratch = scratch_[static_cast<std::size_t>(thread)];

  // Block operations are done in their order within each layer; layers are independent.
  if (batch.block_op_count > 0) {
    team_.share(options_.kv.layers, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t layer = begin; layer < end; ++layer) {
        for (std::int64_t i = 0; i < batch.block_op_count; ++i) zero_and_copy(batch.block_ops + 3 * i, layer);
      }
    });
    team_.next_phase();
  }

  Runner runner{kernels,
                team_,
                ropes_,
                options_.kv,
                pool_.get(),
                batch,
                step.sequences,
                step.sequence_of_row,
                step.attention,
                step.output.finite,
                buffers_,
                plan_.buffers,
                scratch.attention,
                scratch.row,
                scratch.panel.get(),
                partials_.data()};
  runner.rows = batch.rows;
  for (std::size_t i = 0; i < head_begin_; ++i) {
    std::visit(runner, plan_.instructions[i]);
    team_.next_phase();
  }

  const SelectOp& select = std::get<SelectOp>(plan_.instructions[head_begin_]);
  const std::int64_t width = plan_.buffers[select.src].width;
  runner.each_row([&](std::int64_t r) {
    if (!kernels.all_finite(runner.row(select.src, r), width)) step.output.finite[r] = 0;
  });
  for (std::int64_t begin = 0; begin < batch.logit_row_count; begin += kHeadRows) {
    team_.next_phase();
    runner.rows = std::min(kHeadRows, batch.logit_row_count - begin);
    runner.head_begin = begin;
    for (std::size_t i = head_begin_; i < plan_.instructions.size(); ++i) {
      std::visit(runner, plan_.instructions[i]);
      team_.next_phase();
    }
    team_.share(runner.rows, 1, [&](std::int64_t from, std::int64_t to) {
      for (std::int64_t r = from; r < to; ++r) {
        float* logits = runner.row(plan_.logits, r);
        if (step.output.logits != nullptr) {
          std::memcpy(step.output.logits + (begin + r) * vocab(), logits,
                      static_cast<std::size_t>(vocab()) * sizeof(float));
        }
        SampleRow row = sample_row_view(step.sampling, begin + r);
        row.logits = logits;
        row.vocab = vocab();
        kernels.sample_row(row, scratch.sample, step.output.results[begin + r]);
      }
    });
  }
}

void Executor::step(const BatchView& batch, const SamplingView& sampling, const StepOutput& output) {
  // What follows may throw std::bad_alloc; the team's threads, which run after it, do not allocate.
  Step step{batch, sampling, output, {}, {}, {}};
  std::int64_t last_position = 0;
  step.sequence_of_row.resize(static_cast<std::size_t>(batch.rows));
  for (std::int64_t s = 0; s < batch.sequences; ++s) {
    SequenceRows rows;
    rows.row_begin = batch.sequence_rows[s];
    rows.row_end = batch.sequence_rows[s + 1];
    rows.first_position = batch.positions[rows.row_begin];
    rows.block_table = batch.block_tables + batch.block_offsets[s];
    step.sequences.push_back(rows);
    last_position = std::max(last_position, batch.positions[rows.row_end - 1]);
    std::fill(step.sequence_of_row.begin() + rows.row_begin, step.sequence_of_row.begin() + rows.row_end,
              static_cast<std::int32_t>(s));
  }
  for (RopeTable& table : ropes_) table.reserve(last_position + 1);
  for (const Instruction& instruction : plan_.instructions) {
    if (const auto* op = std::get_if<AttentionOp>(&instruction)) {
      AttentionJob job;  // the cut depends only on these
      job.layout = options_.kv;
      job.heads = op->heads;
      job.sequences = step.sequences.data();
      job.sequence_count = static_cast<std::int64_t>(step.sequences.size());
      step.attention = attention_plan(job, team_.size(), options_.cascade);
      break;
    }
  }
  if (partials_.size() < step.attention.partial_floats) partials_.resize(step.attention.partial_floats);
  std::fill(output.finite, output.finite + batch.rows, std::uint8_t{1});
  const std::function<void(int)> work = [this, &step](int thread) { run_thread(step, thread); };
  team_.run(work);
}

}  // namespace octavo
