// RMSNorm of one row: y[i] = (x[i] * r) * weight[i], r = 1 / sqrt(mean + eps), mean = (sum of x[i]^2) / float(n).
//
// Canonical order: 16 partial sums, s[i mod 16] = fma(x[i], x[i], s[i mod 16]) for i in increasing order, from +0;
// then the tree s[i] += s[i+8] (i < 8), s[i] += s[i+4] (i < 4), s[i] += s[i+2] (i < 2), s[0] + s[1].
//
// Kernels::rms_norm in simd/kernels.h; norm_scalar.cpp is the specification.
#pragma once
