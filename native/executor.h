// Runs a Plan over paged KV memory, one step at a time, on its own thread team.
//
// Between steps it keeps nothing of a request but its KV. `check` is the border: what passed it cannot read or write
// out of bounds.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "ops/attention.h"
#include "ops/rope.h"
#include "ops/sample_rows.h"
#include "plan.h"
#include "simd/kernels.h"
#include "team.h"

namespace octavo {

// The arrays of src/octavo/executor/interface.py's Batch; meanings there.
struct BatchView {
  const std::int32_t* token_ids = nullptr;
  const std::int64_t* positions = nullptr;
  std::int64_t rows = 0;
  const std::int32_t* sequence_rows = nullptr;
  const std::int32_t* block_offsets = nullptr;
  std::int64_t sequences = 0;
  const std::int32_t* block_tables = nullptr;
  std::int64_t block_table_size = 0;
  const std::int32_t* logit_rows = nullptr;
  std::int64_t logit_row_count = 0;
  const std::int32_t* block_ops = nullptr;  // [block_op_count][3]
  std::int64_t block_op_count = 0;
};

struct StepOutput {
  SampleResult* results = nullptr;  // [logit rows]; their top_* pointers are set by the caller
  std::uint8_t* finite = nullptr;   // [rows]
  float* logits = nullptr;          // [logit rows][vocab] for a copy of the raw logits, or null
};

struct ExecutorOptions {
  KVLayout kv;
  std::int64_t num_blocks = 0;
  std::int64_t max_rows = 0;
  int threads = 1;
  bool cascade = true;  // attention reads what sequences share once; the bits are the same without
  const Kernels* kernels = nullptr;
};

class Executor {
 public:
  // Null with a message in `error` when the plan is inconsistent or memory is refused.
  static std::unique_ptr<Executor> make(Plan plan, const ExecutorOptions& options, std::string& error);

  std::int64_t vocab() const { return plan_.buffers[plan_.logits].width; }
  const ExecutorOptions& options() const { return options_; }

  // Empty when the batch is well formed; else what is not.
  std::string check(const BatchView& batch) const;
  // `batch` and `sampling` passed their checks. One call at a time; no Python. std::bad_alloc before anything was done.
  void step(const BatchView& batch, const SamplingView& sampling, const StepOutput& output);

  std::byte* block(std::int64_t index) { return pool_.get() + index * options_.kv.block_bytes(); }

 private:
  struct Step;  // what one step's threads share
  Executor(Plan plan, const ExecutorOptions& options)
      : plan_(std::move(plan)), options_(options), team_(options.threads) {}
  struct ThreadScratch {
    AttentionScratch attention;
    SampleScratch sample;
    std::vector<float> row;
    AlignedBytes panel;  // of the linear kernels
  };
  bool allocate();
  bool reserve(ThreadScratch& scratch) const;
  void run_thread(Step& step, int thread);
  void zero_and_copy(const std::int32_t* op, std::int64_t layer);

  float* floats(int buffer) { return reinterpret_cast<float*>(buffers_[buffer].get()); }

  Plan plan_;
  ExecutorOptions options_;
  Team team_;
  AlignedBytes pool_;
  std::vector<AlignedBytes> buffers_;
  std::vector<RopeTable> ropes_;
  std::size_t head_begin_ = 0;  // the Select
  std::vector<ThreadScratch> scratch_;
  std::vector<float> partials_;
};

}  // namespace octavo
