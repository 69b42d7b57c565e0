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

constexpr std::pair<std::string_view, Format> kNames[] = {
    {"f32", Format::F32}, {"f16", Format::F16}, {"bf16", Format::BF16}, {"q8", Format::Q8}, {"q4", Format::Q4}};
constexpr const char* kNotFinite = "a weight or scale is not finite";
constexpr const char* kScaleTooLarge = "a scale is too large for fp16";

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

constexpr bool has_sixteen_levels(Encoding e) {
  return e == Encoding::Q4_0 || e == Encoding::Q4_1 || e == Encoding::Q4_K;
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
      return is_float(from) || has_sixteen_levels(from);
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

// A block of 64 weights of one output: its groups as the file has them, and what they become.
struct Block {
  float x[kBlock] = {};
  std::int8_t q[kBlock] = {};
  std::uint8_t multiplier[2] = {};
  std::int8_t offset[2] = {};
  float scale = 0.0f;
};

// A group's weights lie on (from floats: are rounded to) levels low, low + step, ..., low + count * step.
struct Levels {
  float low = 0.0f, step = 0.0f, count = 0.0f;
};

// Bits of the largest |x|; they order like |x|, with infinity and NaN above all.
std::uint32_t largest_magnitude(const float* x, int count) {
  std::int32_t largest = 0;
  for (int i = 0; i < count; ++i) {
    largest = std::max(largest, static_cast<std::int32_t>(float_bits(x[i]) & 0x7fffffffu));
  }
  return static_cast<std::uint32_t>(largest);
}

bool all_finite(const float* x, int count) { return largest_magnitude(x, count) < 0x7f800000u; }

// To the nearest integer, ties to even, for |x| < 2^22.
float rounded(float x) { return (x + 0x1.8p+23f) - 0x1.8p+23f; }

// Rounds to fp16 and back; false when that is infinite.
bool round_to_half(float& x) {
  x = half_to_float(float_to_half(x));
  return std::isfinite(x);
}

// Sum of squared differences between x and its rounding to multiples of scale.
float rounding_error(const float (&x)[kBlock], float scale) {
  const float inverse = 1.0f / scale;
  float sums[8] = {};
  for (int i = 0; i < kBlock; ++i) {
    const float difference = x[i] - rounded(x[i] * inverse) * scale;
    sums[i % 8] += difference * difference;
  }
  return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

// search: x lies on a grid (it comes from a quantised file), and one of a few scales fits the grid far better than
// max / 127 does.
const char* to_q8(bool search, Block& b) {
  const float largest = bits_float(largest_magnitude(b.x, kBlock));
  b.scale = largest / 127.0f;
  if (!round_to_half(b.scale)) return kScaleTooLarge;
  if (b.scale == 0.0f) return nullptr;
  float least = search ? rounding_error(b.x, b.scale) : 0.0f;
  for (int steps = 126; least > 0.0f && steps > 95; --steps) {
    float other = largest / static_cast<float>(steps);
    if (!round_to_half(other)) break;
    const float error = rounding_error(b.x, other);
    if (error < least) least = error, b.scale = other;
  }
  for (int i = 0; i < kBlock; ++i) {
    b.q[i] = static_cast<std::int8_t>(rounded(std::clamp(b.x[i] / b.scale, -127.0f, 127.0f)));
  }
  return nullptr;
}

// `step`: that of the file's levels, or 0 for floats. Whole registers: what is missing of x repeats what is there.
Levels levels_of(const float* x, float step) {
  float lows[8], highs[8];
  std::copy(x, x + 8, lows);
  std::copy(x, x + 8, highs);
  for (int i = 8; i < kGroup; i += 8) {
    for (int j = 0; j < 8; ++j) {
      lows[j] = x[i + j] < lows[j] ? x[i + j] : lows[j];
      highs[j] = x[i + j] > highs[j] ? x[i + j] : highs[j];
    }
  }
  const float low = *std::min_element(lows, lows + 8), high = *std::max_element(highs, highs + 8);
  if (low == high) return {low, 0.0f, 0.0f};
  if (step == 0.0f) return {low, high / 15.0f - low / 15.0f, 15.0f};  // high - low may overflow
  const float inverse = 1.0f / std::fabs(step);
  return {low, std::fabs(step), rounded(high * inverse - low * inverse)};
}

// What a group's step is in scales, a whole number from 1 to what lets 8 bits hold its last level.
float multiplier_of(const Levels& group, float inverse_scale, float most) {
  const float steps = rounded(group.step * inverse_scale);
  const float at_least_one = steps < 1.0f ? 1.0f : steps;
  return at_least_one > most ? most : at_least_one;
}
float most_of(const Levels& group) { return static_cast<float>(static_cast<int>(255.0f / group.count)); }

// The scale that fits the groups' steps best: 32, from `least` to nearly twice as much, give the multipliers, for which
// the best scale is known; the least sum of the squared errors of levels and offsets wins.
float q4_scale(float least, const Levels (&levels)[2]) {
  constexpr int kTried = 32;
  float products[kTried] = {}, squares[kTried] = {}, scales[kTried], errors[kTried];
  float total = 0.0f;
  for (const Levels& group : levels) {
    if (group.count == 0.0f) continue;
    const float variance = group.count * (group.count + 2.0f) / 12.0f, most = most_of(group);
    total += variance * group.step * group.step;
    for (int i = 0; i < kTried; ++i) {
      const float inverse = 1.0f / (least * (1.0f + static_cast<float>(i) / kTried));
      const float multiplier = multiplier_of(group, inverse, most);
      products[i] += variance * multiplier * group.step;
      squares[i] += variance * multiplier * multiplier;
    }
  }
  if (total == 0.0f) return least;
  for (int i = 0; i < kTried; ++i) {
    const float best = products[i] / squares[i];
    scales[i] = best < least ? least : best;
    const float off = scales[i] - best;
    errors[i] = total - best * products[i] + off * off * squares[i] + scales[i] * scales[i] / 6.0f;
  }
  return scales[std::min_element(errors, errors + kTried) - errors];
}

// Group g of the block to the scale chosen; the middle of its levels stays where it is.
void quantise_group(const Levels& levels, int g, Block& b) {
  const float inverse = 1.0f / b.scale, count = levels.count;
  const float multiplier = count > 0.0f ? multiplier_of(levels, inverse, most_of(levels)) : 0.0f;
  const float middle = rounded(levels.low * inverse + 0.5f * count * (levels.step * inverse - multiplier));
  const float offset = std::clamp(middle, -128.0f, 127.0f - multiplier);
  float room = 0.0f, by = 0.0f;  // levels that fit in 8 bits
  if (count > 0.0f) {
    by = 1.0f / multiplier;
    room = std::min(count, static_cast<float>(static_cast<int>((127.0f - offset) / multiplier)));
  }
  b.multiplier[g] = static_cast<std::uint8_t>(multiplier);
  b.offset[g] = static_cast<std::int8_t>(offset);
  std::int32_t q[kGroup];
  for (int i = 0; i < kGroup; ++i) {
    float level = (b.x[kGroup * g + i] * inverse - offset) * by;
    level = level < 0.0f ? 0.0f : level;
    q[i] = static_cast<std::int32_t>(rounded(level > room ? room : level));
  }
  for (int i = 0; i < kGroup; ++i) b.q[kGroup * g + i] = static_cast<std::int8_t>(q[i]);
}

// counts, steps: of each group, the weights there are and the step of the file's levels (0: floats).
const char* to_q4(const std::int64_t (&counts)[2], const float (&steps)[2], Block& b) {
  Levels levels[2];
  for (int g = 0; g < 2; ++g) {
    if (counts[g] == 0) continue;
    float* x = b.x + kGroup * g;
    for (std::int64_t i = counts[g]; i < kGroup; ++i) x[i] = x[0];  // the padding must not widen the range
    levels[g] = levels_of(x, steps[g]);
  }
  const float least = bits_float(largest_magnitude(b.x, kBlock)) / 127.0f;
  b.scale = least;
  if (!round_to_half(b.scale)) return kScaleTooLarge;
  if (b.scale == 0.0f) return nullptr;
  float chosen = q4_scale(least, levels);
  if (round_to_half(chosen)) b.scale = chosen;
  for (int g = 0; g < 2; ++g) {
    if (counts[g] == 0) continue;
    quantise_group(levels[g], g, b);
    std::fill(b.q + kGroup * g + counts[g], b.q + kGroup * (g + 1), std::int8_t{0});
  }
  return nullptr;
}

// Block `block` of one output in the target's terms. Returns what is wrong, or null.
const char* convert_block(const Row& row, std::int64_t block, std::int64_t k, Format format, Block& out) {
  std::int64_t counts[2];
  float steps[2] = {};
  for (int g = 0; g < 2; ++g) {
    const std::int64_t group = 2 * block + g;
    counts[g] = std::clamp(k - group * kGroup, std::int64_t{0}, kGroup);
    if (counts[g] == 0) continue;
    float x[kGroup];
    if (format == Format::Q4 && !is_float(row.encoding)) {
      FileGroup in_file;
      read_group(row.encoding, row.bytes, group, in_file);
      if (!std::isfinite(in_file.scale[0]) || !std::isfinite(in_file.min)) return kNotFinite;
      for (int i = 0; i < kGroup; ++i) x[i] = static_cast<float>(in_file.q[i]) * in_file.scale[0] + in_file.min;
      steps[g] = in_file.scale[0];
    } else {
      decode_group(row.encoding, row.bytes, group, counts[g], x);
    }
    if (!all_finite(x, kGroup)) return kNotFinite;
    std::copy(x, x + kGroup, out.x + kGroup * g);
  }
  if (format == Format::Q4) return to_q4(counts, steps, out);
  return to_q8(!is_float(row.encoding) && row.encoding != Encoding::Q8_0, out);
}

void store_half(std::byte* at, float x) {
  const std::uint16_t half = float_to_half(x);
  std::memcpy(at, &half, sizeof half);
}

void store_q8(const Block& b, int o, std::byte* quants, std::byte* terms) {
  for (int s = 0; s < 16; ++s) std::memcpy(quants + (s * kPanel + o) * 4, b.q + 4 * s, 4);
  store_half(terms + 2 * o, b.scale);
}

void store_q4(const Block& b, int o, std::byte* quants, std::byte* terms) {
  for (int v = 0; v < 8; ++v) {
    std::uint32_t low, high;
    std::memcpy(&low, b.q + 8 * v, 4);
    std::memcpy(&high, b.q + 8 * v + 4, 4);
    const std::uint32_t both = low | high << 4;
    std::memcpy(quants + (v * kPanel + o) * 4, &both, 4);
  }
  for (int g = 0; g < 2; ++g) {
    terms[kPanel * g + o] = std::byte{b.multiplier[g]};
    terms[kOffsetsAt + kPanel * g + o] = static_cast<std::byte>(b.offset[g]);
  }
  store_half(terms + kQ4ScalesAt + 2 * o, b.scale);
}

// Inputs [32 group, 32 group + count) of output o, in a float format. Returns what is wrong, or null.
const char* pack_floats(const Row& row, std::int64_t group, std::int64_t count, Format format, int o, std::byte* out) {
  float x[kGroup];
  decode_group(row.encoding, row.bytes, group, count, x);
  if (!all_finite(x, kGroup)) return kNotFinite;
  out += group * kGroup * step_bytes(format);
  if (format == Format::F32) {
    for (std::int64_t i = 0; i < count; ++i) std::memcpy(out + (i * kPanel + o) * 4, &x[i], 4);
  } else {
    const std::uint8_t* from = row.bytes + group * kGroup * 2;  // the bits as they are
    for (std::int64_t i = 0; i < count; ++i) std::memcpy(out + (i * kPanel + o) * 2, from + 2 * i, 2);
  }
  return nullptr;
}

// Block `block` of output o of a panel; for float formats, as many inputs.
const char* pack_block(const Row& row, std::int64_t block, int o, Weight& w, std::byte* panel) {
  if (!is_quantised(w.format)) {
    for (std::int64_t first = block * kBlock; first < std::min(w.k, (block + 1) * kBlock); first += kGroup) {
      const std::int64_t count = std::min(kGroup, w.k - first);
      if (const char* reason = pack_floats(row, first / kGroup, count, w.format, o, panel)) return reason;
    }
    return nullptr;
  }
  Block converted;
  if (const char* reason = convert_block(row, block, w.k, w.format, converted)) return reason;
  std::byte* quants = panel + block * block_bytes(w.format);
  std::byte* terms = quants + quants_bytes(w.format);
  if (w.format == Format::Q8) {
    store_q8(converted, o, quants, terms);
  } else {
    store_q4(converted, o, quants, terms);
  }
  return nullptr;
}

Failure pack_panels(const Outputs& outputs, std::int64_t begin, std::int64_t end, Weight& w) {
  for (std::int64_t panel = begin; panel < end; ++panel) {
    Row rows[kPanel];  // those past the last output stay empty
    for (std::int64_t o = 0; o < std::min(kPanel, w.n - panel * kPanel); ++o) rows[o] = outputs.row(panel * kPanel + o);
    for (std::int64_t block = 0; block < w.blocks(); ++block) {
      for (int o = 0; o < kPanel; ++o) {
        if (rows[o].bytes == nullptr) continue;  // padding: the memory is zero already
        const char* reason = pack_block(rows[o], block, o, w, w.panel(panel));
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
