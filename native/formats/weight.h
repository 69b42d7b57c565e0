// Packed weights: one matrix [n outputs][k inputs], held once, in the layout every kernel reads.
//
// A panel is 16 outputs (the last panel is padded with zero weights). Along k a panel is cut in blocks of 32 (the last
// block is padded with zeros; float formats have no blocks and no padding along k). Per block, contiguous:
//   q4   320 bytes  256 bytes of nibbles, fp16 scale[16], fp16 min[16]      w = scale * q + min,  q in 0..15
//   q4f  384 bytes  256 bytes of nibbles, f32 scale[16], f32 min[16]        the same, for Q4_K whose scales are no fp16
//   q8   544 bytes  512 bytes of int8, fp16 scale[16]                       w = scale * q,        q in -127..127
//                                                                           (-128 may come from a file and is exact)
// Nibbles of q4/q4f: for v in 0..3: 64 bytes; dword o is output o; its byte i holds k = 8v+i in the low nibble and
// k = 8v+4+i in the high one. q8: for s in 0..7: 64 bytes; dword o holds k = 4s..4s+3 of output o. Float formats: for
// each k, 16 values, one an output.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

namespace octavo {

enum class Format : std::uint8_t { F32, F16, BF16, Q8, Q4, Q4F };

inline constexpr std::int64_t kPanel = 16;  // outputs in a panel
inline constexpr std::int64_t kGroup = 32;  // inputs in a quantisation group

constexpr bool is_quantised(Format f) { return f == Format::Q8 || f == Format::Q4 || f == Format::Q4F; }

// Bytes of one panel's block of 32 inputs (quantised) or of one input (float).
constexpr std::int64_t panel_step_bytes(Format f) {
  switch (f) {
    case Format::F32:
      return 64;
    case Format::F16:
      return 32;
    case Format::BF16:
      return 32;
    case Format::Q8:
      return 544;
    case Format::Q4:
      return 320;
    case Format::Q4F:
      return 384;
  }
  return 0;
}

struct AlignedFree {
  void operator()(std::byte* p) const;
};
using AlignedBytes = std::unique_ptr<std::byte[], AlignedFree>;
// 64-byte aligned, huge pages advised from 2 MiB on, zeroed by the kernel when first touched. Null when refused.
AlignedBytes allocate_aligned(std::size_t bytes);

struct Weight {
  Format format = Format::F32;
  std::int64_t n = 0;  // outputs
  std::int64_t k = 0;  // inputs
  AlignedBytes data;

  std::int64_t panels() const { return (n + kPanel - 1) / kPanel; }
  std::int64_t blocks() const { return (k + kGroup - 1) / kGroup; }
  std::int64_t panel_bytes() const { return (is_quantised(format) ? blocks() : k) * panel_step_bytes(format); }
  std::int64_t bytes() const { return panels() * panel_bytes(); }
  const std::byte* panel(std::int64_t p) const { return data.get() + p * panel_bytes(); }
  std::byte* panel(std::int64_t p) { return data.get() + p * panel_bytes(); }
};

// Activations of one group of 32 inputs, quantised: x ~ d * q, s = d * sum(q). A row is blocks() of these, contiguous.
// One cache line each: what loads many rows' q at once would else pay for those that lie across two.
struct alignas(64) QBlock {
  std::int8_t q[kGroup];
  float d;
  float s;
  std::int32_t offset;  // -128 * sum(q): kernels that read a signed weight w as the unsigned w + 128 add it
};
static_assert(sizeof(QBlock) == 64);

}  // namespace octavo
