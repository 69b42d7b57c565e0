// The canonical float environment (round to nearest, denormals kept) for as long as the object lives; then the thread's
// own is back. Whatever computes bits that are promised runs inside one: a library in the same process may have told
// the CPU to flush denormals, and a new thread inherits that.
#pragma once
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo {

class FloatEnvironment {
 public:
#if defined(__x86_64__)
  FloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~FloatEnvironment() { _mm_setcsr(saved_); }
#else
  FloatEnvironment() {}
#endif
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

#if defined(__x86_64__)
 private:
  unsigned saved_;
#endif
};

}  // namespace octavo
