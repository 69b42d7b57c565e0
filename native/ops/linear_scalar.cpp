// The specification of linear.h in plain code. Integer sums may be vectorised by the compiler (they are exact in any
// order); every float operation is written in its canonical order.
#include <cstring>

#include "formats/fp16.h"
#include "simd/declarations.h"
#include "simd/math_scalar.h"

namespace octavo::scalar {
namespace {

constexpr std::int64_t kTileRows = 8;  // rows that share one unpacking of a block

template <class T>
T load(const std::byte* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

// A panel's block of 32 inputs, unpacked.
struct Block {
  std::int16_t q[kPanel][kGroup];
  float scale[kPanel];
  float min[kPanel];  // q4 and q4f
};

void unpack_nibbles(const std::byte* block, std::int16_t (&q)[kPanel][kGroup]) {
  std::uint8_t nibbles[kPanel][kGroup];
  for (int v = 0; v < 4; ++v) {
    for (int o = 0; o < kPanel; ++o) {
      const auto both = load<std::uint32_t>(block + (v * kPanel + o) * 4);
      const std::uint32_t low = both & 0x0f0f0f0fu, high = both >> 4 & 0x0f0f0f0fu;
      std::memcpy(&nibbles[o][8 * v], &low, 4);
      std::memcpy(&nibbles[o][8 * v + 4], &high, 4);
    }
  }
  for (int o = 0; o < kPanel; ++o) {
    for (int i = 0; i < kGroup; ++i) q[o][i] = nibbles[o][i];
  }
}

void unpack_bytes(const std::byte* block, std::int16_t (&q)[kPanel][kGroup]) {
  std::int8_t bytes[kPanel][kGroup];
  for (int s = 0; s < 8; ++s) {
    for (int o = 0; o < kPanel; ++o) std::memcpy(&bytes[o][4 * s], block + (s * kPanel + o) * 4, 4);
  }
  for (int o = 0; o < kPanel; ++o) {
    for (int i = 0; i < kGroup; ++i) q[o][i] = bytes[o][i];
  }
}

void unpack_halves(const std::byte* halves, float (&out)[kPanel]) {
  for (int o = 0; o < kPanel; ++o) out[o] = half_to_float(load<std::uint16_t>(halves + 2 * o));
}

void unpack_block(Format format, const std::byte* block, Block& out) {
  switch (format) {
    case Format::Q8:
      unpack_bytes(block, out.q);
      unpack_halves(block + 512, out.scale);
      break;
    case Format::Q4:
      unpack_nibbles(block, out.q);
      unpack_halves(block + 256, out.scale);
      unpack_halves(block + 288, out.min);
      break;
    default:  // Q4F
      unpack_nibbles(block, out.q);
      std::memcpy(out.scale, block + 256, sizeof out.scale);
      std::memcpy(out.min, block + 320, sizeof out.min);
  }
}

std::int32_t dot(const std::int16_t (&w)[kGroup], const std::int16_t (&x)[kGroup]) {
  std::int32_t sum = 0;
  for (int i = 0; i < kGroup; ++i) sum += std::int32_t{w[i]} * x[i];
  return sum;
}

void add_group(Format format, const Block& w, const QBlock& x, float (&acc)[kPanel]) {
  std::int16_t q[kGroup];
  for (int i = 0; i < kGroup; ++i) q[i] = x.q[i];
  for (int o = 0; o < kPanel; ++o) {
    acc[o] = fma_(static_cast<float>(dot(w.q[o], q)), w.scale[o] * x.d, acc[o]);
    if (format != Format::Q8) acc[o] = fma_(w.min[o], x.s, acc[o]);
  }
}

float load_weight(Format format, const std::byte* step, int o) {
  switch (format) {
    case Format::F16:
      return half_to_float(load<std::uint16_t>(step + 2 * o));
    case Format::BF16:
      return bf16_to_float(load<std::uint16_t>(step + 2 * o));
    default:
      return load<float>(step + 4 * o);
  }
}

void finish(const LinearJob& job, std::int64_t row, std::int64_t panel, float (&acc)[kPanel]) {
  const std::int64_t first = panel * kPanel;
  if (job.bias != nullptr) {
    for (int o = 0; o < kPanel; ++o) acc[o] = acc[o] + job.bias[first + o];
  }
  float* y = job.y + row * job.y_stride;
  if (job.epilogue == Epilogue::SiluMul) {
    for (std::int64_t j = 0; j < 8 && panel * 8 + j < job.w->n / 2; ++j) {
      y[panel * 8 + j] = silu_(acc[j]) * acc[8 + j];
    }
    return;
  }
  for (std::int64_t o = 0; o < kPanel && first + o < job.w->n; ++o) {
    y[first + o] = job.epilogue == Epilogue::Add ? job.residual[row * job.y_stride + first + o] + acc[o] : acc[o];
  }
}

void linear_panel(const LinearJob& job, std::int64_t panel, std::int64_t row_begin, std::int64_t rows) {
  const Weight& w = *job.w;
  const std::byte* step = w.panel(panel);
  const std::int64_t step_bytes = panel_step_bytes(w.format);
  float acc[kTileRows][kPanel] = {};
  if (is_quantised(w.format)) {
    Block block;
    for (std::int64_t g = 0; g < w.blocks(); ++g, step += step_bytes) {
      unpack_block(w.format, step, block);
      for (std::int64_t r = 0; r < rows; ++r) {
        add_group(w.format, block, job.xq[(row_begin + r) * w.blocks() + g], acc[r]);
      }
    }
  } else {
    for (std::int64_t k = 0; k < w.k; ++k, step += step_bytes) {
      for (int o = 0; o < kPanel; ++o) {
        const float weight = load_weight(w.format, step, o);
        for (std::int64_t r = 0; r < rows; ++r) {
          acc[r][o] = fma_(weight, job.x[(row_begin + r) * job.x_stride + k], acc[r][o]);
        }
      }
    }
  }
  for (std::int64_t r = 0; r < rows; ++r) finish(job, row_begin + r, panel, acc[r]);
}

void quantize_group(const float (&x)[kGroup], QBlock& out) {
  std::uint32_t largest = 0;  // bits of |x| order like |x|, with infinity and NaN above all
  for (int i = 0; i < kGroup; ++i) {
    const std::uint32_t magnitude = float_bits(x[i]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  out = {};
  if (largest >= 0x7f800000u) {
    out.d = out.s = nan_();
    return;
  }
  const float amax = bits_float(largest);
  if (amax < kTinyGroup) return;
  const float inverse = 127.0f / amax;
  std::int32_t sum = 0;
  for (int i = 0; i < kGroup; ++i) {
    // Adding and taking away 1.5 * 2^23 rounds to the nearest integer, ties to even.
    const float q = (x[i] * inverse + 0x1.8p+23f) - 0x1.8p+23f;
    out.q[i] = static_cast<std::int8_t>(q);
    sum += static_cast<std::int32_t>(q);
  }
  out.d = amax / 127.0f;
  out.s = out.d * static_cast<float>(sum);
  out.offset = -128 * sum;
}

}  // namespace

void quantize(const float* x, std::int64_t k, QBlock* out) {
  for (std::int64_t first = 0; first < k; first += kGroup, ++out) {
    float group[kGroup] = {};
    std::memcpy(group, x + first, sizeof(float) * static_cast<std::size_t>(k - first < kGroup ? k - first : kGroup));
    quantize_group(group, *out);
  }
}

void linear(const LinearJob& job, std::int64_t panel_begin, std::int64_t panel_end) {
  for (std::int64_t panel = panel_begin; panel < panel_end; ++panel) {
    for (std::int64_t row = 0; row < job.rows; row += kTileRows) {
      linear_panel(job, panel, row, job.rows - row < kTileRows ? job.rows - row : kTileRows);
    }
  }
}

void unpack_row(const Weight& w, std::int64_t row, float* out) {
  const std::byte* step = w.panel(row / kPanel);
  const std::int64_t step_bytes = panel_step_bytes(w.format);
  const int o = static_cast<int>(row % kPanel);
  if (!is_quantised(w.format)) {
    for (std::int64_t k = 0; k < w.k; ++k) out[k] = load_weight(w.format, step + k * step_bytes, o);
    return;
  }
  Block block;
  for (std::int64_t first = 0; first < w.k; first += kGroup, step += step_bytes) {
    unpack_block(w.format, step, block);
    for (std::int64_t i = 0; i < kGroup && first + i < w.k; ++i) {
      const auto q = static_cast<float>(block.q[o][i]);
      out[first + i] = w.format == Format::Q8 ? q * block.scale[o] : fma_(q, block.scale[o], block.min[o]);
    }
  }
}

}  // namespace octavo::scalar
