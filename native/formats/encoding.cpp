#include "formats/encoding.h"

#include <cstring>
#include <utility>

#include "formats/fp16.h"

namespace octavo {
namespace {

constexpr std::pair<std::string_view, Encoding> kNames[] = {
    {"f32", Encoding::F32},   {"f16", Encoding::F16},   {"bf16", Encoding::BF16}, {"q8_0", Encoding::Q8_0},
    {"q4_0", Encoding::Q4_0}, {"q4_1", Encoding::Q4_1}, {"q5_0", Encoding::Q5_0}, {"q5_1", Encoding::Q5_1},
    {"q4_k", Encoding::Q4_K}, {"q5_k", Encoding::Q5_K}, {"q6_k", Encoding::Q6_K},
};

float load_half(const std::uint8_t* p) {
  std::uint16_t half;
  std::memcpy(&half, p, sizeof half);
  return half_to_float(half);
}

// 16 bytes: value i in the low nibble of byte i, value 16 + i in its high nibble.
void read_nibbles(const std::uint8_t* bytes, std::int8_t* q) {
  for (int i = 0; i < 16; ++i) {
    q[i] = static_cast<std::int8_t>(bytes[i] & 15);
    q[16 + i] = static_cast<std::int8_t>(bytes[i] >> 4);
  }
}

// Q5_0, Q5_1: bit i of `high` is the fifth bit of value i; `offset` is then taken away.
void add_fifth_bits(const std::uint8_t* high, int offset, std::int8_t* q) {
  std::uint32_t bits;
  std::memcpy(&bits, high, sizeof bits);
  for (int i = 0; i < kGroup; ++i) {
    const int fifth = (bits >> i & 1u) != 0 ? 16 : 0;
    q[i] = static_cast<std::int8_t>(q[i] + fifth - offset);
  }
}

void set_scale(FileGroup& out, float scale, float min) {
  out.scale[0] = out.scale[1] = scale;
  out.min = min;
}

// Q4_K and Q5_K: d, dmin, eight 6-bit scales and eight 6-bit mins in 12 bytes. Both products are exact.
void read_k_scale(const std::uint8_t* block, int sub, FileGroup& out) {
  const std::uint8_t* s = block + 4;
  int scale, min;
  if (sub < 4) {
    scale = s[sub] & 63;
    min = s[sub + 4] & 63;
  } else {
    scale = (s[sub + 4] & 15) | (s[sub - 4] >> 6 << 4);
    min = (s[sub + 4] >> 4) | (s[sub] >> 6 << 4);
  }
  set_scale(out, load_half(block) * static_cast<float>(scale), -load_half(block + 2) * static_cast<float>(min));
}

// Q4_K and Q5_K: 32 bytes hold two sub-blocks, the even one in the low nibbles.
void read_k_nibbles(const std::uint8_t* nibbles, int sub, std::int8_t* q) {
  const std::uint8_t* bytes = nibbles + 32 * (sub / 2);
  const int shift = sub % 2 * 4;
  for (int i = 0; i < kGroup; ++i) q[i] = static_cast<std::int8_t>(bytes[i] >> shift & 15);
}

void read_q5_k(const std::uint8_t* block, int sub, FileGroup& out) {
  read_k_scale(block, sub, out);
  read_k_nibbles(block + 48, sub, out.q);
  const std::uint8_t* high = block + 16;
  for (int i = 0; i < kGroup; ++i) out.q[i] = static_cast<std::int8_t>(out.q[i] | (high[i] >> sub & 1) << 4);
}

// Q6_K: per half of 128 values, 64 bytes of low nibbles and 32 bytes of two high bits; one int8 scale per 16 values.
void read_q6_k(const std::uint8_t* block, int sub, FileGroup& out) {
  const int half = sub / 4, part = sub % 4;
  const std::uint8_t* low = block + 64 * half + 32 * (part % 2);
  const std::uint8_t* high = block + 128 + 32 * half;
  for (int i = 0; i < kGroup; ++i) {
    const int nibble = low[i] >> (part / 2 * 4) & 15, top = high[i] >> (2 * part) & 3;
    out.q[i] = static_cast<std::int8_t>((nibble | top << 4) - 32);
  }
  const float d = load_half(block + 208);
  for (int i = 0; i < 2; ++i) {
    std::int8_t scale;
    std::memcpy(&scale, block + 192 + 2 * sub + i, 1);
    out.scale[i] = d * static_cast<float>(scale);
  }
  out.min = 0.0f;
}

constexpr bool has_min(Encoding e) { return e != Encoding::Q5_0 && e != Encoding::Q8_0 && e != Encoding::Q6_K; }

void decode_floats(Encoding e, const std::uint8_t* row, std::int64_t group, std::int64_t count, float (&out)[kGroup]) {
  const std::int64_t bytes = block_shape(e).bytes;
  const std::uint8_t* from = row + group * kGroup * bytes;
  if (e == Encoding::F32) {
    std::memset(out, 0, sizeof out);
    std::memcpy(out, from, static_cast<std::size_t>(count * bytes));
    return;
  }
  std::uint16_t raw[kGroup] = {};
  std::memcpy(raw, from, static_cast<std::size_t>(count * bytes));
  if (e == Encoding::F16) {
    for (int i = 0; i < kGroup; ++i) out[i] = half_to_float(raw[i]);
  } else {
    for (int i = 0; i < kGroup; ++i) out[i] = bf16_to_float(raw[i]);
  }
}

}  // namespace

std::optional<Encoding> parse_encoding(std::string_view name) {
  for (const auto& [known, encoding] : kNames) {
    if (name == known) return encoding;
  }
  return std::nullopt;
}

void read_group(Encoding e, const std::uint8_t* row, std::int64_t group, FileGroup& out) {
  const BlockShape shape = block_shape(e);
  const std::int64_t groups = shape.values / kGroup;  // in a block: 1 or 8
  const std::uint8_t* block = row + group / groups * shape.bytes;
  const int sub = static_cast<int>(group % groups);
  const float d = load_half(block);
  switch (e) {
    case Encoding::Q4_0:
      read_nibbles(block + 2, out.q);
      return set_scale(out, d, -8.0f * d);
    case Encoding::Q4_1:
      read_nibbles(block + 4, out.q);
      return set_scale(out, d, load_half(block + 2));
    case Encoding::Q5_0:
      read_nibbles(block + 6, out.q);
      add_fifth_bits(block + 2, 16, out.q);
      return set_scale(out, d, 0.0f);
    case Encoding::Q5_1:
      read_nibbles(block + 8, out.q);
      add_fifth_bits(block + 4, 0, out.q);
      return set_scale(out, d, load_half(block + 2));
    case Encoding::Q8_0:
      std::memcpy(out.q, block + 2, kGroup);
      return set_scale(out, d, 0.0f);
    case Encoding::Q4_K:
      read_k_scale(block, sub, out);
      return read_k_nibbles(block + 16, sub, out.q);
    case Encoding::Q5_K:
      return read_q5_k(block, sub, out);
    case Encoding::Q6_K:
      return read_q6_k(block, sub, out);
    case Encoding::F32:
    case Encoding::F16:
    case Encoding::BF16:
      break;
  }
}

void decode_group(Encoding e, const std::uint8_t* row, std::int64_t group, std::int64_t count, float (&out)[kGroup]) {
  if (is_float(e)) return decode_floats(e, row, group, count, out);
  FileGroup g;
  read_group(e, row, group, g);
  if (!has_min(e)) {
    for (int i = 0; i < kGroup; ++i) out[i] = static_cast<float>(g.q[i]) * g.scale[i / 16];
    return;
  }
  // In double both steps are exact: products are multiples of 2^-24 below 2^27, and so are mins. Rounding the result to
  // float makes it the fma of the three, without calling fma a weight at a time on a CPU that has none.
  const double scale = g.scale[0], min = g.min;
  for (int i = 0; i < kGroup; ++i) out[i] = static_cast<float>(static_cast<double>(g.q[i]) * scale + min);
}

}  // namespace octavo
