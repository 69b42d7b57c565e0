// A whole step in C++: threads, cuts and kernels give the same bits; a malformed batch is refused. Under ASan and TSan
// in `make sanitize`, which is why it exists beside the Python tests of the executor.
#include <atomic>
#include <cstring>
#include <limits>
#include <new>
#include <numeric>
#include <thread>

#include "check.h"
#include "executor.h"
#include "formats/pack.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

using namespace octavo;

// The threads of a team must not allocate in a step: nobody could catch the exception there.
static std::atomic<bool> stepping{false};
static std::thread::id stepping_thread;

void* operator new(std::size_t size) {
  CHECK(!stepping.load(std::memory_order_acquire) || std::this_thread::get_id() == stepping_thread);
  if (void* p = std::malloc(size > 0 ? size : 1)) return p;
  throw std::bad_alloc();
}
void* operator new(std::size_t size, const std::nothrow_t&) noexcept { return std::malloc(size > 0 ? size : 1); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }

namespace {

constexpr std::int64_t kHidden = 48, kHeads = 4, kKvHeads = 2, kHeadDim = 16, kFfn = 40, kVocab = 70, kLayers = 2;

struct Model {
  Rng rng{7};
  std::vector<Weight> weights;

  Model() { weights.reserve(64); }

  const Weight* matrix(std::int64_t n, std::int64_t k, Format format, bool interleave = false) {
    std::vector<WeightPart> parts;
    std::vector<std::vector<float>> values;
    values.reserve(2);
    for (int i = 0; i < (interleave ? 2 : 1); ++i) {
      std::vector<float>& v = values.emplace_back(static_cast<std::size_t>(n * k));
      for (float& x : v) x = rng.uniform(-0.3f, 0.3f);
      WeightPart part{};
      part.data = reinterpret_cast<const std::uint8_t*>(v.data());
      part.bytes = static_cast<std::int64_t>(v.size() * sizeof(float));
      part.encoding = *parse_encoding("f32");
      part.rows = n;
      part.cols = k;
      parts.push_back(part);
    }
    Packed packed = pack(parts, format, interleave, 1);
    CHECK(packed.error.empty());
    weights.push_back(std::move(packed.weight));
    return &weights.back();
  }
  std::vector<float> vector(std::int64_t n) {
    std::vector<float> v(static_cast<std::size_t>(n));
    for (float& x : v) x = rng.uniform(0.5f, 1.5f);
    return v;
  }
};

Plan make_plan(Model& model) {
  Plan plan;
  const auto buffer = [&](std::int64_t width, bool quantised) {
    plan.buffers.push_back({width, quantised});
    return static_cast<int>(plan.buffers.size()) - 1;
  };
  const auto emit = [&](Instruction instruction) { plan.instructions.push_back(std::move(instruction)); };
  const int x = buffer(kHidden, false), h = buffer(kHidden, true), q = buffer(kHeads * kHeadDim, false);
  const int k = buffer(kKvHeads * kHeadDim, false), v = buffer(kKvHeads * kHeadDim, false);
  const int a = buffer(kHeads * kHeadDim, false), aq = buffer(kHeads * kHeadDim, true);
  const int f = buffer(kFfn, false), fq = buffer(kFfn, true), chosen = buffer(kHidden, false);
  plan.ropes.push_back({kHeadDim, rope_frequencies(10000.0, kHeadDim)});
  const Weight* table = model.matrix(kVocab, kHidden, Format::Q8);
  emit(EmbedOp{table, x});
  for (std::int64_t layer = 0; layer < kLayers; ++layer) {
    emit(NormOp{x, -1, h, model.vector(kHidden), 0, 1e-5f});
    LinearOp qkv{-1, h, {}, Epilogue::Store, -1};
    qkv.parts.push_back({model.matrix(kHeads * kHeadDim, kHidden, Format::Q4), {}, q});
    qkv.parts.push_back({model.matrix(kKvHeads * kHeadDim, kHidden, Format::Q8), {}, k});
    qkv.parts.push_back({model.matrix(kKvHeads * kHeadDim, kHidden, Format::Q8), {}, v});
    emit(std::move(qkv));
    emit(RopeStoreOp{{{{q, kHeads}, {k, kKvHeads}}, kHeadDim, 0}, {k, v, layer}});
    emit(AttentionOp{q, a, layer, kHeads, 0, 0.25f, 0.0f});
    emit(QuantizeOp{a, aq});
    emit(LinearOp{-1, aq, {{model.matrix(kHidden, kHeads * kHeadDim, Format::Q8), {}, x}}, Epilogue::Add, x});
    emit(NormOp{x, -1, h, model.vector(kHidden), 0, 1e-5f});
    emit(LinearOp{-1, h, {{model.matrix(kFfn, kHidden, Format::Q8, true), {}, f}}, Epilogue::SiluMul, -1});
    emit(QuantizeOp{f, fq});
    emit(LinearOp{-1, fq, {{model.matrix(kHidden, kFfn, Format::Q8), {}, x}}, Epilogue::Add, x});
  }
  emit(SelectOp{x, chosen});
  emit(NormOp{chosen, -1, h, model.vector(kHidden), 0, 1e-5f});
  plan.logits = buffer(kVocab, false);
  emit(LinearOp{-1, h, {{table, {}, plan.logits}}, Epilogue::Store, -1});
  return plan;
}

// Two sequences, the first in blocks 0.., the second in blocks 100..; rows [begin, end) of each in one step.
struct Batch {
  std::vector<std::int32_t> ids, rows{0}, tables, offsets{0}, logit_rows, ops;
  std::vector<std::int64_t> positions;

  Batch(std::int64_t begin, std::int64_t end) {
    for (std::int32_t s = 0; s < 2; ++s) {
      for (std::int64_t p = begin; p < end; ++p) {
        ids.push_back(static_cast<std::int32_t>((p * p + 3 * p + s * 11) % kVocab));
        positions.push_back(p);
        if (p % kBlockTokens == 0)
          ops.insert(ops.end(), {static_cast<std::int32_t>(s * 100 + p / kBlockTokens), -1, 0});
      }
      rows.push_back(static_cast<std::int32_t>(ids.size()));
      for (std::int64_t b = 0; b <= (end - 1) / kBlockTokens; ++b)
        tables.push_back(static_cast<std::int32_t>(s * 100 + b));
      offsets.push_back(static_cast<std::int32_t>(tables.size()));
    }
    logit_rows.resize(ids.size());
    std::iota(logit_rows.begin(), logit_rows.end(), 0);
  }

  // One more token for each of `count` sequences that share the blocks before `position`, which is a block's first.
  static Batch sharing(std::int64_t position, std::int32_t count) {
    Batch batch(position, position);
    batch.rows.resize(1);
    batch.offsets.resize(1);
    batch.tables.clear();
    for (std::int32_t s = 0; s < count; ++s) {
      batch.ids.push_back(s * 5 % static_cast<std::int32_t>(kVocab));
      batch.positions.push_back(position);
      batch.rows.push_back(s + 1);
      for (std::int32_t b = 0; b < position / kBlockTokens; ++b) batch.tables.push_back(b);
      batch.tables.push_back(150 + s);
      batch.ops.insert(batch.ops.end(), {150 + s, -1, 0});
      batch.offsets.push_back(static_cast<std::int32_t>(batch.tables.size()));
      batch.logit_rows.push_back(s);
    }
    return batch;
  }

  BatchView view() const {
    BatchView b;
    b.token_ids = ids.data();
    b.positions = positions.data();
    b.rows = static_cast<std::int64_t>(ids.size());
    b.sequence_rows = rows.data();
    b.block_offsets = offsets.data();
    b.sequences = static_cast<std::int64_t>(rows.size()) - 1;
    b.block_tables = tables.data();
    b.block_table_size = static_cast<std::int64_t>(tables.size());
    b.logit_rows = logit_rows.data();
    b.logit_row_count = static_cast<std::int64_t>(logit_rows.size());
    b.block_ops = ops.data();
    b.block_op_count = static_cast<std::int64_t>(ops.size()) / 3;
    return b;
  }
};

// Greedy rows with their logprobs.
struct Sampling {
  std::vector<float> zeros, ones;
  std::vector<std::int32_t> none, ints, offsets;
  std::vector<std::int64_t> positions;
  std::vector<std::uint64_t> seeds;

  explicit Sampling(std::size_t n)
      : zeros(n, 0.0f), ones(n, 1.0f), none(n, -1), ints(n, 0), offsets(n + 1, 0), positions(n, 0), seeds(n, 0) {}

  SamplingView view() const {
    SamplingView v;
    v.rows = static_cast<std::int64_t>(zeros.size());
    v.vocab = kVocab;
    v.temperature = v.min_p = v.presence = v.frequency = zeros.data();
    v.top_p = v.typical_p = v.repetition = ones.data();
    v.top_k = v.n_index = v.num_logprobs = ints.data();
    v.target = v.mask_index = none.data();
    v.seed = seeds.data();
    v.position = positions.data();
    v.banned_offsets = v.bias_offsets = v.seen_offsets = offsets.data();
    return v;
  }
};

std::vector<float> run(Executor& executor, const Batch& batch) {
  const std::size_t n = batch.ids.size();
  CHECK(n > 0 && n <= 200);
  const Sampling sampling(n);
  CHECK(executor.check(batch.view()).empty());
  CHECK(validate(sampling.view()).empty());
  std::vector<SampleResult> results(n);
  std::vector<std::uint8_t> finite(n);
  std::vector<float> logits(n * kVocab);
  stepping_thread = std::this_thread::get_id();
  stepping.store(true, std::memory_order_release);
  executor.step(batch.view(), sampling.view(), {results.data(), finite.data(), logits.data()});
  stepping.store(false, std::memory_order_release);
  for (std::size_t r = 0; r < n; ++r) CHECK(results[r].ok && finite[r] == 1);
  return logits;
}

std::vector<float> run(Executor& executor, std::int64_t begin, std::int64_t end) {
  return run(executor, Batch(begin, end));
}

std::unique_ptr<Executor> make(const Plan& plan, int threads, const std::string& kernels, KVType type = KVType::F16,
                               bool cascade = true) {
  ExecutorOptions options;
  options.kv = {kLayers, kKvHeads, kHeadDim, type};
  options.num_blocks = 200;
  options.max_rows = 200;
  options.threads = threads;
  options.cascade = cascade;
  options.kernels = find_kernels(kernels);
  std::string error;
  std::unique_ptr<Executor> executor = Executor::make(plan, options, error);
  CHECK(executor != nullptr && error.empty());
  return executor;
}

void test_threads_kernels_and_cuts_give_the_same_bits(const Plan& plan, KVType type) {
  const std::int64_t tokens = 70;
  const std::vector<float> expected = run(*make(plan, 1, "scalar", type), 0, tokens);
  for (const std::string& kernels : kernel_names()) {
    for (int threads : {1, 2, 4}) {
      CHECK(run(*make(plan, threads, kernels, type), 0, tokens) == expected);
      for (std::int64_t chunk : {1, 17, 33}) {
        const std::unique_ptr<Executor> executor = make(plan, threads, kernels, type);
        for (std::int64_t begin = 0; begin < tokens; begin += chunk) {
          const std::int64_t end = std::min(begin + chunk, tokens);
          const std::vector<float> part = run(*executor, begin, end);
          const auto size = static_cast<std::size_t>((end - begin) * kVocab);
          for (std::size_t s = 0; s < 2; ++s) {
            const float* whole = expected.data() + (s * tokens + static_cast<std::size_t>(begin)) * kVocab;
            CHECK(std::memcmp(part.data() + s * size, whole, size * sizeof(float)) == 0);
          }
        }
      }
    }
  }
}

void test_sequences_that_share_a_prefix_have_the_bits_of_each_alone(const Plan& plan) {
  const std::int64_t prefix = 96;
  const std::int32_t count = 29;
  std::vector<float> alone;
  const std::unique_ptr<Executor> one = make(plan, 1, "scalar");
  run(*one, 0, prefix);
  for (std::int32_t s = 0; s < count; ++s) {
    Batch batch = Batch::sharing(prefix, 1);
    batch.ids[0] = s * 5 % static_cast<std::int32_t>(kVocab);
    const std::vector<float> logits = run(*one, batch);
    alone.insert(alone.end(), logits.begin(), logits.end());
  }
  for (const std::string& kernels : kernel_names()) {
    for (int threads : {1, 2, 4}) {
      for (bool cascade : {false, true}) {
        const std::unique_ptr<Executor> executor = make(plan, threads, kernels, KVType::F16, cascade);
        run(*executor, 0, prefix);
        const std::vector<float> together = run(*executor, Batch::sharing(prefix, count));
        CHECK(together.size() == alone.size());
        CHECK(std::memcmp(together.data(), alone.data(), alone.size() * sizeof(float)) == 0);
      }
    }
  }
}

// Every byte of the copy: the source's where it belongs to a copied token, scales included, else zero.
void test_a_block_operation_copies_whole_tokens_and_zeroes_the_rest(const Plan& plan) {
  for (const KVType type : {KVType::F16, KVType::F32, KVType::Int8}) {
    const std::int64_t element = type == KVType::F16 ? 2 : type == KVType::F32 ? 4 : 1;
    for (const std::int32_t tokens : {0, 1, 5, 16}) {
      const std::unique_ptr<Executor> executor = make(plan, 2, "auto", type);
      const std::int64_t size = executor->options().kv.block_bytes();
      Rng rng{3};
      for (std::int64_t i = 0; i < size; ++i) {
        executor->block(150)[i] = static_cast<std::byte>(1 + rng.next() % 255);
        executor->block(151)[i] = std::byte{0xff};
      }
      Batch batch(0, 1);
      batch.ops.insert(batch.ops.end(), {151, 150, tokens});
      const std::size_t n = batch.ids.size();
      const Sampling sampling(n);
      std::vector<SampleResult> results(n);
      std::vector<std::uint8_t> finite(n);
      executor->step(batch.view(), sampling.view(), {results.data(), finite.data(), nullptr});
      std::int64_t at = 0;
      const auto expect = [&](std::int64_t bytes, bool copied) {
        for (std::int64_t i = 0; i < bytes; ++i, ++at)
          CHECK(executor->block(151)[at] == (copied ? executor->block(150)[at] : std::byte{0}));
      };
      const auto row_of_tokens = [&](std::int64_t bytes) {
        for (std::int64_t t = 0; t < kBlockTokens; ++t) expect(bytes, t < tokens);
      };
      for (std::int64_t head = 0; head < kLayers * kKvHeads; ++head) {
        for (std::int64_t d = 0; d < kHeadDim; ++d) row_of_tokens(element);
        if (type == KVType::Int8) row_of_tokens(4);
        row_of_tokens(kHeadDim * element);
        if (type == KVType::Int8) row_of_tokens(4);
      }
      CHECK(at == size);
    }
  }
}

void test_a_plan_that_does_not_fit_together_is_refused(const Plan& plan) {
  ExecutorOptions options;
  options.kv = {kLayers, kKvHeads, kHeadDim, KVType::F16};
  options.num_blocks = options.max_rows = 1;
  options.kernels = find_kernels("scalar");
  for (std::size_t i = 0; i < plan.buffers.size(); ++i) {
    Plan wrong = plan;
    wrong.buffers[i].width += 1;
    std::string error;
    CHECK(Executor::make(wrong, options, error) == nullptr && !error.empty());
    wrong = plan;
    wrong.buffers[i].quantised = !wrong.buffers[i].quantised;
    CHECK(Executor::make(wrong, options, error) == nullptr && !error.empty());
  }
  options.kv.layers = 1;
  std::string error;
  CHECK(Executor::make(plan, options, error) == nullptr && !error.empty());
}

// Each would read or write out of bounds, or let threads overwrite what others still read.
void test_a_plan_that_would_do_harm_is_refused(const Plan& plan) {
  ExecutorOptions options;
  options.kv = {kLayers, kKvHeads, kHeadDim, KVType::F16};
  options.num_blocks = options.max_rows = 1;
  options.kernels = find_kernels("scalar");
  const auto refused = [&](const Plan& wrong) {
    std::string error;
    CHECK(Executor::make(wrong, options, error) == nullptr && !error.empty());
  };
  const auto before_select = [&](Instruction instruction) {
    Plan wrong = plan;
    wrong.instructions.insert(wrong.instructions.begin(), std::move(instruction));
    refused(wrong);
  };
  const auto behind_select = [&](const Instruction& instruction) {
    Plan wrong = plan;
    wrong.instructions.push_back(instruction);
    refused(wrong);
  };
  const int h = 1, x = 0, q = 2, k = 3, v = 4, a = 5;           // as made by make_plan
  before_select(AddOp{plan.logits, plan.logits, plan.logits});  // a chunk of rows is held of it, not a batch
  before_select(AddOp{h, h, h});
  before_select(SiluMulOp{x, x, h});
  before_select(QuantizeOp{h, h});
  before_select(RopeOp{{{q, -1}}, -(kHeads * kHeadDim), 0});
  before_select(RopeOp{{{q, kHeads}}, std::int64_t{1} << 62, 0});
  before_select(NormOp{x, x, -1, std::vector<float>(kHidden), std::int64_t{1} << 62, 0.0f});
  const LinearOp qkv = std::get<LinearOp>(plan.instructions[2]);
  LinearOp twice = qkv;
  twice.parts[2].dst = twice.parts[1].dst;
  before_select(twice);
  Plan wrong = plan;
  std::get<SelectOp>(wrong.instructions[wrong.instructions.size() - 3]).dst = h;
  refused(wrong);
  Model other;
  wrong = plan;
  std::get<EmbedOp>(wrong.instructions[0]).table = other.matrix(kVocab - 1, kHidden, Format::Q8);
  refused(wrong);
  LinearOp in_place{x, -1, {{other.matrix(kHidden, kHidden, Format::F32), {}, x}}, Epilogue::Store, -1};
  before_select(in_place);
  behind_select(std::get<EmbedOp>(plan.instructions[0]));
  behind_select(KVStoreOp{k, v, 0});
  behind_select(AttentionOp{q, a, 0, kHeads, 0, 0.25f, 0.0f});
  behind_select(RopeOp{{{q, kHeads}}, kHeadDim, 0});
}

void test_sizes_that_overflow_are_refused(const Plan& plan, KVType type) {
  const std::int64_t large = std::int64_t{1} << 40;
  for (int field = 0; field < 6; ++field) {
    for (std::int64_t value : {large, std::numeric_limits<std::int64_t>::max(), std::int64_t{0}, std::int64_t{-1}}) {
      ExecutorOptions options;
      options.kv = {kLayers, kKvHeads, kHeadDim, type};
      options.num_blocks = options.max_rows = 1;
      options.kernels = find_kernels("scalar");
      std::int64_t threads = 1;
      std::int64_t* const fields[] = {&options.kv.layers,  &options.kv.kv_heads, &options.kv.head_dim,
                                      &options.num_blocks, &options.max_rows,    &threads};
      *fields[field] = value;
      options.threads = static_cast<int>(std::min<std::int64_t>(threads, std::numeric_limits<int>::max()));
      std::string error;
      CHECK(Executor::make(plan, options, error) == nullptr && !error.empty());
    }
  }
}

void test_positions_stop_at_the_blocks_there_are(const Plan& plan) {
  const std::unique_ptr<Executor> executor = make(plan, 1, "scalar");
  Batch batch(0, 1);
  CHECK(executor->check(batch.view()).empty());
  batch.positions[1] = 200 * kBlockTokens;  // the same block again and again would let the rope tables grow
  batch.tables.resize(1 + 201, 0);
  batch.offsets[2] = static_cast<std::int32_t>(batch.tables.size());
  CHECK(!executor->check(batch.view()).empty());
  batch.positions[1] -= 1;
  CHECK(executor->check(batch.view()).empty());
  batch.positions[1] = std::numeric_limits<std::int64_t>::max();
  CHECK(!executor->check(batch.view()).empty());
}

// Denormals flushed and rounding toward zero: what a library may have left in the calling thread.
void test_the_callers_float_environment_changes_nothing(const Plan& plan) {
#if defined(__x86_64__)
  for (int threads : {1, 2}) {
    const std::vector<float> expected = run(*make(plan, threads, "auto"), 0, 40);
    const unsigned saved = _mm_getcsr();
    const unsigned hostile = 0x1f80u | 0x8040u | 0x6000u;
    _mm_setcsr(hostile);
    const std::vector<float> got = run(*make(plan, threads, "auto"), 0, 40);
    const unsigned after = _mm_getcsr() & ~0x3fu;
    _mm_setcsr(saved);
    CHECK(after == hostile);
    CHECK(std::memcmp(got.data(), expected.data(), got.size() * sizeof(float)) == 0);
  }
#else
  (void)plan;
#endif
}

}  // namespace

int main() {
  Model model;
  const Plan plan = make_plan(model);
  test_sequences_that_share_a_prefix_have_the_bits_of_each_alone(plan);
  for (const KVType type : {KVType::F16, KVType::Int8}) test_threads_kernels_and_cuts_give_the_same_bits(plan, type);
  test_a_block_operation_copies_whole_tokens_and_zeroes_the_rest(plan);
  test_a_plan_that_does_not_fit_together_is_refused(plan);
  test_a_plan_that_would_do_harm_is_refused(plan);
  for (const KVType type : {KVType::F32, KVType::Int8}) test_sizes_that_overflow_are_refused(plan, type);
  test_positions_stop_at_the_blocks_there_are(plan);
  test_the_callers_float_environment_changes_nothing(plan);
  return 0;
}
