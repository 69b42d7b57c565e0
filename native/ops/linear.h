// Linear: y[r][o] = epilogue(sum over k of x[r][k] * w[o][k]).
//
// Canonical order (this file's scalar twin is the specification):
//   quantised weights, x quantised in blocks of 64 (see quantize): for each block b in increasing order
//       acc = fma(float(dot), scale[o][b] * scale[r][b], acc)
//     dot: the exact integer dot product of the block, of x's q and the weights' q (q8) or multiplier * q + offset
//     (q4); at most 64 * 128 * 127 = 1,040,384, so float(dot) is exact
//   float weights: for each k in increasing order  acc = fma(float(w[o][k]), x[r][k], acc)
//   acc starts at +0; then  acc = acc + bias[o]  if there is a bias; then the epilogue:
//   Store    y[r][o] = acc
//   Add      y[r][o] = residual[r][o] + acc                         (residual may be y itself)
//   SiluMul  w holds gate and up rows interleaved 8 + 8 in each panel (outputs 16p..16p+7 gate, 16p+8..16p+15 up):
//            y[r][8p+j] = silu(acc of gate j) * acc of up j          (y has n/2 columns; silu_ of simd/math_scalar.h)
#pragma once
#include "formats/weight.h"

namespace octavo {

// quantize, for each block of 64 inputs (the last padded with zeros), amax = max |x|:
//   a NaN or infinity in the block: scale = NaN, q = 0;  amax < kTinyBlock: scale = 0, q = 0;  else
//   scale = amax / 127,  q = x * (127 / amax) rounded to nearest even
inline constexpr float kTinyBlock = 1e-30f;  // 127 / amax must not overflow

enum class Epilogue : std::uint8_t { Store, Add, SiluMul };

struct LinearJob {
  const Weight* w = nullptr;
  const std::byte* xq = nullptr;  // [rows] QRow, for quantised formats
  const float* x = nullptr;       // [rows][x_stride], for float formats
  std::int64_t x_stride = 0;      // floats between rows
  std::int64_t rows = 0;
  const float* bias = nullptr;  // [n], padded with zeros to a multiple of 16, or null
  Epilogue epilogue = Epilogue::Store;
  const float* residual = nullptr;  // [rows][y_stride], for Add
  float* y = nullptr;               // [rows][y_stride]; columns past n are not written
  std::int64_t y_stride = 0;
  std::byte* scratch = nullptr;  // of this thread: linear_scratch_bytes(*w), at a whole line

  QRow<const std::byte> row(std::int64_t r) const { return {xq + r * q_row_bytes(w->blocks()), w->blocks()}; }
};

// Room for a panel's weights as int8, for kernels that unpack it once for many rows.
inline std::int64_t linear_scratch_bytes(const Weight& w) { return w.blocks() * kBlock * kPanel; }

}  // namespace octavo
