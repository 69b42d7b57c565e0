// AVX-512's ceilings. Integer: vpdpbusd, 64 multiply-adds of bytes in one instruction.
#include <immintrin.h>

#include "bench/ceilings.h"

namespace octavo {
namespace {

constexpr int kChains = 16;  // enough to hide the latency of two units

// An operand the compiler knows nothing of: what is computed with it stays in the loop.
template <class Vector>
inline void make_opaque(Vector& v) {
  __asm__ volatile("" : "+v"(v));
}

std::int64_t integer(std::int64_t rounds) {
  __m512i acc[kChains], w = _mm512_set1_epi8(3), x = _mm512_set1_epi8(-5);
#pragma GCC unroll 16
  for (int c = 0; c < kChains; ++c) acc[c] = _mm512_setzero_si512();
  for (std::int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int c = 0; c < kChains; ++c) {
      acc[c] = _mm512_dpbusd_epi32(acc[c], w, x);
      make_opaque(acc[c]);
    }
  }
  return rounds * kChains * 64;
}

std::int64_t floats(std::int64_t rounds) {
  __m512 acc[kChains], w = _mm512_set1_ps(0.5f), x = _mm512_set1_ps(0.25f);
#pragma GCC unroll 16
  for (int c = 0; c < kChains; ++c) acc[c] = _mm512_setzero_ps();
  for (std::int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int c = 0; c < kChains; ++c) {
      acc[c] = _mm512_fmadd_ps(w, x, acc[c]);
      make_opaque(acc[c]);
    }
  }
  return rounds * kChains * 16;
}

template <int Streams>
void read_streams(const std::byte* data, std::int64_t bytes) {
  const std::int64_t part = bytes / Streams;
  __m512i seen[Streams];
#pragma GCC unroll 4
  for (int s = 0; s < Streams; ++s) seen[s] = _mm512_setzero_si512();
  for (std::int64_t at = 0; at < part; at += 256) {
#pragma GCC unroll 4
    for (int s = 0; s < Streams; ++s) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        seen[s] = _mm512_or_si512(seen[s], _mm512_load_si512(data + s * part + at + 64 * i));
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

const CeilingLoops& avx512_ceilings() {
  static constexpr CeilingLoops loops{integer, floats, read};
  return loops;
}

}  // namespace octavo
