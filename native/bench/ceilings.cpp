#include "bench/ceilings.h"

#include <chrono>
#include <cstring>
#include <string_view>
#include <vector>

namespace octavo {
namespace {

constexpr std::int64_t kPartUnit = 1024;  // 256 bytes for each of four streams

// A table that tests planted has the loops of the best one, which it is made from.
const CeilingLoops& loops_of(const Kernels& kernels) {
  std::string_view name = kernels.name;
  if (name.substr(0, 7) == "faulty-") name = find_kernels("auto")->name;
#if defined(__x86_64__)
  if (name == "amx") return amx_ceilings();
  if (name == "avx512") return avx512_ceilings();
  if (name == "avx2") return avx2_ceilings();
#endif
  return scalar_ceilings();
}

}  // namespace

Ceilings::Ceilings(int threads, const Kernels& kernels, std::int64_t buffer_bytes)
    : team_(threads), loops_(loops_of(kernels)), part_bytes_(buffer_bytes / threads / kPartUnit * kPartUnit) {}

// From the moment all threads are there until the last is done.
template <class Pass>
double Ceilings::seconds(Pass pass) {
  using Clock = std::chrono::steady_clock;
  Clock::time_point begin, end;
  team_.run([&](int thread) {
    team_.barrier([&] { begin = Clock::now(); });
    pass(thread);
    team_.barrier([&] { end = Clock::now(); });
  });
  return std::chrono::duration<double>(end - begin).count();
}

double Ceilings::integer(std::int64_t rounds) {
  std::vector<std::int64_t> done(static_cast<std::size_t>(team_.size()));
  const double s = seconds([&](int thread) { done[static_cast<std::size_t>(thread)] = loops_.integer(rounds); });
  return static_cast<double>(done[0]) * team_.size() / s;
}

double Ceilings::floats(std::int64_t rounds) {
  std::vector<std::int64_t> done(static_cast<std::size_t>(team_.size()));
  const double s = seconds([&](int thread) { done[static_cast<std::size_t>(thread)] = loops_.floats(rounds); });
  return static_cast<double>(done[0]) * team_.size() / s;
}

double Ceilings::read(int streams) {
  if (buffer_ == nullptr) {
    buffer_ = allocate_aligned(static_cast<std::size_t>(part_bytes_ * team_.size()));
    if (buffer_ == nullptr) return 0.0;
    // Written once: pages that never were are all one page of zeros. Each part by the thread that will read it.
    team_.run([&](int thread) {
      std::memset(buffer_.get() + thread * part_bytes_, thread + 1, static_cast<std::size_t>(part_bytes_));
    });
  }
  const double s =
      seconds([&](int thread) { loops_.read(buffer_.get() + thread * part_bytes_, part_bytes_, streams); });
  return static_cast<double>(part_bytes_) * team_.size() / s;
}

}  // namespace octavo
