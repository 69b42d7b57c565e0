// The functions behind the kernel tables; each is defined in the ops file of its subject. Callers use the tables.
#pragma once
#include "simd/kernels.h"

#define OCTAVO_DECLARE_KERNELS                                                                               \
  void quantize(const float* x, std::int64_t k, std::byte* out);                                             \
  void linear(const LinearJob& job, std::int64_t panel_begin, std::int64_t panel_end);                       \
  void unpack_row(const Weight& w, std::int64_t row, float* out);                                            \
  void rms_norm(const float* x, const float* weight, std::int64_t n, float eps, float* y);                   \
  void silu_mul(const float* gate, const float* up, std::int64_t n, float* y);                               \
  void add(const float* a, const float* b, std::int64_t n, float* y);                                        \
  bool all_finite(const float* x, std::int64_t n);                                                           \
  void rope(float* x, std::int64_t heads, std::int64_t head_dim, std::int64_t rotary_dim, const float* cos,  \
            const float* sin);                                                                               \
  void kv_store(const KVStoreJob& job, std::int64_t sequence, std::int64_t row_begin, std::int64_t row_end); \
  void attention(const AttentionJob& job, const AttentionItem& item, AttentionScratch& scratch);             \
  void attention_merge(const AttentionJob& job, const AttentionPlan& plan, std::int64_t row_begin,           \
                       std::int64_t row_end);                                                                \
  void sample_row(const SampleRow& row, SampleScratch& scratch, SampleResult& result);

namespace octavo::scalar {
OCTAVO_DECLARE_KERNELS
}
namespace octavo::avx2 {
OCTAVO_DECLARE_KERNELS
}
// Those that wider registers or tiles make faster; the rest of these tables is AVX2's.
namespace octavo::avx512 {
void linear(const LinearJob& job, std::int64_t panel_begin, std::int64_t panel_end);
void attention(const AttentionJob& job, const AttentionItem& item, AttentionScratch& scratch);
}  // namespace octavo::avx512
namespace octavo::amx {
void linear(const LinearJob& job, std::int64_t panel_begin, std::int64_t panel_end);
}

#undef OCTAVO_DECLARE_KERNELS
