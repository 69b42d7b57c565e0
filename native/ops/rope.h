// Rotary position embedding (Su et al., 2021) in the half-split form of Hugging Face's models: element i of a head's
// first rotary_dim elements is paired with element i + rotary_dim / 2; the rest of the head is left alone.
//   y1 = fma(x1, cos, -(x2 * sin)),  y2 = fma(x2, cos, x1 * sin)
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace octavo {

// inv_freq[i] = theta^(-2i / rotary_dim), i < rotary_dim / 2, in our own pow.
std::vector<double> rope_frequencies(double theta, int rotary_dim);

// cos and sin of position * inv_freq[i] for positions 0, 1, ..., computed in double by our own cos and sin, multiplied
// by `magnitude` (1 for plain rope; YaRN's attention factor) and rounded to float.
class RopeTable {
 public:
  explicit RopeTable(std::vector<double> inv_freq, double magnitude = 1.0);

  // Makes positions [0, positions) readable; grows by powers of two. Not thread-safe; moves the rows.
  void reserve(std::int64_t positions);
  std::int64_t positions() const { return positions_; }
  std::int64_t half() const { return static_cast<std::int64_t>(inv_freq_.size()); }  // rotary_dim / 2

  const float* cos(std::int64_t position) const { return row(position); }           // [half]
  const float* sin(std::int64_t position) const { return row(position) + half(); }  // [half]

 private:
  const float* row(std::int64_t position) const {
    return rows_.data() + static_cast<std::size_t>(2 * half() * position);
  }

  std::vector<double> inv_freq_;
  double magnitude_;
  std::int64_t positions_ = 0;
  std::vector<float> rows_;  // [positions][cos half, sin half]
};

}  // namespace octavo
