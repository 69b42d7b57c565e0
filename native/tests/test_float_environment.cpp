// Bits do not depend on the float environment of the calling thread: a library may have told the CPU to flush
// denormals (-ffast-math does, when it is loaded), and new threads inherit that.
#include "check.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "formats/pack.h"
#include "ops/rope.h"

using namespace octavo;

namespace {

// Flush to zero, denormals are zero, round toward zero, for as long as it lives; then the thread's own is back, and
// nothing inside has changed it.
class Hostile {
 public:
  Hostile() : saved_(_mm_getcsr()) { _mm_setcsr(kControl); }
  ~Hostile() {
    CHECK((_mm_getcsr() & ~0x3fu) == kControl);  // the low bits are sticky exception flags
    _mm_setcsr(saved_);
  }

 private:
  static constexpr unsigned kControl = 0x1f80u | 0x8040u | 0x6000u;
  unsigned saved_;
};

Packed pack_halves(Format format, int threads) {
  static const std::vector<std::uint16_t> weights = [] {
    std::vector<std::uint16_t> w(64 * 64);
    Rng rng;
    for (std::uint16_t& x : w) x = static_cast<std::uint16_t>(rng.next() & 0x83ffu);  // denormals of both signs
    return w;
  }();
  WeightPart part;
  part.data = reinterpret_cast<const std::uint8_t*>(weights.data());
  part.bytes = static_cast<std::int64_t>(weights.size() * sizeof weights[0]);
  part.encoding = Encoding::F16;
  part.rows = part.cols = 64;
  return pack({part}, format, false, threads);
}

void test_packing() {
  for (Format format : {Format::F32, Format::Q8, Format::Q4}) {
    for (int threads : {1, 3}) {
      const Packed expected = pack_halves(format, threads);
      CHECK(expected.error.empty());
      const Packed got = [&] {
        const Hostile hostile;
        return pack_halves(format, threads);
      }();
      CHECK(got.error.empty());
      CHECK(std::memcmp(got.weight.data.get(), expected.weight.data.get(),
                        static_cast<std::size_t>(got.weight.bytes())) == 0);
    }
  }
}

void test_rope_tables() {
  const auto make = [] {
    RopeTable table(rope_frequencies(500000.0, 64));
    table.reserve(300);
    return table;
  };
  const RopeTable expected = make();
  const RopeTable got = [&] {
    const Hostile hostile;
    return make();
  }();
  CHECK(std::memcmp(got.cos(0), expected.cos(0), sizeof(float) * 300 * 64) == 0);
}

}  // namespace

int main() {
  test_packing();
  test_rope_tables();
  return 0;
}
#else
int main() { return 0; }  // the environment is set on x86-64 only
#endif
