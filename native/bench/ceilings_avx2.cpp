// AVX2's ceilings. Integer: vpmaddubsw + vpaddw, 32 multiply-adds of bytes in two instructions.
#include <immintrin.h>

#include "bench/ceilings.h"

namespace octavo {
namespace {

constexpr int kIntegerChains = 8, kFloatChains = 12;  // enough to hide the latency, few enough for 16 registers

// An operand the compiler knows nothing of: what is computed with it stays in the loop.
template <class Vector>
inline void make_opaque(Vector& v) {
  __asm__ volatile("" : "+x"(v));
}

std::int64_t integer(std::int64_t rounds) {
  __m256i acc[kIntegerChains], w = _mm256_set1_epi8(3), x = _mm256_set1_epi8(-5);
#pragma GCC unroll 16
  for (int c = 0; c < kIntegerChains; ++c) acc[c] = _mm256_setzero_si256();
  for (std::int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int c = 0; c < kIntegerChains; ++c) {
      make_opaque(x);
      acc[c] = _mm256_add_epi16(acc[c], _mm256_maddubs_epi16(w, x));
      make_opaque(acc[c]);
    }
  }
  return rounds * kIntegerChains * 32;
}

std::int64_t floats(std::int64_t rounds) {
  __m256 acc[kFloatChains], w = _mm256_set1_ps(0.5f), x = _mm256_set1_ps(0.25f);
#pragma GCC unroll 16
  for (int c = 0; c < kFloatChains; ++c) acc[c] = _mm256_setzero_ps();
  for (std::int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int c = 0; c < kFloatChains; ++c) {
      acc[c] = _mm256_fmadd_ps(w, x, acc[c]);
      make_opaque(acc[c]);
    }
  }
  return rounds * kFloatChains * 8;
}

template <int Streams>
void read_streams(const std::byte* data, std::int64_t bytes) {
  const std::int64_t part = bytes / Streams;
  __m256i seen[Streams];
#pragma GCC unroll 4
  for (int s = 0; s < Streams; ++s) seen[s] = _mm256_setzero_si256();
  for (std::int64_t at = 0; at < part; at += 256) {
#pragma GCC unroll 4
    for (int s = 0; s < Streams; ++s) {
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        const auto* p = reinterpret_cast<const __m256i*>(data + s * part + at + 32 * i);
        seen[s] = _mm256_or_si256(seen[s], _mm256_load_si256(p));
      }
    }
  }
#pragma GCC unroll 4
  for (int s = 0; s < Streams; ++s) make_opaque(seen[s]);
}

void read(const std::byte* data, std::int64_t bytes, int streams) {
  if (streams == 1) {
    read_streams<1>(data, bytes);
  } else {
    read_streams<4>(data, bytes);
  }
}

}  // namespace

const CeilingLoops& avx2_ceilings() {
  static constexpr CeilingLoops loops{integer, floats, read};
  return loops;
}

}  // namespace octavo
