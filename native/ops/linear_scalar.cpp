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

// A panel's block of 64 inputs, unpacked.
struct Block {
  std::int16_t q[kPanel][kBlock];  // q4: multiplier * q + offset
  float scale[kPanel];
};

void unpack_q8(const std::byte* quants, std::int16_t (&q)[kPanel][kBlock]) {
  std::int8_t bytes[kPanel][kBlock];
  for (int s = 0; s < 16; ++s) {
    for (int o = 0; o < kPanel; ++o) std::memcpy(&bytes[o][4 * s], quants + (s * kPanel + o) * 4, 4);
  }
  for (int o = 0; o < kPanel; ++o) {
    for (int i = 0; i < kBlock; ++i) q[o][i] = bytes[o][i];
  }
}

void unpack_q4(const std::byte* quants, const std::byte* terms, std::int16_t (&q)[kPanel][kBlock]) {
  std::uint8_t nibbles[kPanel][kBlock];
  for (int v = 0; v < 8; ++v) {
    for (int o = 0; o < kPanel; ++o) {
      const auto both = load<std::uint32_t>(quants + (v * kPanel + o) * 4);
      const std::uint32_t low = both & 0x0f0f0f0fu, high = both >> 4 & 0x0f0f0f0fu;
      std::memcpy(&nibbles[o][8 * v], &low, 4);
      std::memcpy(&nibbles[o][8 * v + 4], &high, 4);
    }
  }
  for (int g = 0; g < 2; ++g) {
    for (int o = 0; o < kPanel; ++o) {
      const int multiplier = load<std::uint8_t>(terms + kPanel * g + o);
      const int offset = load<std::int8_t>(terms + kOffsetsAt + kPanel * g + o);
      for (std::int64_t i = kGroup * g; i < kGroup * (g + 1); ++i) {
        q[o][i] = static_cast<std::int16_t>(multiplier * nibbles[o][i] + offset);
      }
    }
  }
}

// Block `block` of a quantised panel.
void unpack_block(const Weight& w, const std::byte* panel, std::int64_t block, Block& out) {
  const std::byte* quants = panel + block * block_bytes(w.format);
  const std::byte* terms = quants + quants_bytes(w.format);
  if (w.format == Format::Q8) {
    unpack_q8(quants, out.q);
  } else {
    unpack_q4(quants, terms, out.q);
    terms += kQ4ScalesAt;
  }
  for (int o = 0; o < kPanel; ++o) out.scale[o] = half_to_float(load<std::uint16_t>(terms + 2 * o));
}

std::int32_t dot(const std::int16_t (&w)[kBlock], const std::int16_t (&x)[kBlock]) {
  std::int32_t sum = 0;
  for (int i = 0; i < kBlock; ++i) sum += std::int32_t{w[i]} * x[i];
  return sum;
}

void add_block(const Block& w, const std::int8_t* x, float x_scale, float (&acc)[kPanel]) {
  std::int16_t q[kBlock];
  for (int i = 0; i < kBlock; ++i) q[i] = x[i];
  for (int o = 0; o < kPanel; ++o) {
    acc[o] = fma_(static_cast<float>(dot(w.q[o], q)), w.scale[o] * x_scale, acc[o]);
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
  const std::byte* at = w.panel(panel);
  float acc[kTileRows][kPanel] = {};
  if (is_quantised(w.format)) {
    Block block;
    for (std::int64_t b = 0; b < w.blocks(); ++b) {
      unpack_block(w, at, b, block);
      for (std::int64_t r = 0; r < rows; ++r) {
        const auto x = job.row(row_begin + r);
        add_block(block, x.q() + b * kBlock, x.scales()[b], acc[r]);
      }
    }
  } else {
    for (std::int64_t k = 0; k < w.k; ++k, at += step_bytes(w.format)) {
      for (int o = 0; o < kPanel; ++o) {
        const float weight = load_weight(w.format, at, o);
        for (std::int64_t r = 0; r < rows; ++r) {
          acc[r][o] = fma_(weight, job.x[(row_begin + r) * job.x_stride + k], acc[r][o]);
        }
      }
    }
  }
  for (std::int64_t r = 0; r < rows; ++r) finish(job, row_begin + r, panel, acc[r]);
}

void quantize_block(const float (&x)[kBlock], std::int64_t b, QRow<std::byte> out) {
  std::uint32_t largest = 0;  // bits of |x| order like |x|, with infinity and NaN above all
  for (int i = 0; i < kBlock; ++i) {
    const std::uint32_t magnitude = float_bits(x[i]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  const float amax = bits_float(largest);
  const bool finite = largest < 0x7f800000u, tiny = finite && amax < kTinyBlock;
  out.scales()[b] = !finite ? nan_() : tiny ? 0.0f : amax / 127.0f;
  const float inverse = finite && !tiny ? 127.0f / amax : 0.0f;
  std::int32_t sums[2] = {};
  for (int i = 0; i < kBlock; ++i) {
    // Adding and taking away 1.5 * 2^23 rounds to the nearest integer, ties to even.
    const float q = finite ? (x[i] * inverse + 0x1.8p+23f) - 0x1.8p+23f : 0.0f;
    out.q()[b * kBlock + i] = static_cast<std::int8_t>(q);
    sums[i / kGroup] += static_cast<std::int32_t>(q);
  }
  for (int g = 0; g < 2; ++g) out.sums()[b].of_group[g] = static_cast<std::int16_t>(sums[g]);
  out.corrections()[b] = -128 * (sums[0] + sums[1]);
}

}  // namespace

void quantize(const float* x, std::int64_t k, std::byte* out) {
  const QRow<std::byte> row{out, (k + kBlock - 1) / kBlock};
  for (std::int64_t b = 0; b < row.blocks; ++b) {
    float block[kBlock] = {};
    const std::int64_t first = b * kBlock, count = k - first < kBlock ? k - first : kBlock;
    std::memcpy(block, x + first, sizeof(float) * static_cast<std::size_t>(count));
    quantize_block(block, b, row);
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
  const std::byte* panel = w.panel(row / kPanel);
  const int o = static_cast<int>(row % kPanel);
  if (!is_quantised(w.format)) {
    for (std::int64_t k = 0; k < w.k; ++k) out[k] = load_weight(w.format, panel + k * step_bytes(w.format), o);
    return;
  }
  Block block;
  for (std::int64_t first = 0; first < w.k; first += kBlock) {
    unpack_block(w, panel, first / kBlock, block);
    for (std::int64_t i = 0; i < kBlock && first + i < w.k; ++i) {
      out[first + i] = static_cast<float>(block.q[o][i]) * block.scale[o];
    }
  }
}

}  // namespace octavo::scalar
