// The ceilings of plain C++, as far as the compiler takes it: the scalar kernels are a specification, not fast code.
#include "bench/ceilings.h"
#include "simd/math_scalar.h"

namespace octavo {
namespace {

constexpr int kChains = 8;

// The compiler may not assume what it knew of the memory at p.
void forget(void* p) { __asm__ volatile("" : : "r"(p) : "memory"); }

std::int64_t integer(std::int64_t rounds) {
  constexpr int kValues = 256;
  std::int16_t w[kValues], x[kValues];
  for (int i = 0; i < kValues; ++i) w[i] = x[i] = static_cast<std::int16_t>(i);
  for (std::int64_t round = 0; round < rounds; ++round) {
    std::int32_t sum[4] = {};
    forget(w);
    for (int part = 0; part < 4; ++part) {
      for (int i = 0; i < kValues / 4; ++i) sum[part] += std::int32_t{w[part * 64 + i]} * x[part * 64 + i];
    }
    forget(sum);
  }
  return rounds * kValues;
}

std::int64_t floats(std::int64_t rounds) {
  float acc[kChains] = {}, w[kChains], x = 0.5f;
  for (int c = 0; c < kChains; ++c) w[c] = static_cast<float>(c);
  for (std::int64_t round = 0; round < rounds; ++round) {
    forget(&x);
    for (int c = 0; c < kChains; ++c) acc[c] = scalar::fma_(w[c], x, acc[c]);
  }
  forget(acc);
  return rounds * kChains;
}

void read(const std::byte* data, std::int64_t bytes, int streams) {
  const std::int64_t part = bytes / streams;
  std::uint64_t seen[4] = {};
  for (std::int64_t at = 0; at < part; at += 64) {
    for (int s = 0; s < streams; ++s) {
      const auto* words = reinterpret_cast<const std::uint64_t*>(data + s * part + at);
      for (int i = 0; i < 8; ++i) seen[s] |= words[i];
    }
  }
  forget(seen);
}

}  // namespace

const CeilingLoops& scalar_ceilings() {
  static constexpr CeilingLoops loops{integer, floats, read};
  return loops;
}

}  // namespace octavo
