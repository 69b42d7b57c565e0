#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
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
using octavo::python::Buffer;
using octavo::python::list_of;
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

// The arrays of a Batch, held for as long as the view is used.
struct BatchArrays {
  Buffer<std::int32_t> token_ids;
  Buffer<std::int64_t> positions;
  Buffer<std::int32_t> sequence_rows, block_tables, block_offsets, logit_rows, block_ops;

  BatchView view() const {
    if (positions.size() != token_ids.size()) throw nb::value_error("positions: one is needed for each token id");
    if (sequence_rows.size() < 2 || block_offsets.size() != sequence_rows.size())
      throw nb::value_error("sequence_rows and block_offsets: one more entry than sequences is needed");
    if (block_ops.size(1) != 3) throw nb::value_error("block_ops: rows of (dst, src, tokens) are needed");
    BatchView b;
    b.token_ids = token_ids.data();
    b.positions = positions.data();
    b.rows = token_ids.size();
    b.sequence_rows = sequence_rows.data();
    b.block_offsets = block_offsets.data();
    b.sequences = sequence_rows.size() - 1;
    b.block_tables = block_tables.data();
    b.block_table_size = block_tables.size();
    b.logit_rows = logit_rows.data();
    b.logit_row_count = logit_rows.size();
    b.block_ops = block_ops.data();
    b.block_op_count = block_ops.size();
    return b;
  }
};

nb::object bytes_of(const std::vector<std::uint8_t>& flags) {
  return nb::bytes(reinterpret_cast<const char*>(flags.data()), flags.size());
}

// One step. Takes the fields of a Batch and of a SamplingRows; returns those of a StepResult, then the logits if
// wanted.
nb::tuple step(NativeExecutor& self, nb::handle token_ids, nb::handle positions, nb::handle sequence_rows,
               nb::handle block_tables, nb::handle block_offsets, nb::handle logit_rows, nb::handle block_ops,
               nb::handle scalars, nb::handle position, nb::handle edits, bool want_logits) {
  const BatchArrays lent{{token_ids, "token_ids"},         {positions, "positions"},
                         {sequence_rows, "sequence_rows"}, {block_tables, "block_tables"},
                         {block_offsets, "block_offsets"}, {logit_rows, "logit_rows"},
                         {block_ops, "block_ops", 2}};
  const BatchView batch = lent.view();
  const python::SamplingArrays arrays(scalars, position, edits, batch.logit_row_count, self.vocab);
  const SamplingView& view = arrays.view();
  if (const std::string problem = validate(view); !problem.empty()) throw nb::value_error(problem.c_str());

  const auto count = static_cast<std::size_t>(batch.logit_row_count);
  const auto top = static_cast<std::size_t>(max_logprobs(view));
  std::vector<SampleResult> results(count);
  std::vector<std::int32_t> top_ids(count * top);
  std::vector<float> top_logprobs(count * top);
  for (std::size_t r = 0; r < count; ++r) {
    results[r].top_ids = top_ids.data() + r * top;
    results[r].top_logprobs = top_logprobs.data() + r * top;
  }
  std::vector<std::uint8_t> finite(static_cast<std::size_t>(batch.rows));
  float* logits = nullptr;
  nb::object logits_array;
  if (want_logits) logits_array = owned_array({count, static_cast<std::size_t>(self.vocab)}, logits);
  self.in_turn([&](Executor& executor) {
    std::string problem = executor.check(batch);
    if (problem.empty()) executor.step(batch, view, {results.data(), finite.data(), logits});
    return problem;
  });

  std::vector<std::uint8_t> ok(count);
  for (std::size_t r = 0; r < count; ++r) ok[r] = results[r].ok ? 1 : 0;
  const auto result = [&](std::int64_t r) -> const SampleResult& { return results[static_cast<std::size_t>(r)]; };
  const auto each_row = [&](auto make) { return list_of(batch.logit_row_count, make); };
  const auto each_best = [&](auto make) {  // lists in a list
    return each_row([&, make](std::int64_t r) {
      return list_of(std::max(view.num_logprobs[r], 0), [&](std::int64_t i) { return make(result(r), i); })
          .release()
          .ptr();
    });
  };
  const nb::tuple fields = nb::make_tuple(
      each_row([&](std::int64_t r) { return PyLong_FromLong(result(r).ok ? result(r).id : -1); }),
      each_row([&](std::int64_t r) { return PyFloat_FromDouble(result(r).logprob); }),
      each_row([&](std::int64_t r) { return PyLong_FromLong(result(r).rank); }),
      each_best([](const SampleResult& row, std::int64_t i) { return PyLong_FromLong(row.top_ids[i]); }),
      each_best([](const SampleResult& row, std::int64_t i) { return PyFloat_FromDouble(row.top_logprobs[i]); }),
      bytes_of(ok), bytes_of(finite));
  return want_logits ? nb::tuple(fields + nb::make_tuple(logits_array)) : fields;
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
      .def("step", &step, nb::arg("token_ids"), nb::arg("positions"), nb::arg("sequence_rows"), nb::arg("block_tables"),
           nb::arg("block_offsets"), nb::arg("logit_rows"), nb::arg("block_ops"), nb::arg("scalars"),
           nb::arg("position"), nb::arg("edits").none(), nb::arg("want_logits"))
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
