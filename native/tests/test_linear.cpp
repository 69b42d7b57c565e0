// Linear and unpack_row: every kernel table equals the scalar one bit for bit, and the scalar one equals a
// plain computation written here. Buffers are exactly sized, so that the sanitizer build sees a step outside.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "check.h"
#include "formats/fp16.h"
#include "simd/kernels.h"

using namespace octavo;

namespace {

constexpr Format kFormats[] = {Format::F32, Format::F16, Format::BF16, Format::Q8, Format::Q4};
constexpr Epilogue kEpilogues[] = {Epilogue::Store, Epilogue::Add, Epilogue::SiluMul};
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kCanary = -12345.0f;

bool same_bits(float a, float b) { return (std::isnan(a) && std::isnan(b)) || float_bits(a) == float_bits(b); }

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](float x, float y) { return same_bits(x, y); });
}

template <class T>
void put(Weight& w, std::int64_t offset, T value) {
  std::memcpy(w.data.get() + offset, &value, sizeof value);
}

void put_random_scales(Weight& w, std::int64_t offset, Rng& rng) {
  for (int o = 0; o < kPanel; ++o) put(w, offset + 2 * o, float_to_half(rng.uniform(-0.1f, 0.1f)));
}

// Terms of a q4 block, up to the edges of what weight.h allows, and scales. Some groups have two levels far apart.
void put_random_q4_terms(Weight& w, std::int64_t block, Rng& rng) {
  const std::int64_t terms = block + quants_bytes(Format::Q4);
  for (int i = 0; i < 2 * kPanel; ++i) {
    const bool two_levels = rng.next() % 8 == 0;
    const int multiplier = two_levels ? 255 : static_cast<int>(rng.next() % 18);
    const int room = 255 - multiplier * (two_levels ? 1 : 15);
    const int offset = -128 + static_cast<int>(rng.next() % static_cast<unsigned>(room + 1));
    put(w, terms + i, static_cast<std::uint8_t>(multiplier));
    put(w, terms + kOffsetsAt + i, static_cast<std::int8_t>(offset));
    for (int v = 0; two_levels && v < 4; ++v) {
      std::byte* four = w.data.get() + block + ((i / kPanel * 4 + v) * kPanel + i % kPanel) * 4;
      for (int k = 0; k < 4; ++k) four[k] &= std::byte{0x11};
    }
  }
  put_random_scales(w, terms + kQ4ScalesAt, rng);
}

// Random weights; the padding is random too, and must not matter.
Weight random_weight(Format format, std::int64_t n, std::int64_t k, Rng& rng) {
  Weight w;
  w.format = format;
  w.n = n;
  w.k = k;
  w.data = allocate_aligned(static_cast<std::size_t>(w.bytes()));
  CHECK(w.data != nullptr);
  for (std::int64_t i = 0; i < w.bytes(); i += 2) {
    const float x = rng.uniform(-1, 1);
    if (format == Format::F16) put(w, i, float_to_half(x));
    if (format == Format::BF16) put(w, i, static_cast<std::uint16_t>(float_bits(x) >> 16));
    if (format == Format::F32 && i % 4 == 0) put(w, i, x);
    if (is_quantised(format)) put(w, i, static_cast<std::uint16_t>(rng.next()));
  }
  if (!is_quantised(format)) return w;
  for (std::int64_t block = 0; block < w.bytes(); block += block_bytes(format)) {
    if (format == Format::Q8) put_random_scales(w, block + quants_bytes(format), rng);
    if (format == Format::Q4) put_random_q4_terms(w, block, rng);
  }
  return w;
}

template <class T>
T get(const Weight& w, std::int64_t offset) {
  T value;
  std::memcpy(&value, w.data.get() + offset, sizeof value);
  return value;
}

// One weight read by the layout's description in weight.h: w = scale * q (scale 1 where there is none).
struct Element {
  float q, scale;
};
Element element(const Weight& w, std::int64_t o, std::int64_t k) {
  const std::int64_t panel = o / kPanel * w.panel_bytes(), in_panel = o % kPanel;
  if (!is_quantised(w.format)) {
    const std::int64_t at = panel + k * step_bytes(w.format);
    if (w.format == Format::F32) return {get<float>(w, at + 4 * in_panel), 1};
    const auto bits = get<std::uint16_t>(w, at + 2 * in_panel);
    return {w.format == Format::F16 ? half_to_float(bits) : bf16_to_float(bits), 1};
  }
  const std::int64_t block = panel + k / 64 * (w.format == Format::Q8 ? 1088 : 640), i = k % 64;
  if (w.format == Format::Q8) {
    const auto q = get<std::int8_t>(w, block + (i / 4 * kPanel + in_panel) * 4 + i % 4);
    return {static_cast<float>(q), half_to_float(get<std::uint16_t>(w, block + 1024 + 2 * in_panel))};
  }
  const auto byte = get<std::uint8_t>(w, block + (i / 8 * kPanel + in_panel) * 4 + i % 4);
  const int q = i % 8 < 4 ? byte & 15 : byte >> 4;
  const int multiplier = get<std::uint8_t>(w, block + 512 + i / 32 * 16 + in_panel);
  const int offset = get<std::int8_t>(w, block + 544 + i / 32 * 16 + in_panel);
  return {static_cast<float>(multiplier * q + offset),
          half_to_float(get<std::uint16_t>(w, block + 576 + 2 * in_panel))};
}

// A job with everything it points at. Activations start at an odd float, rows are an odd number of floats apart.
struct Case {
  Weight w;
  std::int64_t rows;
  Epilogue epilogue;
  bool with_bias;
  std::vector<float> x, bias, residual;
  AlignedBytes xq, scratch;

  std::int64_t x_stride() const { return w.k + 1; }
  std::int64_t y_columns() const { return epilogue == Epilogue::SiluMul ? w.n / 2 : w.n; }
  std::int64_t y_stride() const { return y_columns() + 3; }

  Case(Format format, std::int64_t n, std::int64_t k, std::int64_t m, Epilogue e, bool bias_too, Rng& rng)
      : w(random_weight(format, n, k, rng)), rows(m), epilogue(e), with_bias(bias_too) {
    x.resize(static_cast<std::size_t>(1 + m * x_stride() - 1));
    for (float& value : x) value = rng.uniform(-2, 2);
    bias.resize(static_cast<std::size_t>(w.panels() * kPanel));
    for (float& value : bias) value = rng.uniform(-1, 1);
    residual.resize(static_cast<std::size_t>((m - 1) * y_stride() + y_columns()));
    for (float& value : residual) value = rng.uniform(-1, 1);
    quantize_rows();
  }

  void quantize_rows() {
    xq = allocate_aligned(static_cast<std::size_t>(rows * q_row_bytes(w.blocks())));
    scratch = allocate_aligned(static_cast<std::size_t>(linear_scratch_bytes(w)));
    CHECK(xq != nullptr && scratch != nullptr);
    for (std::int64_t r = 0; r < rows; ++r) scalar_kernels().quantize(x.data() + 1 + r * x_stride(), w.k, row(r).at);
  }

  QRow<std::byte> row(std::int64_t r) const { return {xq.get() + r * q_row_bytes(w.blocks()), w.blocks()}; }

  LinearJob job(std::vector<float>& y) const {
    LinearJob j;
    j.w = &w;
    if (is_quantised(w.format)) {
      j.xq = xq.get();
      j.scratch = scratch.get();
    } else {
      j.x = x.data() + 1;
      j.x_stride = x_stride();
    }
    j.rows = rows;
    j.bias = with_bias ? bias.data() : nullptr;
    j.epilogue = epilogue;
    j.residual = epilogue == Epilogue::Add ? residual.data() : nullptr;
    j.y = y.data();
    j.y_stride = y_stride();
    return j;
  }

  std::vector<float> empty_y() const { return std::vector<float>(residual.size(), kCanary); }

  std::vector<float> run(const Kernels& kernels) const {
    std::vector<float> y = empty_y();
    kernels.linear(job(y), 0, w.panels());
    return y;
  }
};

std::vector<const Kernels*> simd_tables() {
  std::vector<const Kernels*> tables;
  for (const std::string& name : kernel_names()) {
    if (name != "scalar") tables.push_back(find_kernels(name));
  }
  return tables;
}

// The sum of one output in the canonical order, or with its blocks (inputs) taken backwards.
float ordered_sum(const Case& c, std::int64_t row, std::int64_t o, bool backwards) {
  float acc = 0.0f;
  const bool quantised = is_quantised(c.w.format);
  const std::int64_t steps = quantised ? c.w.blocks() : c.w.k;
  for (std::int64_t i = 0; i < steps; ++i) {
    const std::int64_t step = backwards ? steps - 1 - i : i;
    if (!quantised) {
      acc = std::fma(element(c.w, o, step).q, c.x[static_cast<std::size_t>(1 + row * c.x_stride() + step)], acc);
      continue;
    }
    int dot = 0;
    for (std::int64_t k = step * kBlock; k < (step + 1) * kBlock; ++k) {
      dot += static_cast<int>(element(c.w, o, k).q) * c.row(row).q()[k];
    }
    acc = std::fma(static_cast<float>(dot), element(c.w, o, step * kBlock).scale * c.row(row).scales()[step], acc);
  }
  return acc;
}

// The same in double, with the sum of the magnitudes of its terms.
double exact_sum(const Case& c, std::int64_t row, std::int64_t o, double& magnitude) {
  double sum = magnitude = 0;
  for (std::int64_t k = 0; k < c.w.k; ++k) {
    const Element e = element(c.w, o, k);
    const double x = is_quantised(c.w.format) ? static_cast<double>(c.row(row).scales()[k / kBlock]) * c.row(row).q()[k]
                                              : c.x[static_cast<std::size_t>(1 + row * c.x_stride() + k)];
    const double term = static_cast<double>(e.scale) * e.q * x;
    sum += term;
    magnitude += std::fabs(term);
  }
  return sum;
}

void every_table_equals_scalar_bitwise_over_odd_shapes() {
  Rng rng{1};
  for (Format format : kFormats) {
    for (std::int64_t k : {1, 32, 63, 64, 65, 96, 576}) {
      for (std::int64_t n : {1, 8, 15, 16, 17, 48, 80}) {
        for (std::int64_t m : {1, 2, 3, 4, 5, 8, 9, 13, 16, 17, 31, 32, 33, 47, 64}) {
          const Epilogue epilogue = kEpilogues[rng.next() % 3];
          const std::int64_t outputs = epilogue == Epilogue::SiluMul ? (n + 15) / 16 * 16 : n;
          const Case c(format, outputs, k, m, epilogue, rng.next() % 2 == 0, rng);
          const std::vector<float> expected = c.run(scalar_kernels());
          for (const Kernels* table : simd_tables()) CHECK(same_bits(expected, c.run(*table)));
        }
      }
    }
  }
}

void scalar_follows_the_written_order_and_the_backward_order_differs() {
  Rng rng{2};
  for (Format format : kFormats) {
    int moved = 0;
    for (std::int64_t k : {100, 192, 576}) {
      const Case c(format, 17, k, 3, Epilogue::Store, false, rng);
      const std::vector<float> y = c.run(scalar_kernels());
      for (std::int64_t r = 0; r < c.rows; ++r) {
        for (std::int64_t o = 0; o < c.w.n; ++o) {
          const float value = y[static_cast<std::size_t>(r * c.y_stride() + o)];
          CHECK(same_bits(value, ordered_sum(c, r, o, false)));
          moved += !same_bits(value, ordered_sum(c, r, o, true));
          double magnitude;
          const double exact = exact_sum(c, r, o, magnitude);
          CHECK(std::fabs(value - exact) <= 1e-7 * static_cast<double>(k) * magnitude);
        }
      }
    }
    CHECK(moved > 20);
  }
}

void epilogues_follow_their_formulas() {
  Rng rng{3};
  for (Format format : kFormats) {
    for (bool with_bias : {false, true}) {
      Case c(format, 48, 64, 5, Epilogue::Store, with_bias, rng);
      const std::vector<float> sums = c.run(scalar_kernels());
      const std::int64_t stride = c.y_stride();
      c.epilogue = Epilogue::Add;
      const std::vector<float> added = c.run(scalar_kernels());
      c.with_bias = false;
      c.epilogue = Epilogue::Store;
      const std::vector<float> plain = c.run(scalar_kernels());
      c.with_bias = with_bias;
      c.epilogue = Epilogue::SiluMul;
      const std::vector<float> gated = c.run(scalar_kernels());
      for (std::int64_t r = 0; r < c.rows; ++r) {
        for (std::int64_t o = 0; o < c.w.n; ++o) {
          const auto at = static_cast<std::size_t>(r * stride + o);
          CHECK(sums[at] == plain[at] + (with_bias ? c.bias[static_cast<std::size_t>(o)] : 0.0f));
          CHECK(added[at] == c.residual[at] + sums[at]);
          if (o % 16 >= 8) continue;
          const double gate = sums[at], up = sums[at + 8], silu = gate / (1 + std::exp(-gate));
          const float got = gated[static_cast<std::size_t>(r * c.y_stride() + o / 16 * 8 + o % 8)];
          CHECK(std::fabs(got - silu * up) <= 1e-6 * std::fabs(silu * up) + 1e-30);
        }
      }
    }
  }
}

void add_may_write_over_its_residual() {
  Rng rng{4};
  for (const std::string& name : kernel_names()) {
    const Case c(Format::Q4, 33, 96, 6, Epilogue::Add, true, rng);
    const std::vector<float> expected = c.run(scalar_kernels());
    std::vector<float> y = c.residual;
    LinearJob job = c.job(y);
    job.residual = y.data();
    find_kernels(name)->linear(job, 0, c.w.panels());
    for (std::int64_t r = 0; r < c.rows; ++r) {
      for (std::int64_t o = 0; o < c.w.n; ++o) {
        const auto at = static_cast<std::size_t>(r * c.y_stride() + o);
        CHECK(same_bits(y[at], expected[at]));
      }
    }
  }
}

void columns_past_the_outputs_are_not_written() {
  Rng rng{5};
  for (const std::string& name : kernel_names()) {
    for (Format format : kFormats) {
      for (std::int64_t n : {1, 7, 15, 17, 40}) {
        const Case c(format, n, 40, 6, Epilogue::Store, true, rng);
        const std::vector<float> y = c.run(*find_kernels(name));
        for (std::int64_t at = 0; at < static_cast<std::int64_t>(y.size()); ++at) {
          CHECK((y[static_cast<std::size_t>(at)] == kCanary) == (at % c.y_stride() >= n));
        }
      }
    }
  }
}

void any_split_of_panels_and_rows_gives_the_same_bits() {
  Rng rng{6};
  for (const std::string& name : kernel_names()) {
    const Kernels& kernels = *find_kernels(name);
    for (Format format : kFormats) {
      for (std::int64_t m : {1, 2, 7, 35}) {
        const Case c(format, 16 * 11 - 3, 96, m, Epilogue::Store, true, rng);
        const std::vector<float> whole = c.run(kernels);
        for (std::int64_t cut = 0; cut <= c.w.panels(); ++cut) {
          std::vector<float> y = c.empty_y();
          kernels.linear(c.job(y), cut, c.w.panels());
          kernels.linear(c.job(y), 0, cut);
          CHECK(same_bits(whole, y));
        }
        std::vector<float> alone = c.empty_y();
        for (std::int64_t r = 0; r < m; ++r) {
          LinearJob job = c.job(alone);
          job.rows = 1;
          job.y += r * job.y_stride;
          if (job.xq != nullptr) job.xq = c.row(r).at;
          if (job.x != nullptr) job.x += r * job.x_stride;
          kernels.linear(job, 0, c.w.panels());
        }
        CHECK(same_bits(whole, alone));
      }
    }
  }
}

void a_nan_or_infinity_spoils_its_own_row_only() {
  Rng rng{7};
  for (const std::string& name : kernel_names()) {
    for (Format format : kFormats) {
      for (float bad : {kNaN, std::numeric_limits<float>::infinity()}) {
        Case c(format, 32, 70, 6, Epilogue::Store, false, rng);
        const std::vector<float> before = c.run(*find_kernels(name));
        const std::int64_t spoilt = 2;
        c.x[static_cast<std::size_t>(1 + spoilt * c.x_stride() + 69)] = bad;
        c.quantize_rows();
        const std::vector<float> after = c.run(*find_kernels(name));
        for (std::int64_t at = 0; at < static_cast<std::int64_t>(after.size()); ++at) {
          const auto i = static_cast<std::size_t>(at);
          if (at / c.y_stride() == spoilt && at % c.y_stride() < c.w.n) {
            CHECK(!std::isfinite(after[i]));
          } else {
            CHECK(same_bits(before[i], after[i]));
          }
        }
      }
    }
  }
}

void the_largest_integers_do_not_saturate() {
  Rng rng{8};
  // What takes the least and the greatest of int8: -128 and 127 = 17 * 15 - 128.
  for (Format format : {Format::Q8, Format::Q4}) {
    for (int sign : {-1, 1}) {
      Case c(format, 16, 128, 35, Epilogue::Store, false, rng);
      for (std::int64_t block = 0; block < c.w.bytes(); block += block_bytes(format)) {
        const std::uint8_t most = format == Format::Q4 ? 0xff : sign < 0 ? 0x80 : 0x7f;
        for (std::int64_t i = 0; i < quants_bytes(format); ++i) put(c.w, block + i, most);
        for (std::int64_t i = 0; format == Format::Q4 && i < 2 * kPanel; ++i) {
          put(c.w, block + quants_bytes(format) + i, std::uint8_t{17});
          put(c.w, block + quants_bytes(format) + kOffsetsAt + i, std::int8_t{-128});
        }
      }
      for (std::int64_t r = 0; r < c.rows; ++r) {
        const QRow<std::byte> row = c.row(r);
        std::fill(row.q(), row.q() + kBlock * row.blocks, static_cast<std::int8_t>(sign * 127));
        for (std::int64_t b = 0; b < row.blocks; ++b) {
          row.sums()[b].of_group[0] = row.sums()[b].of_group[1] = static_cast<std::int16_t>(32 * sign * 127);
          row.corrections()[b] = -128 * 64 * sign * 127;
        }
      }
      for (const std::string& name : kernel_names()) {
        const std::vector<float> y = c.run(*find_kernels(name));
        for (std::int64_t r = 0; r < c.rows; ++r) {
          for (std::int64_t o = 0; o < c.w.n; ++o) {
            CHECK(same_bits(y[static_cast<std::size_t>(r * c.y_stride() + o)], ordered_sum(c, r, o, false)));
          }
        }
      }
    }
  }
}

void unpack_row_gives_the_canonical_value_and_no_more() {
  Rng rng{10};
  for (const std::string& name : kernel_names()) {
    for (Format format : kFormats) {
      for (std::int64_t k : {1, 5, 8, 33, 63, 64, 65, 111, 128}) {
        const Weight w = random_weight(format, 19, k, rng);
        for (std::int64_t o = 0; o < w.n; ++o) {
          std::vector<float> row(static_cast<std::size_t>(k));
          find_kernels(name)->unpack_row(w, o, row.data());
          for (std::int64_t i = 0; i < k; ++i) {
            const Element e = element(w, o, i);
            CHECK(same_bits(row[static_cast<std::size_t>(i)], e.q * e.scale));
          }
        }
      }
    }
  }
}

}  // namespace

int main() {
  every_table_equals_scalar_bitwise_over_odd_shapes();
  scalar_follows_the_written_order_and_the_backward_order_differs();
  epilogues_follow_their_formulas();
  add_may_write_over_its_residual();
  columns_past_the_outputs_are_not_written();
  any_split_of_panels_and_rows_gives_the_same_bits();
  a_nan_or_infinity_spoils_its_own_row_only();
  the_largest_integers_do_not_saturate();
  unpack_row_gives_the_canonical_value_and_no_more();
  return 0;
}
