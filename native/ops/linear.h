// Linear: y[r][o] = epilogue(sum over k of x[r][k] * w[o][k]).
//
// Canonical order (this file's scalar twin is the specification):
//   quantised weights, x quantised in groups of 32 (see quantize): for each group g in increasing order
//       acc = fma(float(dot_g), scale[o][g] * d[r][g], acc)        dot_g: exact integer dot product of the group
//       acc = fma(min[o][g], s[r][g], acc)                          q4 and q4f only
//   float weights: for each k in increasing order  acc = fma(float(w[o][k]), x[r][k], acc)
//   acc starts at +0; then  acc = acc + bias[o]  if there is a bias; then the epilogue:
//   Store    y[r][o] = acc
//   Add      y[r][o] = residual[r][o] + acc                         (residual may be y itself)
//   SiluMul  w holds gate and up rows interleaved 8 + 8 in each panel (outputs 16p..16p+7 gate, 16p+8..16p+15 up):
//            y[r][8p+j] = silu(acc of gate j) * acc of up j          (y has n/2 columns; silu_ of simd/math_scalar.h)
#pragma once
#include "formats/weight.h"

namespace octavo {

// quantize, for each group of 32 inputs (the last padded with zeros), amax = max |x|:
//   a NaN or infinity in the group: d = s = NaN, q = 0;  amax < kTinyGroup: d = s = 0, q = 0;  else
//   d = amax / 127,  q = x * (127 / amax) rounded to nearest even,  s = d * float(sum of q)
inline constexpr float kTinyGroup = 1e-30f;  // 127 / amax must not overflow

enum class Epilogue : std::uint8_t { Store, Add, SiluMul };

struct LinearJob {
  const Weight* w = nullptr;
  const QBlock* xq = nullptr;  // [rows][w->blocks()], for quantised formats
  const float* x = nullptr;    // [rows][x_stride], for float formats
  std::int64_t x_stride = 0;   // floats between rows
  std::int64_t rows = 0;
  const float* bias = nullptr;  // [n], padded with zeros to a multiple of 16, or null
  Epilogue epilogue = Epilogue::Store;
  const float* residual = nullptr;  // [rows][y_stride], for Add
  float* y = nullptr;               // [rows][y_stride]; columns past n are not written
  std::int64_t y_stride = 0;
};

}  // namespace octavo
