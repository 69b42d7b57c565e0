#include "formats/pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <limits>
#include <thread>
#include <utility>

#include "formats/fp16.h"
#include "simd/float_environment.h"

namespace octavo {
namespace {

constexpr std::pair<std::string_view, Format> kNames[] = {{"f32", Format::F32},   {"f16", Format::F16},
                                                          {"bf16", Format::BF16}, {"q8", Format::Q8},
                                                          {"q4", Format::Q4},     {"q4f", Format::Q4F}};
constexpr const char* kNotFinite = "a weight or scale is not finite";
constexpr const char* kScaleTooLarge = "a scale or minimum is too large for fp16";
constexpr const char* kMinTooLarge = "-8 * scale is too large for fp16; format q4f holds it";

struct Row {  // where an output's weights lie; bytes is null for an output added as padding
  const std::uint8_t* bytes = nullptr;
  Encoding encoding = Encoding::F32;
  std::size_t part = 0;
  std::int64_t row = 0;
};

struct Failure {
  const char* reason = nullptr;
  Row row;
};

std::string part_error(std::size_t part, const std::string& what) {
  return "part " + std::to_string(part) + ": " + what;
}

bool convertible(Encoding from, Format to) {
  switch (to) {
    case Format::F32:
    case Format::Q8:
      return true;
    case Format::F16:
      return from == Encoding::F16;
    case Format::BF16:
      return from == Encoding::BF16;
    case Format::Q4:
      return is_float(from) || from == Encoding::Q4_0 || from == Encoding::Q4_1;
    case Format::Q4F:
      return from == Encoding::Q4_0 || from == Encoding::Q4_1 || from == Encoding::Q4_K;
  }
  return false;
}

// Empty when the part's sizes agree with each other.
std::string check_part(const WeightPart& p, std::size_t index, Format format) {
  const BlockShape shape = block_shape(p.encoding);
  if (p.rows <= 0 || p.cols <= 0) return part_error(index, "rows and cols must be positive");
  if (p.cols % shape.values != 0) {
    return part_error(index, std::to_string(p.cols) + " cols are not whole blocks of " + std::to_string(shape.values));
  }
  std::int64_t row_bytes, bytes;
  if (__builtin_mul_overflow(p.cols / shape.values, shape.bytes, &row_bytes) ||
      __builtin_mul_overflow(p.rows, row_bytes, &bytes)) {
    return part_error(index, "its size overflows 64 bits");
  }
  if (bytes != p.bytes) {
    return part_error(index, "has " + std::to_string(p.bytes) + " bytes, its shape needs " + std::to_string(bytes));
  }
  if (!convertible(p.encoding, format)) {
    return part_error(index, "its encoding cannot be packed as " + std::string(format_name(format)));
  }
  if (p.row_order == nullptr) return {};
  if (p.row_order_count != p.rows) return part_error(index, "row_order must have one entry a row");
  for (std::int64_t i = 0; i < p.rows; ++i) {
    if (p.row_order[i] < 0 || p.row_order[i] >= p.rows) {
      return part_error(index, "row_order holds a row that does not exist");
    }
  }
  return {};
}

std::string check_parts(const std::vector<WeightPart>& parts, Format format, bool interleave) {
  if (parts.empty()) return "no parts to pack";
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (std::string error = check_part(parts[i], i, format); !error.empty()) return error;
    if (parts[i].cols != parts[0].cols) return part_error(i, "its cols differ from those of part 0");
  }
  if (interleave && (parts.size() != 2 || parts[0].rows != parts[1].rows)) {
    return "interleave needs exactly two parts with equal rows";
  }
  return {};
}

// Where each output of the packed matrix comes from.
class Outputs {
 public:
  Outputs(const std::vector<WeightPart>& parts, bool interleave) : parts_(parts), interleave_(interleave) {
    if (interleave) {
      count_ = (parts[0].rows + 7) / 8 * kPanel;
    } else {
      for (const WeightPart& p : parts) count_ += p.rows;
    }
  }

  std::int64_t count() const { return count_; }

  Row row(std::int64_t output) const {
    if (interleave_) {
      const std::int64_t of_part = output / kPanel * 8 + output % 8;
      return of_part < parts_[0].rows ? row_of(output % kPanel < 8 ? 0 : 1, of_part) : Row{};
    }
    std::size_t part = 0;
    while (output >= parts_[part].rows) output -= parts_[part++].rows;
    return row_of(part, output);
  }

 private:
  Row row_of(std::size_t part, std::int64_t output) const {
    const WeightPart& p = parts_[part];
    const BlockShape shape = block_shape(p.encoding);
    const std::int64_t row = p.row_order != nullptr ? p.row_order[output] : output;
    return Row{p.data + row * (p.cols / shape.values * shape.bytes), p.encoding, part, row};
  }

  const std::vector<WeightPart>& parts_;
  bool interleave_;
  std::int64_t count_ = 0;
};

// Bits of the largest |x|; they order like |x|, with infinity and NaN above all.
std::uint32_t largest_magnitude(const float (&x)[kGroup]) {
  std::int32_t largest = 0;
  for (int i = 0; i < kGroup; ++i) {
    largest = std::max(largest, static_cast<std::int32_t>(float_bits(x[i]) & 0x7fffffffu));
  }
  return static_cast<std::uint32_t>(largest);
}

bool all_finite(const float (&x)[kGroup]) { return largest_magnitude(x) < 0x7f800000u; }

// Rounds to fp16 and back; false when that is infinite.
bool round_to_half(float& x) {
  x = half_to_float(float_to_half(x));
  return std::isfinite(x);
}

// q = (x - origin) / scale, clamped and rounded to nearest even by adding and taking away 1.5 * 2^23.
void quantise(const float (&x)[kGroup], float origin, float scale, float low, float high, FileGroup& out) {
  out.scale[0] = out.scale[1] = scale;
  out.min = origin;
  std::memset(out.q, 0, sizeof out.q);
  if (scale == 0.0f) return;
  std::int32_t q[kGroup];
  for (int i = 0; i < kGroup; ++i) {
    float steps = (x[i] - origin) / scale;
    steps = steps < low ? low : steps;
    steps = steps > high ? high : steps;
    q[i] = static_cast<std::int32_t>((steps + 0x1.8p+23f) - 0x1.8p+23f);
  }
  for (int i = 0; i < kGroup; ++i) out.q[i] = static_cast<std::int8_t>(q[i]);
}

// Sum of squared differences between x and its rounding to multiples of scale.
float rounding_error(const float (&x)[kGroup], float scale) {
  const float inverse = 1.0f / scale;
  float sums[8] = {};
  for (int i = 0; i < kGroup; ++i) {
    const float steps = (x[i] * inverse + 0x1.8p+23f) - 0x1.8p+23f;
    const float difference = x[i] - steps * scale;
    sums[i % 8] += difference * difference;
  }
  return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

// search: x lies on a grid (it comes from a quantised file), and one of a few scales fits the grid far better than
// max / 127 does: half the squared error on Q5_1, Q5_K and Q6_K.
const char* requantise_q8(const float (&x)[kGroup], bool search, FileGroup& out) {
  const float largest = bits_float(largest_magnitude(x));
  float scale = largest / 127.0f;
  if (!round_to_half(scale)) return kScaleTooLarge;
  float least = search && scale > 0.0f ? rounding_error(x, scale) : 0.0f;
  for (int steps = 126; least > 0.0f && steps > 111; --steps) {
    float other = largest / static_cast<float>(steps);
    if (!round_to_half(other)) break;
    const float error = rounding_error(x, other);
    if (error < least) least = error, scale = other;
  }
  quantise(x, 0.0f, scale, -127.0f, 127.0f, out);
  return nullptr;
}

const char* requantise_q4(float (&x)[kGroup], std::int64_t count, FileGroup& out) {
  for (std::int64_t i = count; i < kGroup; ++i) x[i] = x[0];  // the padding must not widen the range
  float lows[8], highs[8];
  std::copy(x, x + 8, lows);
  std::copy(x, x + 8, highs);
  for (int i = 8; i < kGroup; i += 8) {
    for (int j = 0; j < 8; ++j) {
      lows[j] = x[i + j] < lows[j] ? x[i + j] : lows[j];
      highs[j] = x[i + j] > highs[j] ? x[i + j] : highs[j];
    }
  }
  float low = *std::min_element(lows, lows + 8);
  const float high = *std::max_element(highs, highs + 8);
  float scale = high / 15.0f - low / 15.0f;  // high - low may overflow
  if (!round_to_half(scale) || !round_to_half(low)) return kScaleTooLarge;
  quantise(x, low, scale, 0.0f, 15.0f, out);
  std::fill(out.q + count, out.q + kGroup, std::int8_t{0});
  return nullptr;
}

// One group of one output in the target's terms (q, scale, min). Returns what is wrong, or null.
const char* convert_group(const Row& row, std::int64_t group, std::int64_t count, Format format, FileGroup& out) {
  const bool exact =
      format == Format::Q8 ? row.encoding == Encoding::Q8_0 || row.encoding == Encoding::Q5_0 : !is_float(row.encoding);
  if (exact) {
    read_group(row.encoding, row.bytes, group, out);
    if (!std::isfinite(out.scale[0]) || !std::isfinite(out.min)) return kNotFinite;
    if (format == Format::Q4 && std::fabs(out.min) > 65504.0f) return kMinTooLarge;
    return nullptr;
  }
  float x[kGroup];
  decode_group(row.encoding, row.bytes, group, count, x);
  if (!all_finite(x)) return kNotFinite;
  return format == Format::Q8 ? requantise_q8(x, !is_float(row.encoding), out) : requantise_q4(x, count, out);
}

void store_half(std::byte* at, float x) {
  const std::uint16_t half = float_to_half(x);
  std::memcpy(at, &half, sizeof half);
}

void store_q8(const FileGroup& g, int o, std::byte* block) {
  for (int s = 0; s < 8; ++s) std::memcpy(block + (s * kPanel + o) * 4, g.q + 4 * s, 4);
  store_half(block + 512 + 2 * o, g.scale[0]);
}

void store_q4(const FileGroup& g, Format format, int o, std::byte* block) {
  for (int v = 0; v < 4; ++v) {
    std::uint32_t low, high;
    std::memcpy(&low, g.q + 8 * v, 4);
    std::memcpy(&high, g.q + 8 * v + 4, 4);
    const std::uint32_t both = low | high << 4;
    std::memcpy(block + (v * kPanel + o) * 4, &both, 4);
  }
  if (format == Format::Q4) {
    store_half(block + 256 + 2 * o, g.scale[0]);
    store_half(block + 288 + 2 * o, g.min);
  } else {
    std::memcpy(block + 256 + 4 * o, &g.scale[0], 4);
    std::memcpy(block + 320 + 4 * o, &g.min, 4);
  }
}

// Inputs [32 group, 32 group + count) of output o, in a float format. Returns what is wrong, or null.
const char* pack_floats(const Row& row, std::int64_t group, std::int64_t count, Format format, int o, std::byte* out) {
  float x[kGroup];
  decode_group(row.encoding, row.bytes, group, count, x);
  if (!all_finite(x)) return kNotFinite;
  out += group * kGroup * panel_step_bytes(format);
  if (format == Format::F32) {
    for (std::int64_t i = 0; i < count; ++i) std::memcpy(out + (i * kPanel + o) * 4, &x[i], 4);
  } else {
    const std::uint8_t* from = row.bytes + group * kGroup * 2;  // the bits as they are
    for (std::int64_t i = 0; i < count; ++i) std::memcpy(out + (i * kPanel + o) * 2, from + 2 * i, 2);
  }
  return nullptr;
}

const char* pack_group(const Row& row, std::int64_t group, std::int64_t count, Format format, int o, std::byte* out) {
  if (!is_quantised(format)) return pack_floats(row, group, count, format, o, out);
  FileGroup g;
  if (const char* reason = convert_group(row, group, count, format, g)) return reason;
  std::byte* block = out + group * panel_step_bytes(format);
  if (format == Format::Q8) {
    store_q8(g, o, block);
  } else {
    store_q4(g, format, o, block);
  }
  return nullptr;
}

Failure pack_panels(const Outputs& outputs, std::int64_t begin, std::int64_t end, Weight& w) {
  for (std::int64_t panel = begin; panel < end; ++panel) {
    Row rows[kPanel];  // those past the last output stay empty
    for (std::int64_t o = 0; o < std::min(kPanel, w.n - panel * kPanel); ++o) rows[o] = outputs.row(panel * kPanel + o);
    for (std::int64_t group = 0; group < w.blocks(); ++group) {
      const std::int64_t count = std::min(kGroup, w.k - group * kGroup);
      for (int o = 0; o < kPanel; ++o) {
        if (rows[o].bytes == nullptr) continue;  // padding: the memory is zero already
        const char* reason = pack_group(rows[o], group, count, w.format, o, w.panel(panel));
        if (reason != nullptr) return {reason, rows[o]};
      }
    }
  }
  return {};
}

// Packs all panels on `threads` threads; the failure told is that of the first panel that has one.
Failure pack_all(const Outputs& outputs, Weight& w, int threads) {
  const std::int64_t parts = std::clamp<std::int64_t>(threads, 1, std::min<std::int64_t>(w.panels(), 256));
  std::vector<Failure> failures(static_cast<std::size_t>(parts));
  std::vector<std::thread> team;
  team.reserve(failures.size());
  const auto work = [&](std::int64_t t) {
    const FloatEnvironment environment;
    const std::int64_t begin = t * w.panels() / parts, end = (t + 1) * w.panels() / parts;
    failures[static_cast<std::size_t>(t)] = pack_panels(outputs, begin, end, w);
  };
  for (std::int64_t t = 1; t < parts; ++t) {
    try {
      team.emplace_back(work, t);
    } catch (const std::exception&) {  // no thread to be had: do it here
      work(t);
    }
  }
  work(0);
  for (std::thread& thread : team) thread.join();
  for (const Failure& failure : failures) {
    if (failure.reason != nullptr) return failure;
  }
  return {};
}

}  // namespace

std::string_view format_name(Format f) {
  for (const auto& [name, format] : kNames) {
    if (format == f) return name;
  }
  return {};
}

std::optional<Format> parse_format(std::string_view name) {
  for (const auto& [known, format] : kNames) {
    if (name == known) return format;
  }
  return std::nullopt;
}

Packed pack(const std::vector<WeightPart>& parts, Format format, bool interleave, int threads) {
  Packed packed;
  packed.error = check_parts(parts, format, interleave);
  if (!packed.error.empty()) return packed;
  const Outputs outputs(parts, interleave);
  Weight& w = packed.weight;
  w.format = format;
  w.n = outputs.count();
  w.k = parts[0].cols;
  // The parts are in memory, so n * k < 2^48; 4 bytes a weight and the padding of a panel cannot overflow.
  w.data = allocate_aligned(static_cast<std::size_t>(w.bytes()));
  if (w.data == nullptr) {
    packed.error = "no memory for " + std::to_string(w.bytes()) + " bytes of packed weights";
    return packed;
  }
  const Failure failure = pack_all(outputs, w, threads);
  if (failure.reason != nullptr) {
    packed.error = part_error(failure.row.part, "row " + std::to_string(failure.row.row) + ": " + failure.reason);
    packed.weight = {};
  }
  return packed;
}

}  // namespace octavo
