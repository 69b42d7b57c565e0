// What the CPU can do and the operating system lets it: CPUID says which instructions exist, XCR0 which registers are
// saved on a context switch.
#include "simd/kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace octavo {

#if defined(__x86_64__)
namespace {

constexpr bool has(std::uint64_t word, std::uint64_t bits) { return (word & bits) == bits; }
constexpr std::uint64_t bit(int i) { return std::uint64_t{1} << i; }

std::uint64_t xcr0() {
  std::uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<std::uint64_t>(high) << 32 | low;
}

// Linux saves tile registers only for a process that has asked for them (ARCH_REQ_XCOMP_PERM of state 18).
bool tiles_granted() {
#if defined(__linux__)
  static const bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  return granted;
#else
  return false;
#endif
}

}  // namespace

CpuFeatures cpu_features() {
  CpuFeatures f;
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return f;
  const bool fma_f16c_avx = has(c, bit(12) | bit(29) | bit(28));
  if (!has(c, bit(27))) return f;  // OSXSAVE: without it, xgetbv is not allowed
  const std::uint64_t saved = xcr0();
  const bool ymm = has(saved, 0x06), zmm = has(saved, 0xe6), tiles = has(saved, bit(17) | bit(18));
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return f;
  const unsigned subleaves = a;
  f.avx2 = ymm && fma_f16c_avx && has(b, bit(5));
  f.avx512 = f.avx2 && zmm && has(b, bit(16) | bit(17) | bit(30) | bit(31));  // F, DQ, BW, VL
  f.avx512_vnni = f.avx512 && has(c, bit(11));
  f.amx_int8 = f.avx512_vnni && tiles && has(d, bit(24) | bit(25)) && tiles_granted();
  if (subleaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) f.avx_vnni = f.avx2 && has(a, bit(4));
  return f;
}
#else
CpuFeatures cpu_features() { return {}; }
#endif

}  // namespace octavo
