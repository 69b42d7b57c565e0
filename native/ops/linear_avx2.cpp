// linear.h for AVX2 + FMA + F16C. Lanes hold different outputs, so each output's float operations come in the
// canonical order; only the exact integer dot products are summed in an order of our own.
//
// A tile is R rows by P panels; R is 1 where P > 1. With one row the kernel waits for memory, so P panels from distant
// places are read side by side. Accumulators live in registers or, where there are too many, on the stack.
#include <immintrin.h>

#include <cstring>

#include "formats/fp16.h"
#include "simd/declarations.h"
#include "simd/math_avx2.h"

namespace octavo::avx2 {
namespace {

constexpr int kTileRows = 4;
constexpr std::uintptr_t kAheadBytes = 1024;  // how far ahead of its use a stream is fetched

static inline __m256i load_bytes(const std::byte* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
static inline __m256 load_floats(const std::byte* p) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p)); }
static inline __m256 load_halves(const std::byte* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static inline __m256i broadcast4(const std::int8_t* q) {
  std::int32_t four;
  std::memcpy(&four, q, sizeof four);
  return _mm256_set1_epi32(four);
}

// Additions that stay in their order: GCC would otherwise regroup a chain of them and run out of registers.
static inline __m256i in_order(__m256i sum) {
  __asm__("" : "+x"(sum));
  return sum;
}
static inline __m256i add16(__m256i a, __m256i b) { return in_order(_mm256_add_epi16(a, b)); }
static inline __m256i add32(__m256i a, __m256i b) { return in_order(_mm256_add_epi32(a, b)); }

// Cache lines to fetch while a tile is computed: `lines` at each step, from `at` on. An address past the weights is
// harmless to a prefetch, hence an integer rather than a pointer.
struct Ahead {
  std::uintptr_t at;
  std::int64_t lines;

  void fetch() {
    for (std::int64_t i = 0; i < lines; ++i, at += 64) _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T0);
  }
};

template <int R>
using Pair = __m256[R][2];  // [row][outputs 0..7, outputs 8..15]

// acc += one group of 32 inputs, q4 and q4f. The integer dot fits 16 bits: 32 / 2 * 15 * 127 = 30,480 at most.
template <Format F, int R>
[[gnu::always_inline]] inline void add_q4_group(const std::byte* block, const QBlock* x, std::int64_t x_stride,
                                                Pair<R>& acc) {
  const __m256i nibble = _mm256_set1_epi8(15);
  __m256i dots[R][2];
#pragma GCC unroll 4
  for (int v = 0; v < 4; ++v) {
    const __m256i both0 = load_bytes(block + 64 * v), both1 = load_bytes(block + 64 * v + 32);
    const __m256i low0 = _mm256_and_si256(both0, nibble), low1 = _mm256_and_si256(both1, nibble);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m256i q = broadcast4(x[r * x_stride].q + 8 * v);
      const __m256i dot0 = _mm256_maddubs_epi16(low0, q), dot1 = _mm256_maddubs_epi16(low1, q);
      dots[r][0] = v == 0 ? dot0 : add16(dots[r][0], dot0);
      dots[r][1] = v == 0 ? dot1 : add16(dots[r][1], dot1);
    }
    const __m256i high0 = _mm256_and_si256(_mm256_srli_epi16(both0, 4), nibble);
    const __m256i high1 = _mm256_and_si256(_mm256_srli_epi16(both1, 4), nibble);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m256i q = broadcast4(x[r * x_stride].q + 8 * v + 4);
      dots[r][0] = add16(dots[r][0], _mm256_maddubs_epi16(high0, q));
      dots[r][1] = add16(dots[r][1], _mm256_maddubs_epi16(high1, q));
    }
  }
  const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 2
  for (int c = 0; c < 2; ++c) {
    const __m256 scale = F == Format::Q4 ? load_halves(block + 256 + 16 * c) : load_floats(block + 256 + 32 * c);
    const __m256 min = F == Format::Q4 ? load_halves(block + 288 + 16 * c) : load_floats(block + 320 + 32 * c);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const QBlock& row = x[r * x_stride];
      const __m256 dot = _mm256_cvtepi32_ps(_mm256_madd_epi16(dots[r][c], ones));
      acc[r][c] = _mm256_fmadd_ps(dot, _mm256_mul_ps(scale, _mm256_set1_ps(row.d)), acc[r][c]);
      acc[r][c] = _mm256_fmadd_ps(min, _mm256_set1_ps(row.s), acc[r][c]);
    }
  }
}

// The same for q8. |w| <= 128 as an unsigned byte times x with w's sign: a pair is 2 * 128 * 127 = 32,512 at most.
template <int R>
[[gnu::always_inline]] inline void add_q8_group(const std::byte* block, const QBlock* x, std::int64_t x_stride,
                                                Pair<R>& acc) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i dots[R][2];
#pragma GCC unroll 8
  for (int s = 0; s < 8; ++s) {
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) {
      const __m256i w = load_bytes(block + 64 * s + 32 * c);
      const __m256i magnitude = _mm256_abs_epi8(w);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const __m256i q = _mm256_sign_epi8(broadcast4(x[r * x_stride].q + 4 * s), w);
        const __m256i dot = _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, q), ones);
        dots[r][c] = s == 0 ? dot : add32(dots[r][c], dot);
      }
    }
  }
#pragma GCC unroll 2
  for (int c = 0; c < 2; ++c) {
    const __m256 scale = load_halves(block + 512 + 16 * c);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m256 d = _mm256_mul_ps(scale, _mm256_set1_ps(x[r * x_stride].d));
      acc[r][c] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[r][c]), d, acc[r][c]);
    }
  }
}

template <Format F>
static inline __m256 load_weights(const std::byte* p) {  // eight outputs of a float format
  if constexpr (F == Format::F32) {
    return load_floats(p);
  } else if constexpr (F == Format::F16) {
    return load_halves(p);
  } else {
    const __m128i bf16 = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bf16), 16));
  }
}

template <Format F, int R>
[[gnu::always_inline]] inline void add_input(const std::byte* step, const float* x, std::int64_t x_stride,
                                             Pair<R>& acc) {
  const __m256 w0 = load_weights<F>(step), w1 = load_weights<F>(step + panel_step_bytes(F) / 2);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const __m256 value = _mm256_set1_ps(x[r * x_stride]);
    acc[r][0] = _mm256_fmadd_ps(w0, value, acc[r][0]);
    acc[r][1] = _mm256_fmadd_ps(w1, value, acc[r][1]);
  }
}

// y = residual + acc or acc, for the 16 or fewer outputs of a panel that exist.
static inline void store_outputs(const LinearJob& job, std::int64_t row, std::int64_t first, const __m256 (&acc)[2]) {
  const bool add = job.epilogue == Epilogue::Add;
  float* y = job.y + row * job.y_stride + first;
  const float* residual = add ? job.residual + row * job.y_stride + first : nullptr;
  if (first + kPanel <= job.w->n) {
    for (int c = 0; c < 2; ++c) {
      _mm256_storeu_ps(y + 8 * c, add ? _mm256_add_ps(_mm256_loadu_ps(residual + 8 * c), acc[c]) : acc[c]);
    }
    return;
  }
  float values[kPanel];
  for (int c = 0; c < 2; ++c) _mm256_storeu_ps(values + 8 * c, acc[c]);
  for (std::int64_t o = 0; first + o < job.w->n; ++o) y[o] = add ? residual[o] + values[o] : values[o];
}

// Not inlined, and by value: else each tile carries a copy, and accumulators whose address is taken live in memory.
[[gnu::noinline]] void finish(const LinearJob& job, std::int64_t row, std::int64_t panel, __m256 sum0, __m256 sum1) {
  __m256 acc[2] = {sum0, sum1};
  if (job.bias != nullptr) {
    for (int c = 0; c < 2; ++c) acc[c] = _mm256_add_ps(acc[c], _mm256_loadu_ps(job.bias + panel * kPanel + 8 * c));
  }
  if (job.epilogue != Epilogue::SiluMul) return store_outputs(job, row, panel * kPanel, acc);
  float values[8];
  _mm256_storeu_ps(values, _mm256_mul_ps(silu_(acc[0]), acc[1]));
  const std::int64_t first = panel * 8, count = job.w->n / 2 - first;
  const std::size_t present = static_cast<std::size_t>(count < 8 ? count : 8);
  std::memcpy(job.y + row * job.y_stride + first, values, sizeof(float) * present);
}

// Rows row .. row + R - 1 of panels panel, panel + apart, ... (P of them).
template <Format F, int R, int P>
void tile(const LinearJob& job, std::int64_t row, std::int64_t panel, std::int64_t apart, Ahead ahead) {
  const Weight& w = *job.w;
  constexpr std::int64_t kStep = panel_step_bytes(F);
  const std::byte* at = w.panel(panel);
  const std::int64_t apart_bytes = apart * w.panel_bytes();
  __m256 acc[P][R][2];
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) acc[p][r][0] = acc[p][r][1] = _mm256_setzero_ps();
  }
  const std::int64_t steps = is_quantised(F) ? w.blocks() : w.k;
  for (std::int64_t i = 0; i < steps; ++i, at += kStep) {
    if constexpr (P == 1) ahead.fetch();
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      const std::byte* step = at + p * apart_bytes;
      if constexpr (P > 1) Ahead{reinterpret_cast<std::uintptr_t>(step) + kAheadBytes, ahead.lines}.fetch();
      if constexpr (F == Format::Q8) {
        add_q8_group<R>(step, job.xq + row * steps + i, steps, acc[p]);
      } else if constexpr (is_quantised(F)) {
        add_q4_group<F, R>(step, job.xq + row * steps + i, steps, acc[p]);
      } else {
        add_input<F, R>(step, job.x + row * job.x_stride + i, job.x_stride, acc[p]);
      }
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) finish(job, row + r, panel + p * apart, acc[p][r][0], acc[p][r][1]);
  }
}

template <Format F>
void one_row(const LinearJob& job, std::int64_t panel_begin, std::int64_t panel_end) {
  constexpr int kStreams = F == Format::Q8 ? 4 : 2;
  constexpr std::int64_t kLines = (panel_step_bytes(F) + 63) / 64;
  const std::int64_t apart = (panel_end - panel_begin) / kStreams;
  for (std::int64_t p = 0; p < apart; ++p) tile<F, 1, kStreams>(job, 0, panel_begin + p, apart, {0, kLines});
  for (std::int64_t p = panel_begin + kStreams * apart; p < panel_end; ++p) tile<F, 1, 1>(job, 0, p, 0, {0, 0});
}

// What tile t of a panel's `tiles` fetches: a single one, its own panel a little ahead; else each a share of the next.
template <Format F>
Ahead ahead_of(const Weight& w, std::int64_t panel, std::int64_t t, std::int64_t tiles) {
  const auto here = reinterpret_cast<std::uintptr_t>(w.panel(panel));
  constexpr std::int64_t kLines = (panel_step_bytes(F) + 63) / 64;
  if (tiles == 1) return {here + kAheadBytes, kLines};
  const std::int64_t lines = (kLines + tiles - 1) / tiles;
  const std::int64_t start = t * lines * 64 * (is_quantised(F) ? w.blocks() : w.k);
  if (start >= w.panel_bytes()) return {0, 0};
  return {here + static_cast<std::uintptr_t>(w.panel_bytes() + start), lines};
}

template <Format F>
void many_rows(const LinearJob& job, std::int64_t panel_begin, std::int64_t panel_end) {
  const std::int64_t tiles = (job.rows + kTileRows - 1) / kTileRows;
  for (std::int64_t panel = panel_begin; panel < panel_end; ++panel) {
    for (std::int64_t t = 0; t < tiles; ++t) {
      const std::int64_t row = t * kTileRows;
      const Ahead ahead = ahead_of<F>(*job.w, panel, t, tiles);
      switch (job.rows - row) {
        case 1:
          tile<F, 1, 1>(job, row, panel, 0, ahead);
          break;
        case 2:
          tile<F, 2, 1>(job, row, panel, 0, ahead);
          break;
        case 3:
          tile<F, 3, 1>(job, row, panel, 0, ahead);
          break;
        default:
          tile<F, 4, 1>(job, row, panel, 0, ahead);
      }
    }
  }
}

template <Format F>
void linear_in(const LinearJob& job, std::int64_t panel_begin, std::int64_t panel_end) {
  if (job.rows == 1) {
    one_row<F>(job, panel_begin, panel_end);
  } else {
    many_rows<F>(job, panel_begin, panel_end);
  }
}

static inline std::int32_t sum_lanes(__m256i v) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

static inline std::uint32_t max_lanes(__m256i v) {
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  return static_cast<std::uint32_t>(_mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1))));
}

static inline void quantize_group(const float* x, QBlock& out) {
  __m256 v[4];
  __m256i largest = _mm256_setzero_si256();  // bits of |x| order like |x|, with infinity and NaN above all
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm256_loadu_ps(x + 8 * i);
    const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(v[i]), _mm256_set1_epi32(0x7fffffff));
    largest = _mm256_max_epi32(largest, magnitude);
  }
  const std::uint32_t bits = max_lanes(largest);
  const float amax = bits_float(bits);
  if (bits >= 0x7f800000u || amax < kTinyGroup) {
    out = {};
    if (bits >= 0x7f800000u) out.d = out.s = bits_float(0x7fc00000u);
    return;
  }
  const __m256 inverse = _mm256_set1_ps(127.0f / amax);
  __m256i q[4];
  for (int i = 0; i < 4; ++i) {
    q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));  // nearest even: the float environment of a step
  }
  const std::int32_t sum = sum_lanes(_mm256_add_epi32(_mm256_add_epi32(q[0], q[1]), _mm256_add_epi32(q[2], q[3])));
  out.d = amax / 127.0f;
  out.s = out.d * static_cast<float>(sum);
  out.offset = -128 * sum;
  // The packs work within 128-bit lanes; the permutation puts the groups of four back in order.
  const __m256i mixed = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out.q), _mm256_permutevar8x32_epi32(mixed, order));
}

// Eight consecutive inputs of output o of a panel's block.
static inline __m256 unpack_eight(Format format, const std::byte* block, int o, int v) {
  std::uint64_t bytes;
  float scale, min = 0.0f;
  if (format == Format::Q8) {
    std::uint32_t first, second;
    std::memcpy(&first, block + (2 * v * kPanel + o) * 4, 4);
    std::memcpy(&second, block + ((2 * v + 1) * kPanel + o) * 4, 4);
    bytes = static_cast<std::uint64_t>(second) << 32 | first;
    std::uint16_t half;
    std::memcpy(&half, block + 512 + 2 * o, 2);
    scale = half_to_float(half);
    const __m128i q = _mm_cvtsi64_si128(static_cast<long long>(bytes));
    return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(q)), _mm256_set1_ps(scale));
  }
  std::uint32_t both;
  std::memcpy(&both, block + (v * kPanel + o) * 4, 4);
  bytes = static_cast<std::uint64_t>(both >> 4 & 0x0f0f0f0fu) << 32 | (both & 0x0f0f0f0fu);
  if (format == Format::Q4) {
    std::uint16_t halves[2];
    std::memcpy(&halves[0], block + 256 + 2 * o, 2);
    std::memcpy(&halves[1], block + 288 + 2 * o, 2);
    scale = half_to_float(halves[0]);
    min = half_to_float(halves[1]);
  } else {
    std::memcpy(&scale, block + 256 + 4 * o, 4);
    std::memcpy(&min, block + 320 + 4 * o, 4);
  }
  const __m128i q = _mm_cvtsi64_si128(static_cast<long long>(bytes));
  return _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(q)), _mm256_set1_ps(scale), _mm256_set1_ps(min));
}

}  // namespace

void quantize(const float* x, std::int64_t k, QBlock* out) {
  for (; k >= kGroup; k -= kGroup, x += kGroup, ++out) quantize_group(x, *out);
  if (k == 0) return;
  float group[kGroup] = {};
  std::memcpy(group, x, sizeof(float) * static_cast<std::size_t>(k));
  quantize_group(group, *out);
}

void linear(const LinearJob& job, std::int64_t panel_begin, std::int64_t panel_end) {
  switch (job.w->format) {
    case Format::F32:
      return linear_in<Format::F32>(job, panel_begin, panel_end);
    case Format::F16:
      return linear_in<Format::F16>(job, panel_begin, panel_end);
    case Format::BF16:
      return linear_in<Format::BF16>(job, panel_begin, panel_end);
    case Format::Q8:
      return linear_in<Format::Q8>(job, panel_begin, panel_end);
    case Format::Q4:
      return linear_in<Format::Q4>(job, panel_begin, panel_end);
    case Format::Q4F:
      return linear_in<Format::Q4F>(job, panel_begin, panel_end);
  }
}

void unpack_row(const Weight& w, std::int64_t row, float* out) {
  if (!is_quantised(w.format)) return scalar::unpack_row(w, row, out);  // 16 values apart: nothing for lanes to do
  const std::byte* block = w.panel(row / kPanel);
  const int o = static_cast<int>(row % kPanel);
  for (std::int64_t first = 0; first < w.k; first += kGroup, block += panel_step_bytes(w.format)) {
    for (int v = 0; v < 4 && first + 8 * v < w.k; ++v) {
      const __m256 values = unpack_eight(w.format, block, o, v);
      const std::int64_t left = w.k - first - 8 * v;
      if (left >= 8) {
        _mm256_storeu_ps(out + first + 8 * v, values);
      } else {
        float eight[8];
        _mm256_storeu_ps(eight, values);
        std::memcpy(out + first + 8 * v, eight, sizeof(float) * static_cast<std::size_t>(left));
      }
    }
  }
}

}  // namespace octavo::avx2
