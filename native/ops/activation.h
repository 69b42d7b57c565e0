// Element by element: Kernels::silu_mul, add and all_finite in simd/kernels.h.
//   silu(x) = x / (1 + exp_(-x)), written once an instruction set: silu_ in simd/math_scalar.h and simd/math_avx2.h
//   silu_mul  y = silu(gate) * up; y may be gate or up
#pragma once
