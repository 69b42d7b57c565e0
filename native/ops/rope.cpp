#include "ops/rope.h"

#include <utility>

#include "simd/float_environment.h"
#include "simd/math.h"

namespace octavo {

std::vector<double> rope_frequencies(double theta, int rotary_dim) {
  const FloatEnvironment environment;
  std::vector<double> inv_freq(static_cast<std::size_t>(rotary_dim / 2));
  for (std::size_t i = 0; i < inv_freq.size(); ++i) {
    inv_freq[i] = math::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(rotary_dim));
  }
  return inv_freq;
}

RopeTable::RopeTable(std::vector<double> inv_freq, double magnitude)
    : inv_freq_(std::move(inv_freq)), magnitude_(magnitude) {}

void RopeTable::reserve(std::int64_t positions) {
  if (positions <= positions_) return;
  const FloatEnvironment environment;
  std::int64_t grown = positions_ > 0 ? positions_ : 64;
  while (grown < positions) grown *= 2;
  const std::size_t n = inv_freq_.size();
  rows_.resize(static_cast<std::size_t>(grown) * 2 * n);
  for (std::int64_t p = positions_; p < grown; ++p) {
    float* out = rows_.data() + static_cast<std::size_t>(p) * 2 * n;
    for (std::size_t i = 0; i < n; ++i) {
      const double angle = static_cast<double>(p) * inv_freq_[i];
      out[i] = static_cast<float>(math::cos(angle) * magnitude_);
      out[n + i] = static_cast<float>(math::sin(angle) * magnitude_);
    }
  }
  positions_ = grown;
}

}  // namespace octavo
