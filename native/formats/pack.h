// From a file's tensors to a packed `Weight`.
//
//   to f32          from everything, dequantised (decode_group); f16, bf16: from the same encoding, bits copied
//   to q4           from q4_0, q4_1, q4_k, f32, f16, bf16: each group's levels (its least value, the step between
//   levels
//                   and their number) become multiples of a block's scale; that scale of 32, from max |x| / 127 to
//                   nearly twice as much, which fits the steps best is taken, and each weight goes to its nearest level
//   to q8           from everything: scale = max |x| / 127 rounded to fp16 (from quantised files the best of 16
//   scales),
//                   q = x / scale rounded to nearest even
// A weight that is not finite, or a scale that does not fit fp16, is an error.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "formats/encoding.h"
#include "formats/weight.h"

namespace octavo {

std::string_view format_name(Format f);  // "f32", "f16", "bf16", "q8", "q4"
std::optional<Format> parse_format(std::string_view name);

struct WeightPart {  // [rows][cols] of one tensor, read only
  const std::uint8_t* data = nullptr;
  std::int64_t bytes = 0;
  Encoding encoding = Encoding::F32;
  std::int64_t rows = 0, cols = 0;
  const std::int32_t* row_order = nullptr;  // [rows] or null: output i is row row_order[i] of the data
  std::int64_t row_order_count = 0;
};

struct Packed {
  Weight weight;
  std::string error;  // empty when all went well; else what is wrong, in which part and row
};

// Parts follow one another along the outputs. interleave: exactly two parts of as many rows each (gate, up), 8 + 8 in a
// panel as Epilogue::SiluMul wants them; n is then 16 * ceil(rows / 8), the rows added being zero.
Packed pack(const std::vector<WeightPart>& parts, Format format, bool interleave, int threads);

}  // namespace octavo
