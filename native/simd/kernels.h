// The kernel table: every inner loop, for one instruction set. `scalar` is the specification and runs on any CPU;
// the others match it bit for bit. One table is chosen when an executor is made (by name or the best the CPU has).
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "ops/attention.h"
#include "ops/linear.h"
#include "ops/sample.h"

namespace octavo {

struct Kernels {
  const char* name;

  // ops/linear.h
  void (*quantize)(const float* x, std::int64_t k, std::byte* out);  // one row, to a QRow of ceil(k / 64) blocks
  void (*linear)(const LinearJob& job, std::int64_t panel_begin, std::int64_t panel_end);
  void (*unpack_row)(const Weight& w, std::int64_t row, float* out);  // w[row][0..k), the embedding look-up

  // ops/norm.h
  void (*rms_norm)(const float* x, const float* weight, std::int64_t n, float eps, float* y);  // one row; y may be x

  // ops/activation.h
  void (*silu_mul)(const float* gate, const float* up, std::int64_t n, float* y);
  void (*add)(const float* a, const float* b, std::int64_t n, float* y);  // y may be a or b
  bool (*all_finite)(const float* x, std::int64_t n);

  // ops/rope.h: one row of `heads` heads, in place; cos and sin have rotary_dim / 2 entries
  void (*rope)(float* x, std::int64_t heads, std::int64_t head_dim, std::int64_t rotary_dim, const float* cos,
               const float* sin);

  // ops/attention.h
  void (*kv_store)(const KVStoreJob& job, std::int64_t sequence, std::int64_t row_begin, std::int64_t row_end);
  void (*attention)(const AttentionJob& job, const AttentionItem& item, AttentionScratch& scratch);
  void (*attention_merge)(const AttentionJob& job, const AttentionPlan& plan, std::int64_t row_begin,
                          std::int64_t row_end);

  // ops/sample.h
  void (*sample_row)(const SampleRow& row, SampleScratch& scratch, SampleResult& result);
};

const Kernels& scalar_kernels();
// x86-64 builds only; to be called only when cpu_features() has avx2, avx512_vnni, amx_int8.
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& amx_kernels();

struct CpuFeatures {
  bool avx2 = false;  // AVX2 + FMA + F16C, and the operating system saves the registers
  bool avx512 = false, avx512_vnni = false;
  bool amx_int8 = false;  // with avx512_vnni, and the operating system grants this process the tile registers
  bool avx_vnni = false;  // reported; no kernels use it
};
CpuFeatures cpu_features();

std::vector<std::string> kernel_names();               // the tables this CPU can run, best last
const Kernels* find_kernels(const std::string& name);  // "auto" for the best; null when unknown or not runnable here

// Adds a table that lives as long as the process (tests plant faults so). Call before any executor is made.
void register_kernels(const Kernels* table);

}  // namespace octavo
