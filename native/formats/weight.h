// Packed weights: one matrix [n outputs][k inputs], held once, in the layout every kernel reads.
//
// A panel is 16 outputs (the last panel is padded with zero weights). Quantised formats cut it along k in blocks of 64
// inputs (the last is padded with zeros) that share a scale. In q4 a weight is also cut in groups of 32 inputs that
// share a small integer multiplier and offset, so that a whole block's dot product is one exact integer:
//   q4   w = scale * (multiplier * q + offset),  q in 0..15, multiplier in 0..17, multiplier * q + offset in -128..127
//   q8   w = scale * q,                          q in -128..127
// A panel is its blocks, contiguous. A block is whole lines of 64 bytes, first its quants, then its terms:
//   q4   640 bytes    512 of nibbles; uint8 multiplier[2 groups][16], int8 offset[2][16], fp16 scale[16], 32 unused
//   q8   1,088 bytes  1,024 of int8; fp16 scale[16], 32 unused
// Nibbles: for v in 0..7: 64 bytes; dword o is output o; its byte i holds k = 8v+i in the low nibble and k = 8v+4+i in
// the high one. q8: for s in 0..15: 64 bytes; dword o holds k = 4s..4s+3 of output o.
// Float formats have neither blocks nor padding along k: for each k, 16 values, one an output.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>

namespace octavo {

enum class Format : std::uint8_t { F32, F16, BF16, Q8, Q4 };

inline constexpr std::int64_t kPanel = 16;  // outputs in a panel
inline constexpr std::int64_t kGroup = 32;  // inputs that share a multiplier and an offset (and a scale, in files)
inline constexpr std::int64_t kBlock = 64;  // inputs that share a scale, in weights and in activations

constexpr bool is_quantised(Format f) { return f == Format::Q8 || f == Format::Q4; }

// Bytes of a panel's block, quantised formats: of its quants, of all of it.
constexpr std::int64_t quants_bytes(Format f) { return f == Format::Q4 ? 512 : 1024; }
constexpr std::int64_t block_bytes(Format f) { return quants_bytes(f) + (f == Format::Q4 ? 128 : 64); }
inline constexpr std::int64_t kOffsetsAt = 32, kQ4ScalesAt = 64;  // in the terms of a q4 block

// Bytes of a panel's 16 values at one input, float formats.
constexpr std::int64_t step_bytes(Format f) { return f == Format::F32 ? 64 : 32; }

constexpr std::int64_t whole_lines(std::int64_t bytes) { return (bytes + 63) / 64 * 64; }

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
  std::int64_t blocks() const { return (k + kBlock - 1) / kBlock; }
  std::int64_t panel_bytes() const {
    if (!is_quantised(format)) return k * step_bytes(format);
    return blocks() * block_bytes(format);
  }
  std::int64_t bytes() const { return panels() * panel_bytes(); }
  const std::byte* panel(std::int64_t p) const { return data.get() + p * panel_bytes(); }
  std::byte* panel(std::int64_t p) { return data.get() + p * panel_bytes(); }
};

// A row of k activations quantised in blocks of 64, the last padded with zeros: x ~ scale * q. Rows are contiguous,
// each of q_row_bytes: the q of all blocks, then their scales, sums and corrections.
struct QBlockSums {
  std::int16_t of_group[2];  // sum(q) of the block's groups of 32
};

constexpr std::int64_t q_row_bytes(std::int64_t blocks) { return whole_lines(blocks * (kBlock + 12)); }

template <class Byte>  // std::byte or const std::byte
struct QRow {
  Byte* at;
  std::int64_t blocks;

  auto q() const { return cast<std::int8_t>(0); }               // [64 * blocks]
  auto scales() const { return cast<float>(kBlock * blocks); }  // [blocks]
  auto sums() const { return cast<QBlockSums>((kBlock + 4) * blocks); }
  // -128 * sum(q): kernels that read a signed weight w as the unsigned w + 128 add it.
  auto corrections() const { return cast<std::int32_t>((kBlock + 8) * blocks); }

 private:
  template <class T>
  auto cast(std::int64_t offset) const {
    using To = std::conditional_t<std::is_const_v<Byte>, const T, T>;
    return reinterpret_cast<To*>(at + offset);
  }
};

}  // namespace octavo
