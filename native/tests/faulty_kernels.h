// Kernel tables with one planted fault each: the exactness suite must fail on every one of them (tests/exact), and the
// speed guard on the slow one.
// Compiled into development builds only.
#pragma once

namespace octavo {

// Makes them known to find_kernels: faulty-linear-order, faulty-segment-merge, faulty-norm-sums,
// faulty-log-sum-exp, faulty-randomness, faulty-slow.
void register_faulty_kernels();

}  // namespace octavo
