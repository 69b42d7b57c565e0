#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <mutex>
#include <optional>

#include "arrays.h"
#include "executor.h"
#include "module.h"
#include "sampling_view.h"

namespace nb = nanobind;
using namespace octavo;
using octavo::python::Array1;
using octavo::python::Array2;
using octavo::python::owned_array;

namespace {

using FloatVector = Array1<float>;
using Part = std::tuple<nb::object, std::optional<FloatVector>, int>;  // weight, bias, destination

// A Plan under construction; it keeps the Python objects of its weights alive.
struct PlanBuilder {
  Plan plan;
  std::vector<nb::object> weights;

  const Weight* keep(const nb::object& weight) {
    const auto* native = nb::cast<const Weight*>(weight);
    if (native == nullptr) throw nb::value_error("a weight is None");
    weights.push_back(weight);
    return native;
  }
};

std::vector<float> copy_of(const FloatVector& array) { return {array.data(), array.data() + array.shape(0)}; }

Epilogue epilogue_of(const std::string& name) {
  if (name == "store") return Epilogue::Store;
  if (name == "add") return Epilogue::Add;
  if (name == "silu_mul") return Epilogue::SiluMul;
  throw nb::value_error(("unknown epilogue " + name).c_str());
}

RopeOp rope_of(const std::vector<std::pair<int, int>>& targets, std::int64_t head_dim, int table) {
  RopeOp op{{}, head_dim, table};
  for (const auto& [buffer, heads] : targets) op.targets.push_back({buffer, heads});
  return op;
}

// Any Python thread may call in at any time: `busy` makes them take turns. It is waited for and held without the GIL,
// and nothing that could run Python happens under it.
struct NativeExecutor {
  std::unique_ptr<Executor> executor;  // null once closed
  std::vector<nb::object> weights;
  std::int64_t vocab;
  const char* kernels;
  std::mutex busy;

  // Runs work(executor), which returns what is wrong or nothing.
  template <class Work>
  void in_turn(Work work) {
    std::string problem;
    {
      nb::gil_scoped_release release;
      const std::lock_guard<std::mutex> turn(busy);
      problem = executor != nullptr ? work(*executor) : "the executor is closed";
    }
    if (!problem.empty()) throw nb::value_error(problem.c_str());
  }
};

BatchView view_of(const Array1<std::int32_t>& token_ids, const Array1<std::int64_t>& positions,
                  const Array1<std::int32_t>& sequence_rows, const Array1<std::int32_t>& block_tables,
                  const Array1<std::int32_t>& block_offsets, const Array1<std::int32_t>& logit_rows,
                  const Array2<std::int32_t>& block_ops) {
  if (positions.shape(0) != token_ids.shape(0)) throw nb::value_error("positions: one is needed for each token id");
  if (sequence_rows.shape(0) < 2 || block_offsets.shape(0) != sequence_rows.shape(0)) {
    throw nb::value_error("sequence_rows and block_offsets: one more entry than sequences is needed");
  }
  if (block_ops.shape(1) != 3) throw nb::value_error("block_ops: rows of (dst, src, tokens) are needed");
  const auto all_aligned = [](const auto&... arrays) { return (python::aligned(arrays) && ...); };
  if (!all_aligned(token_ids, positions, sequence_rows, block_tables, block_offsets, logit_rows, block_ops))
    throw nb::value_error("an array of the batch at an odd address");
  BatchView b;
  b.token_ids = token_ids.data();
  b.positions = positions.data();
  b.rows = static_cast<std::int64_t>(token_ids.shape(0));
  b.sequence_rows = sequence_rows.data();
  b.block_offsets = block_offsets.data();
  b.sequences = static_cast<std::int64_t>(sequence_rows.shape(0)) - 1;
  b.block_tables = block_tables.data();
  b.block_table_size = static_cast<std::int64_t>(block_tables.shape(0));
  b.logit_rows = logit_rows.data();
  b.logit_row_count = static_cast<std::int64_t>(logit_rows.shape(0));
  b.block_ops = block_ops.data();
  b.block_op_count = static_cast<std::int64_t>(block_ops.shape(0));
  return b;
}

// One step. `sampling` is a SamplingRows. Returns (ids, logprobs,
// ranks, top_ids, top_logprobs, ok, finite, logits or None).
nb::tuple step(NativeExecutor& self, const Array1<std::int32_t>& token_ids, const Array1<std::int64_t>& positions,
               const Array1<std::int32_t>& sequence_rows, const Array1<std::int32_t>& block_tables,
               const Array1<std::int32_t>& block_offsets, const Array1<std::int32_t>& logit_rows,
               const Array2<std::int32_t>& block_ops, nb::handle sampling, bool want_logits) {
  const BatchView batch =
      view_of(token_ids, positions, sequence_rows, block_tables, block_offsets, logit_rows, block_ops);
  const python::SamplingArrays arrays(sampling, batch.logit_row_count, self.vocab);
  const SamplingView& view = arrays.view();
  if (const std::string problem = validate(view); !problem.empty()) throw nb::value_error(problem.c_str());

  const auto rows = static_cast<std::size_t>(batch.rows), count = static_cast<std::size_t>(batch.logit_row_count);
  const auto top = static_cast<std::size_t>(max_logprobs(view));
  std::int32_t *ids, *ranks, *top_ids;
  float *logprobs, *top_logprobs, *logits = nullptr;
  std::uint8_t *ok, *finite;
  nb::object ids_array = owned_array({count}, ids), logprobs_array = owned_array({count}, logprobs);
  nb::object ranks_array = owned_array({count}, ranks), ok_array = owned_array({count}, ok);
  nb::object top_ids_array = owned_array({count, top}, top_ids),
             top_logprobs_array = owned_array({count, top}, top_logprobs);
  nb::object finite_array = owned_array({rows}, finite), logits_array = nb::none();
  if (want_logits) logits_array = owned_array({count, static_cast<std::size_t>(self.vocab)}, logits);

  std::vector<SampleResult> results(count);
  for (std::size_t r = 0; r < count; ++r) {
    results[r].top_ids = top_ids + r * top;
    results[r].top_logprobs = top_logprobs + r * top;
  }
  self.in_turn([&](Executor& executor) {
    std::string problem = executor.check(batch);
    if (problem.empty()) executor.step(batch, view, {results.data(), finite, logits});
    return problem;
  });
  for (std::size_t r = 0; r < count; ++r) {
    ids[r] = results[r].ok ? results[r].id : -1;
    logprobs[r] = results[r].logprob;
    ranks[r] = results[r].rank;
    ok[r] = results[r].ok ? 1 : 0;
  }
  return nb::make_tuple(ids_array, logprobs_array, ranks_array, top_ids_array, top_logprobs_array, ok_array,
                        finite_array, logits_array);
}

KVType kv_type_of(const std::string& name) {
  if (name == "f16") return KVType::F16;
  if (name == "f32") return KVType::F32;
  if (name == "int8") return KVType::Int8;
  throw nb::value_error("kv_dtype: f16, f32 or int8");
}

bool exists(const Executor& executor, std::int64_t block) {
  return block >= 0 && block < executor.options().num_blocks;
}

nb::bytes export_block(NativeExecutor& self, std::int64_t block) {
  std::string data;
  bool found = false;
  self.in_turn([&](Executor& executor) {
    found = exists(executor, block);
    const auto size = static_cast<std::size_t>(executor.options().kv.block_bytes());
    if (found) data.assign(reinterpret_cast<const char*>(executor.block(block)), size);
    return "";
  });
  if (!found) throw nb::index_error("no such block");
  return nb::bytes(data.data(), data.size());
}

void import_block(NativeExecutor& self, std::int64_t block, const nb::bytes& data) {
  const void* source = data.data();
  const std::size_t size = data.size();
  bool found = false;
  self.in_turn([&](Executor& executor) {
    found = exists(executor, block);
    if (!found) return "";
    if (static_cast<std::int64_t>(size) != executor.options().kv.block_bytes()) return "a block of another size";
    std::memcpy(executor.block(block), source, size);
    return "";
  });
  if (!found) throw nb::index_error("no such block");
}

void close_executor(NativeExecutor& self) {
  {
    nb::gil_scoped_release release;
    const std::lock_guard<std::mutex> turn(self.busy);
    self.executor.reset();
  }
  const std::vector<nb::object> freed = std::move(self.weights);
  self.weights.clear();
}

}  // namespace

void bind_executor(nb::module_& m) {
  nb::class_<PlanBuilder>(m, "Plan")
      .def(nb::init<>())
      .def("buffer",
           [](PlanBuilder& b, std::int64_t width, bool quantised) {
             b.plan.buffers.push_back({width, quantised});
             return static_cast<int>(b.plan.buffers.size()) - 1;
           })
      .def("rope_table",
           [](PlanBuilder& b, const Array1<double>& inverse) {
             std::vector<double> frequencies(inverse.data(), inverse.data() + inverse.shape(0));
             b.plan.ropes.push_back({static_cast<std::int64_t>(frequencies.size()) * 2, frequencies});
             return static_cast<int>(b.plan.ropes.size()) - 1;
           })
      .def("embed", [](PlanBuilder& b, const nb::object& table,
                       int dst) { b.plan.instructions.push_back(EmbedOp{b.keep(table), dst}); })
      .def("rms_norm",
           [](PlanBuilder& b, int src, const FloatVector& weight, std::int64_t heads, float eps, int dst, int qdst) {
             b.plan.instructions.push_back(NormOp{src, dst, qdst, copy_of(weight), heads, eps});
           })
      .def("quantise", [](PlanBuilder& b, int src, int qdst) { b.plan.instructions.push_back(QuantizeOp{src, qdst}); })
      .def(
          "linear",
          [](PlanBuilder& b, int src, int qsrc, const std::vector<Part>& parts, const std::string& epilogue,
             int residual) {
            LinearOp op{src, qsrc, {}, epilogue_of(epilogue), residual};
            for (const auto& [weight, bias, dst] : parts) {
              LinearPart part{b.keep(weight), {}, dst};
              if (bias) {
                if (static_cast<std::int64_t>(bias->shape(0)) != part.weight->n)
                  throw nb::value_error("a bias needs one value an output");
                part.bias = copy_of(*bias);
                part.bias.resize(static_cast<std::size_t>(part.weight->panels() * kPanel), 0.0f);
              }
              op.parts.push_back(std::move(part));
            }
            b.plan.instructions.push_back(std::move(op));
          },
          nb::arg("src"), nb::arg("qsrc"), nb::arg("parts"), nb::arg("epilogue") = "store", nb::arg("residual") = -1)
      .def("rope", [](PlanBuilder& b, const std::vector<std::pair<int, int>>& targets, std::int64_t head_dim,
                      int table) { b.plan.instructions.push_back(rope_of(targets, head_dim, table)); })
      .def("kv_store", [](PlanBuilder& b, int k, int v,
                          std::int64_t layer) { b.plan.instructions.push_back(KVStoreOp{k, v, layer}); })
      .def("rope_store",
           [](PlanBuilder& b, const std::vector<std::pair<int, int>>& targets, std::int64_t head_dim, int table, int k,
              int v, std::int64_t layer) {
             b.plan.instructions.push_back(RopeStoreOp{rope_of(targets, head_dim, table), {k, v, layer}});
           })
      .def("attention",
           [](PlanBuilder& b, int q, int dst, std::int64_t layer, std::int64_t heads, float scale, std::int64_t window,
              float soft_cap) {
             b.plan.instructions.push_back(AttentionOp{q, dst, layer, heads, window, scale, soft_cap});
           })
      .def("add", [](PlanBuilder& b, int x, int y, int dst) { b.plan.instructions.push_back(AddOp{x, y, dst}); })
      .def("silu_mul",
           [](PlanBuilder& b, int gate, int up, int dst) { b.plan.instructions.push_back(SiluMulOp{gate, up, dst}); })
      .def("select", [](PlanBuilder& b, int src, int dst) { b.plan.instructions.push_back(SelectOp{src, dst}); })
      .def("logits", [](PlanBuilder& b, int buffer) { b.plan.logits = buffer; });

  nb::class_<NativeExecutor>(m, "Executor")
      .def(
          "__init__",
          [](NativeExecutor* self, const PlanBuilder& b, std::int64_t layers, std::int64_t kv_heads,
             std::int64_t head_dim, const std::string& kv_dtype, std::int64_t num_blocks, std::int64_t max_rows,
             int threads, bool cascade, const std::string& kernels) {
            ExecutorOptions options;
            options.kv = {layers, kv_heads, head_dim, kv_type_of(kv_dtype)};
            options.num_blocks = num_blocks;
            options.max_rows = max_rows;
            options.threads = threads;
            options.cascade = cascade;
            options.kernels = find_kernels(kernels);
            if (options.kernels == nullptr)
              throw nb::value_error(("no kernels named " + kernels + " for this CPU").c_str());
            std::string error;
            std::unique_ptr<Executor> executor = Executor::make(b.plan, options, error);
            if (executor == nullptr) throw nb::value_error(error.c_str());
            const std::int64_t vocab = executor->vocab();
            new (self) NativeExecutor{std::move(executor), b.weights, vocab, options.kernels->name, {}};
          },
          nb::arg("plan"), nb::kw_only(), nb::arg("layers"), nb::arg("kv_heads"), nb::arg("head_dim"),
          nb::arg("kv_dtype"), nb::arg("num_blocks"), nb::arg("max_rows"), nb::arg("threads"), nb::arg("cascade"),
          nb::arg("kernels"))
      .def("step", &step, nb::arg("token_ids").noconvert(), nb::arg("positions").noconvert(),
           nb::arg("sequence_rows").noconvert(), nb::arg("block_tables").noconvert(),
           nb::arg("block_offsets").noconvert(), nb::arg("logit_rows").noconvert(), nb::arg("block_ops").noconvert(),
           nb::arg("sampling"), nb::arg("want_logits") = false)
      .def_prop_ro("kernels", [](const NativeExecutor& self) { return self.kernels; })
      .def("export_block", &export_block)
      .def("import_block", &import_block)
      .def("close", &close_executor);

  m.def(
      "rope_frequencies",
      [](double theta, int rotary_dim) {
        if (rotary_dim < 0 || rotary_dim > 1 << 20) throw nb::value_error("rotary_dim: 0 to 2^20");
        return rope_frequencies(theta, rotary_dim);
      },
      "theta ** (-2i / rotary_dim) for i in 0 .. rotary_dim / 2 - 1, by our own pow");
}
