// sin, cos, exp, log, pow in double, for tables that are computed once (rope). One code for every CPU; no libm.
#pragma once

namespace octavo::math {

// |x| <= 2^20 pi/2 (about 1.6 million; NaN beyond): absolute error under 2e-16.
double sin(double x);
double cos(double x);
// Relative error under 1e-15. exp: results under 2^-1022 are +0, over the largest double +inf. log: x <= 0 gives NaN.
double exp(double x);
double log(double x);
// base > 0 (else NaN): exp(y log(base)); relative error about (1 + |y log(base)|) 2.3e-16.
double pow(double base, double y);

}  // namespace octavo::math
