// A whole step in C++: threads, cuts and kernels give the same bits; a malformed batch is refused. Under ASan and TSan
// in `make sanitize`, which is why it exists beside the Python tests of the executor.
#include <cstring>
#include <numeric>

#include "check.h"
#include "executor.h"
#include "formats/pack.h"

using namespace octavo;

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

  BatchView view() const {
    BatchView b;
    b.token_ids = ids.data();
    b.positions = positions.data();
    b.rows = static_cast<std::int64_t>(ids.size());
    b.sequence_rows = rows.data();
    b.block_offsets = offsets.data();
    b.sequences = 2;
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

std::vector<float> run(Executor& executor, std::int64_t begin, std::int64_t end) {
  const Batch batch(begin, end);
  const std::size_t n = batch.ids.size();
  const Sampling sampling(n);
  CHECK(executor.check(batch.view()).empty());
  CHECK(validate(sampling.view()).empty());
  std::vector<SampleResult> results(n);
  std::vector<std::uint8_t> finite(n);
  std::vector<float> logits(n * kVocab);
  executor.step(batch.view(), sampling.view(), {results.data(), finite.data(), logits.data()});
  for (std::size_t r = 0; r < n; ++r) CHECK(results[r].ok && finite[r] == 1);
  return logits;
}

std::unique_ptr<Executor> make(const Plan& plan, int threads, const std::string& kernels) {
  ExecutorOptions options;
  options.kv = {kLayers, kKvHeads, kHeadDim, KVType::F16};
  options.num_blocks = 200;
  options.max_rows = 200;
  options.threads = threads;
  options.kernels = find_kernels(kernels);
  std::string error;
  std::unique_ptr<Executor> executor = Executor::make(plan, options, error);
  CHECK(executor != nullptr && error.empty());
  return executor;
}

void test_threads_kernels_and_cuts_give_the_same_bits(const Plan& plan) {
  const std::int64_t tokens = 70;
  const std::vector<float> expected = run(*make(plan, 1, "scalar"), 0, tokens);
  for (const std::string& kernels : kernel_names()) {
    for (int threads : {1, 2, 4}) {
      CHECK(run(*make(plan, threads, kernels), 0, tokens) == expected);
      for (std::int64_t chunk : {1, 17, 33}) {
        const std::unique_ptr<Executor> executor = make(plan, threads, kernels);
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

}  // namespace

int main() {
  Model model;
  const Plan plan = make_plan(model);
  test_threads_kernels_and_cuts_give_the_same_bits(plan);
  test_a_plan_that_does_not_fit_together_is_refused(plan);
  return 0;
}
