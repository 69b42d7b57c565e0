// Kernel tables with one planted fault each: the exactness suite must fail on every one of them (tests/exact).
// Compiled into development builds only.
#pragma once

namespace octavo {

// Makes them known to find_kernels: faulty-linear-order, faulty-segment-merge, faulty-norm-sums,
// faulty-log-sum-exp, faulty-randomness.
void register_faulty_kernels();

}  // namespace octavo
