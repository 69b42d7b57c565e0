// What the hardware can do at most with a kernel table's instructions: the roofline that kernels are held against.
// Each instruction set's loops are in a file of their own, compiled with its kernels' flags.
#pragma once
#include <cstdint>

#include "simd/kernels.h"
#include "team.h"

namespace octavo {

struct CeilingLoops {  // of one thread
  // Multiply-adds in registers, on the shortest sequence of instructions that the linear kernels could use: returns how
  // many `rounds` rounds made.
  std::int64_t (*integer)(std::int64_t rounds);
  std::int64_t (*floats)(std::int64_t rounds);
  // Reads the bytes once, as `streams` (1 or 4) equal parts side by side. bytes: a multiple of 256 * streams.
  void (*read)(const std::byte* data, std::int64_t bytes, int streams);
};

const CeilingLoops& scalar_ceilings();
// x86-64 builds only; to be called only when cpu_features() has avx2, avx512_vnni, amx_int8.
const CeilingLoops& avx2_ceilings();
const CeilingLoops& avx512_ceilings();
const CeilingLoops& amx_ceilings();

// Runs the loops on a thread team like the executor's.
class Ceilings {
 public:
  // buffer_bytes: what `read` reads, rounded down to whole parts; memory is taken at its first call.
  Ceilings(int threads, const Kernels& kernels, std::int64_t buffer_bytes);

  // Multiply-adds a second, all threads together, over one pass of `rounds` rounds a thread.
  double integer(std::int64_t rounds);
  double floats(std::int64_t rounds);
  // Bytes a second, each thread reading its own part of the buffer once; 0 when the system refuses the buffer.
  double read(int streams);

 private:
  template <class Pass>
  double seconds(Pass pass);

  Team team_;
  const CeilingLoops& loops_;
  std::int64_t part_bytes_;
  AlignedBytes buffer_;
};

}  // namespace octavo
