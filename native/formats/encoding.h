// Encodings of a tensor's rows in a model file: plain floats, and the block formats of GGUF (ggml-quants.h). Rows are
// row-major; a row of a block format is whole blocks. Bytes come as they lie in the file: nothing here is aligned.
#pragma once
#include <cstdint>
#include <optional>
#include <string_view>

#include "formats/weight.h"

namespace octavo {

enum class Encoding : std::uint8_t { F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K };

std::optional<Encoding> parse_encoding(std::string_view name);  // "f32", "q4_k", ...

struct BlockShape {
  std::int64_t values = 1, bytes = 0;
};
constexpr BlockShape block_shape(Encoding e) {
  switch (e) {
    case Encoding::F32:
      return {1, 4};
    case Encoding::F16:
      return {1, 2};
    case Encoding::BF16:
      return {1, 2};
    case Encoding::Q8_0:
      return {32, 34};
    case Encoding::Q4_0:
      return {32, 18};
    case Encoding::Q4_1:
      return {32, 20};
    case Encoding::Q5_0:
      return {32, 22};
    case Encoding::Q5_1:
      return {32, 24};
    case Encoding::Q4_K:
      return {256, 144};
    case Encoding::Q5_K:
      return {256, 176};
    case Encoding::Q6_K:
      return {256, 210};
  }
  return {};
}
constexpr bool is_float(Encoding e) { return block_shape(e).values == 1; }

// 32 consecutive weights of a quantised row: w = scale[i / 16] * q + min. Scales and min are exact in float32.
struct FileGroup {
  std::int8_t q[kGroup];
  float scale[2];  // equal but for Q6_K
  float min;       // 0 where the encoding has none; Q4_0 counts from its smallest value: q in 0..15, min = -8 scale
};
void read_group(Encoding e, const std::uint8_t* row, std::int64_t group, FileGroup& out);

// 32 weights of any encoding as floats; those from `count` on are zero. Block formats: float(q) * scale, or
// fma(float(q), scale, min) where there is a min.
void decode_group(Encoding e, const std::uint8_t* row, std::int64_t group, std::int64_t count, float (&out)[kGroup]);

}  // namespace octavo
