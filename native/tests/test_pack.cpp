// Packing: what comes out of `pack` and `unpack_row` is what plain dequantisers, written here after GGUF's block
// descriptions, read from the same bytes. Inputs are exactly sized, so that the sanitizer build sees a step outside.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "check.h"
#include "formats/fp16.h"
#include "formats/pack.h"
#include "simd/kernels.h"

using namespace octavo;

namespace {

using Bytes = std::vector<std::uint8_t>;
constexpr const char* kBlockEncodings[] = {"q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k"};
constexpr const char* kFloatEncodings[] = {"f32", "f16", "bf16"};

float half_at(const std::uint8_t* p) { return half_to_float(static_cast<std::uint16_t>(p[0] | p[1] << 8)); }

void put_half(std::uint8_t* p, float x) {
  const std::uint16_t half = float_to_half(x);
  p[0] = static_cast<std::uint8_t>(half);
  p[1] = static_cast<std::uint8_t>(half >> 8);
}

// Values of one block, in double, which holds them exactly.
void dequantise_32(const std::string& e, const std::uint8_t* b, double* y) {
  const double d = half_at(b);
  const double m = half_at(b + 2);
  for (int i = 0; i < 16; ++i) {
    for (int high = 0; high < 2; ++high) {
      const int at = 16 * high + i, shift = 4 * high;
      const auto fifth = [&](const std::uint8_t* bits) { return (bits[at / 8] >> at % 8 & 1) * 16; };
      if (e == "q8_0") y[at] = d * static_cast<std::int8_t>(b[2 + at]);
      if (e == "q4_0") y[at] = d * ((b[2 + i] >> shift & 15) - 8);
      if (e == "q4_1") y[at] = d * (b[4 + i] >> shift & 15) + m;
      if (e == "q5_0") y[at] = d * ((b[6 + i] >> shift & 15) + fifth(b + 2) - 16);
      if (e == "q5_1") y[at] = d * ((b[8 + i] >> shift & 15) + fifth(b + 4)) + m;
    }
  }
}

void dequantise_4k_5k(bool five, const std::uint8_t* b, double* y) {
  const std::uint8_t *scales = b + 4, *high = b + 16, *q = b + (five ? 48 : 16);
  for (int is = 0; is < 8; ++is) {
    const int sc = is < 4 ? scales[is] & 63 : (scales[is + 4] & 0xF) | ((scales[is - 4] >> 6) << 4);
    const int m = is < 4 ? scales[is + 4] & 63 : (scales[is + 4] >> 4) | ((scales[is] >> 6) << 4);
    for (int l = 0; l < 32; ++l) {
      const std::uint8_t byte = q[32 * (is / 2) + l];
      int value = is % 2 == 0 ? byte & 0xF : byte >> 4;
      if (five && (high[l] & 1 << is) != 0) value += 16;
      *y++ = static_cast<double>(half_at(b)) * sc * value - static_cast<double>(half_at(b + 2)) * m;
    }
  }
}

void dequantise_6k(const std::uint8_t* b, double* y) {
  const std::uint8_t *ql = b, *qh = b + 128, *sc = b + 192;
  const double d = half_at(b + 208);
  for (int n = 0; n < 256; n += 128, y += 128, ql += 64, qh += 32, sc += 8) {
    for (int l = 0; l < 32; ++l) {
      const auto scale = [&](int i) { return d * static_cast<std::int8_t>(sc[l / 16 + i]); };
      y[l] = scale(0) * (((ql[l] & 0xF) | (qh[l] & 3) << 4) - 32);
      y[l + 32] = scale(2) * (((ql[l + 32] & 0xF) | (qh[l] >> 2 & 3) << 4) - 32);
      y[l + 64] = scale(4) * ((ql[l] >> 4 | (qh[l] >> 4 & 3) << 4) - 32);
      y[l + 96] = scale(6) * ((ql[l + 32] >> 4 | (qh[l] >> 6 & 3) << 4) - 32);
    }
  }
}

// A part with the bytes it points at.
struct Source {
  std::string encoding;
  std::int64_t rows, cols;
  Bytes bytes;

  std::int64_t row_bytes() const { return static_cast<std::int64_t>(bytes.size()) / rows; }

  WeightPart part(const std::vector<std::int32_t>* order = nullptr) const {
    WeightPart p;
    p.data = bytes.data();
    p.bytes = static_cast<std::int64_t>(bytes.size());
    p.encoding = *parse_encoding(encoding);
    p.rows = rows;
    p.cols = cols;
    if (order != nullptr) {
      p.row_order = order->data();
      p.row_order_count = static_cast<std::int64_t>(order->size());
    }
    return p;
  }

  std::vector<double> row(std::int64_t r) const {
    const std::uint8_t* b = bytes.data() + r * row_bytes();
    std::vector<double> y(static_cast<std::size_t>(cols));
    const BlockShape shape = block_shape(*parse_encoding(encoding));
    for (std::int64_t first = 0; first < cols; first += shape.values, b += shape.bytes) {
      double* to = y.data() + first;
      if (encoding == "f32") {
        float x;
        std::memcpy(&x, b, 4);
        *to = x;
      } else if (encoding == "f16") {
        *to = half_at(b);
      } else if (encoding == "bf16") {
        *to = bf16_to_float(static_cast<std::uint16_t>(b[0] | b[1] << 8));
      } else if (shape.values == 32) {
        dequantise_32(encoding, b, to);
      } else if (encoding == "q6_k") {
        dequantise_6k(b, to);
      } else {
        dequantise_4k_5k(encoding == "q5_k", b, to);
      }
    }
    return y;
  }
};

Source random_source(const std::string& encoding, std::int64_t rows, std::int64_t cols, Rng& rng) {
  const BlockShape shape = block_shape(*parse_encoding(encoding));
  Source s{encoding, rows, cols, Bytes(static_cast<std::size_t>(rows * (cols / shape.values) * shape.bytes))};
  for (std::uint8_t& byte : s.bytes) byte = static_cast<std::uint8_t>(rng.next());
  for (std::size_t at = 0; at < s.bytes.size(); at += static_cast<std::size_t>(shape.bytes)) {
    std::uint8_t* b = s.bytes.data() + at;
    const float x = rng.uniform(-1, 1);
    if (encoding == "f32") std::memcpy(b, &x, 4);
    if (encoding == "f16") put_half(b, x);
    if (encoding == "bf16") b[0] = 7, b[1] = static_cast<std::uint8_t>(float_bits(x) >> 24 & 0xbf);
    if (shape.values > 1) put_half(b + (encoding == "q6_k" ? 208 : 0), rng.uniform(-0.05f, 0.05f));
    if (encoding == "q4_1" || encoding == "q5_1" || encoding == "q4_k" || encoding == "q5_k") {
      put_half(b + 2, rng.uniform(-0.5f, 0.5f));
    }
  }
  return s;
}

Source floats(const std::vector<float>& x) {
  Source s{"f32", 1, static_cast<std::int64_t>(x.size()), Bytes(4 * x.size())};
  std::memcpy(s.bytes.data(), x.data(), s.bytes.size());
  return s;
}

Weight pack_one(const Source& s, Format format) {
  Packed packed = pack({s.part()}, format, false, 1);
  if (!packed.error.empty()) std::fprintf(stderr, "%s: %s\n", s.encoding.c_str(), packed.error.c_str());
  CHECK(packed.error.empty());
  return std::move(packed.weight);
}

std::vector<float> unpack(const Weight& w, std::int64_t row) {
  std::vector<float> x(static_cast<std::size_t>(w.k));
  scalar_kernels().unpack_row(w, row, x.data());
  return x;
}

void check_equal(const Weight& w, std::int64_t output, const Source& s, std::int64_t row) {
  const std::vector<float> got = unpack(w, output);
  const std::vector<double> expected = s.row(row);
  for (std::size_t i = 0; i < got.size(); ++i) CHECK(got[i] == static_cast<float>(expected[i]));
}

void check_exact(const std::string& encoding, Format format, std::int64_t cols, Rng& rng) {
  const Source s = random_source(encoding, 21, cols, rng);
  const Weight w = pack_one(s, format);
  CHECK(w.n == 21 && w.k == cols && w.format == format);
  for (std::int64_t r = 0; r < s.rows; ++r) check_equal(w, r, s, r);
}

void exact_formats_hold_every_value_of_the_file() {
  Rng rng{1};
  for (const char* e : kFloatEncodings) {
    for (std::int64_t cols : {1, 31, 32, 33, 100}) check_exact(e, Format::F32, cols, rng);
  }
  for (std::int64_t cols : {1, 31, 32, 33, 100}) {
    check_exact("f16", Format::F16, cols, rng);
    check_exact("bf16", Format::BF16, cols, rng);
  }
  for (const char* e : kBlockEncodings) check_exact(e, Format::F32, 512, rng);
}

// Whole multiples of one scale need no rounding.
void blocks_on_one_grid_are_kept_exactly() {
  Rng rng{11};
  std::vector<float> x(96);
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = 0.25f * static_cast<float>(i % 64 == 0 ? 127 : static_cast<int>(rng.next() % 255) - 127);
  }
  CHECK(unpack(pack_one(floats(x), Format::Q8), 0) == x);
}

// The file's levels are not kept exactly, but nearly: the error is a fraction of the distance between two of them.
void files_of_four_bits_keep_their_levels_nearly() {
  Rng rng{12};
  for (const char* e : {"q4_0", "q4_1", "q4_k"}) {
    const Source s = random_source(e, 64, 512, rng);
    const Weight w = pack_one(s, Format::Q4);
    double squares = 0, steps = 0;
    for (std::int64_t r = 0; r < s.rows; ++r) {
      const std::vector<float> got = unpack(w, r);
      const std::vector<double> x = s.row(r);
      for (std::int64_t first = 0; first < s.cols; first += kGroup) {
        const auto begin = x.begin() + first;
        const double step = (*std::max_element(begin, begin + kGroup) - *std::min_element(begin, begin + kGroup)) / 15;
        steps += kGroup * step * step;
        for (std::int64_t i = first; i < first + kGroup; ++i) {
          const double off = got[static_cast<std::size_t>(i)] - x[static_cast<std::size_t>(i)];
          squares += off * off;
        }
      }
    }
    const double error = std::sqrt(squares / steps);
    if (error > 0.2) std::fprintf(stderr, "%s: %f of a step\n", e, error);
    CHECK(error <= 0.2);  // rounding to levels at random costs 0.29
  }
}

// |x - packed| of a block against what its scale, its steps and their rounding allow.
void check_requantised(const Source& s, Format format) {
  const Weight w = pack_one(s, format);
  for (std::int64_t r = 0; r < s.rows; ++r) {
    const std::vector<float> got = unpack(w, r);
    const std::vector<double> x = s.row(r);
    const auto range = [&](std::int64_t first, std::int64_t count) {
      const auto found = std::minmax_element(x.begin() + first,
                                             x.begin() + std::min(first + count, static_cast<std::int64_t>(x.size())));
      return std::pair<double, double>(*found.first, *found.second);
    };
    for (std::int64_t i = 0; i < s.cols; ++i) {
      const auto [low, high] = range(i / kBlock * kBlock, kBlock);
      const double amax = std::max(std::fabs(low), std::fabs(high));
      const bool searched = format == Format::Q8 && !is_float(*parse_encoding(s.encoding));
      const double scale = amax / (searched ? 96 : 127);
      double most = scale / 2 * 1.001 + amax / 2048;
      if (format == Format::Q4) {  // half a step, and what a step and the offset may be off: half a scale each
        const auto [group_low, group_high] = range(i / kGroup * kGroup, kGroup);
        most += (group_high - group_low) / 30 + 2 * scale * 4.25;
      }
      CHECK(std::fabs(got[static_cast<std::size_t>(i)] - x[static_cast<std::size_t>(i)]) <= most + 1e-7);
    }
  }
}

void requantised_formats_stay_within_half_a_step() {
  Rng rng{2};
  for (const char* e : kFloatEncodings) {
    for (std::int64_t cols : {1, 33, 96, 256}) {
      check_requantised(random_source(e, 9, cols, rng), Format::Q8);
      check_requantised(random_source(e, 9, cols, rng), Format::Q4);
    }
  }
  for (const char* e : {"q4_0", "q4_1", "q5_1", "q4_k", "q5_k", "q6_k"}) {
    check_requantised(random_source(e, 9, 512, rng), Format::Q8);
  }
}

void parts_follow_one_another_in_their_row_order() {
  Rng rng{3};
  const Source a = random_source("q4_0", 20, 64, rng), b = random_source("q4_1", 5, 64, rng);
  std::vector<std::int32_t> order(20);
  for (int i = 0; i < 20; ++i) order[static_cast<std::size_t>(i)] = (i * 7 + 3) % 20;
  const Packed packed = pack({b.part(), a.part(&order), b.part()}, Format::F32, false, 2);
  CHECK(packed.error.empty() && packed.weight.n == 30);
  for (std::int64_t r = 0; r < 5; ++r) check_equal(packed.weight, r, b, r), check_equal(packed.weight, 25 + r, b, r);
  for (std::int64_t r = 0; r < 20; ++r) check_equal(packed.weight, 5 + r, a, order[static_cast<std::size_t>(r)]);
}

void interleaving_puts_eight_gate_and_eight_up_rows_in_a_panel() {
  Rng rng{4};
  for (std::int64_t rows : {1, 8, 13, 32}) {
    const Source gate = random_source("f32", rows, 40, rng), up = random_source("f16", rows, 40, rng);
    const Packed packed = pack({gate.part(), up.part()}, Format::F32, true, 2);
    const Weight& w = packed.weight;
    CHECK(packed.error.empty() && w.n == (rows + 7) / 8 * 16);
    for (std::int64_t o = 0; o < w.n; ++o) {
      const std::int64_t row = o / 16 * 8 + o % 8;
      if (row < rows) {
        check_equal(w, o, o % 16 < 8 ? gate : up, row);
      } else {
        const std::vector<float> x = unpack(w, o);
        CHECK(std::all_of(x.begin(), x.end(), [](float value) { return value == 0.0f; }));
      }
    }
  }
}

void any_number_of_threads_packs_the_same_bytes() {
  Rng rng{5};
  const Source s = random_source("q6_k", 100, 512, rng);
  const Weight one = pack_one(s, Format::Q8);
  for (int threads : {2, 3, 64}) {
    const Packed many = pack({s.part()}, Format::Q8, false, threads);
    const auto bytes = static_cast<std::size_t>(one.bytes());
    CHECK(many.error.empty() && std::memcmp(one.data.get(), many.weight.data.get(), bytes) == 0);
  }
}

void padding_is_zero() {
  Rng rng{6};
  const Source s = random_source("f32", 3, 33, rng);
  for (Format format : {Format::F32, Format::Q8, Format::Q4}) {
    Weight w = pack_one(s, format);
    w.n = 16;
    for (std::int64_t o = 3; o < 16; ++o) {
      for (float x : unpack(w, o)) CHECK(x == 0.0f);
    }
  }
}

void check_refused(const WeightPart& part, Format format, const std::string& words, bool interleave = false) {
  const Packed packed = pack({part, part}, format, interleave, 2);
  if (packed.error.find(words) == std::string::npos) std::fprintf(stderr, "got: %s\n", packed.error.c_str());
  CHECK(packed.error.find(words) != std::string::npos && packed.weight.data == nullptr);
}

void sizes_that_disagree_are_refused() {
  Rng rng{7};
  const Source s = random_source("q4_k", 4, 512, rng);
  const auto refused = [&](auto change, const std::string& words) {
    WeightPart p = s.part();
    change(p);
    check_refused(p, Format::F32, words);
  };
  refused([](WeightPart& p) { --p.bytes; }, "part 0: has 1151 bytes, its shape needs 1152");
  refused([](WeightPart& p) { ++p.bytes; }, "its shape needs 1152");
  refused([](WeightPart& p) { p.cols = 500; }, "500 cols are not whole blocks of 256");
  refused([](WeightPart& p) { p.rows = 0; }, "must be positive");
  refused([](WeightPart& p) { p.cols = -256; }, "must be positive");
  refused([](WeightPart& p) { p.rows = std::int64_t{1} << 60; }, "overflows 64 bits");
  refused([](WeightPart& p) { p.cols = std::int64_t{1} << 62, p.encoding = Encoding::F32; }, "overflows 64 bits");

  std::vector<std::int32_t> order = {0, 1, 4, 2};
  check_refused(s.part(&order), Format::F32, "a row that does not exist");
  order = {0, -1, 2, 3};
  check_refused(s.part(&order), Format::F32, "a row that does not exist");
  order = {0, 1, 2};
  check_refused(s.part(&order), Format::F32, "one entry a row");
  check_refused(random_source("q6_k", 4, 512, rng).part(), Format::Q4, "cannot be packed as q4");
  check_refused(s.part(), Format::F16, "cannot be packed as f16");

  const Source other = random_source("q4_k", 4, 256, rng), fewer = random_source("q4_k", 3, 512, rng);
  CHECK(pack({s.part(), other.part()}, Format::F32, false, 1).error.find("part 1") != std::string::npos);
  CHECK(pack({s.part(), fewer.part()}, Format::F32, true, 1).error.find("equal rows") != std::string::npos);
  CHECK(pack({s.part()}, Format::F32, true, 1).error.find("exactly two") != std::string::npos);
  CHECK(!pack({}, Format::F32, false, 1).error.empty());
}

void values_no_format_holds_are_refused_with_their_row() {
  Rng rng{8};
  for (const char* e : kFloatEncodings) {
    for (Format format : {Format::F32, Format::Q8, Format::Q4}) {
      Source s = random_source(e, 40, 48, rng);
      std::uint8_t* x = s.bytes.data() + 37 * s.row_bytes() + 47 * block_shape(*parse_encoding(e)).bytes;
      std::memset(x, 0xff, static_cast<std::size_t>(block_shape(*parse_encoding(e)).bytes));  // a NaN
      check_refused(s.part(), format, "part 0: row 37: a weight or scale is not finite");
    }
  }
  for (const char* e : kBlockEncodings) {
    Source s = random_source(e, 5, 256, rng);
    const std::int64_t scale = 3 * s.row_bytes() + (std::string(e) == "q6_k" ? 208 : 0);
    put_half(s.bytes.data() + scale, std::numeric_limits<float>::infinity());
    for (Format format : {Format::F32, Format::Q8}) {
      check_refused(s.part(), format, "row 3: a weight or scale is not finite");
    }
  }
  Source large = random_source("f32", 2, 32, rng);
  const float x = 1e9f;
  std::memcpy(large.bytes.data() + large.row_bytes() + 8, &x, 4);
  check_refused(large.part(), Format::Q8, "row 1: a scale is too large for fp16");
  check_refused(large.part(), Format::Q4, "row 1: a scale is too large for fp16");
}

void padding_does_not_widen_the_range_of_the_last_group() {
  Rng rng{9};
  std::vector<float> x(37);
  for (float& value : x) value = rng.uniform(5.0f, 5.1f);
  check_requantised(floats(x), Format::Q4);
  for (float& value : x) value = -value;
  check_requantised(floats(x), Format::Q4);
}

// Near fp16's smallest numbers the scale may be rounded down so far that the largest weight lies past the last step.
void weights_past_the_last_step_are_clamped() {
  const float ulp = 0x1p-24f;
  const std::vector<float> x = {127 * 1.4f * ulp, -127 * 1.4f * ulp, 20 * ulp};
  CHECK(unpack(pack_one(floats(x), Format::Q8), 0) == std::vector<float>({127 * ulp, -127 * ulp, 20 * ulp}));
}

void tiny_weights_become_zeros_without_a_division_by_zero() {
  std::vector<float> x(32);
  for (int i = 0; i < 32; ++i) x[static_cast<std::size_t>(i)] = std::ldexp(i % 2 == 0 ? 1.0f : -1.0f, -120 - i);
  for (Format format : {Format::Q8, Format::Q4}) {
    for (float value : unpack(pack_one(floats(x), format), 0)) CHECK(value == 0.0f);
  }
}

void memory_is_aligned_and_zeroed() {
  for (std::size_t bytes : {std::size_t{1}, std::size_t{4096}, std::size_t{5} << 20}) {
    const AlignedBytes memory = allocate_aligned(bytes);
    CHECK(memory != nullptr && reinterpret_cast<std::uintptr_t>(memory.get()) % 64 == 0);
    CHECK(std::all_of(memory.get(), memory.get() + bytes, [](std::byte b) { return b == std::byte{0}; }));
  }
  CHECK(allocate_aligned(std::numeric_limits<std::size_t>::max()) == nullptr);
  CHECK(allocate_aligned(std::size_t{1} << 60) == nullptr);
}

}  // namespace

int main() {
  exact_formats_hold_every_value_of_the_file();
  blocks_on_one_grid_are_kept_exactly();
  files_of_four_bits_keep_their_levels_nearly();
  requantised_formats_stay_within_half_a_step();
  parts_follow_one_another_in_their_row_order();
  interleaving_puts_eight_gate_and_eight_up_rows_in_a_panel();
  any_number_of_threads_packs_the_same_bytes();
  padding_is_zero();
  sizes_that_disagree_are_refused();
  values_no_format_holds_are_refused_with_their_row();
  tiny_weights_become_zeros_without_a_division_by_zero();
  padding_does_not_widen_the_range_of_the_last_group();
  weights_past_the_last_step_are_clamped();
  memory_is_aligned_and_zeroed();
  return 0;
}
