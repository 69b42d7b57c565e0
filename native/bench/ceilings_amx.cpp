// AMX's ceilings. Integer: tdpbssd, 16 rows times 16 outputs over 64 inputs in one instruction. The rest is AVX-512's.
#include "bench/ceilings.h"

namespace octavo {
namespace {

struct alignas(64) FullTiles {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16};
};

// Tiles 0 to 3 take sums, enough to hide the latency; 4 and 5 are multiplied. Our own assembly, as in the kernels.
std::int64_t integer(std::int64_t rounds) {
  static constexpr std::int64_t kRoundsAtOnce = 64;  // one of the others' rounds is much less work
  const FullTiles shapes;
  __asm__ volatile("ldtilecfg %0\n\ttilezero %%tmm4\n\ttilezero %%tmm5" : : "m"(shapes));
  __asm__ volatile("tilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\ttilezero %%tmm3" : :);
  const std::int64_t passes = (rounds + kRoundsAtOnce - 1) / kRoundsAtOnce;
  for (std::int64_t i = 0; i < passes; ++i) {
    __asm__ volatile(
        "tdpbssd %%tmm5, %%tmm4, %%tmm0\n\ttdpbssd %%tmm5, %%tmm4, %%tmm1\n\t"
        "tdpbssd %%tmm5, %%tmm4, %%tmm2\n\ttdpbssd %%tmm5, %%tmm4, %%tmm3"
        :
        :);
  }
  __asm__ volatile("tilerelease" : :);
  return passes * 4 * 16 * 16 * 64;
}

}  // namespace

const CeilingLoops& amx_ceilings() {
  static const CeilingLoops loops{integer, avx512_ceilings().floats, avx512_ceilings().read};
  return loops;
}

}  // namespace octavo
