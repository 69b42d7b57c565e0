#include "team.h"

#include <algorithm>
#include <climits>

#include "simd/float_environment.h"

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace octavo {
namespace {

void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#endif
}

long process_id() {
#if defined(__linux__)
  return static_cast<long>(getpid());
#else
  return 0;
#endif
}

}  // namespace

// Either the publisher sees the sleeper's count, or the sleeper sees the new value: both sides are seq_cst, and the
// kernel compares the word again before it lets a thread sleep.
void Team::publish(std::atomic<std::uint32_t>& word) {
  word.fetch_add(1, std::memory_order_seq_cst);
#if defined(__linux__)
  if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#endif
}

std::int64_t Team::wait_for_change(std::atomic<std::uint32_t>& word, std::uint32_t old, int spins) {
  for (int spin = 0; spin < spins; ++spin) {
    if (word.load(std::memory_order_acquire) != old) return 0;
    pause_briefly();
  }
  const Clock::time_point begin = Clock::now();
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (word.load(std::memory_order_seq_cst) == old) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
#else
    std::this_thread::yield();
#endif
  }
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count();
}

Team::Team(int threads) : size_(threads < 1 ? 1 : threads), owner_(process_id()) {
  workers_.reserve(static_cast<std::size_t>(size_ - 1));
  try {
    for (int thread = 1; thread < size_; ++thread) workers_.emplace_back([this, thread] { worker(thread); });
  } catch (...) {  // the system has no more threads: those there are must end before their handles do
    stop();
    throw;
  }
}

Team::~Team() {
  if (process_id() != owner_) {
    for (std::thread& worker : workers_) worker.detach();
    return;
  }
  stop();
}

void Team::stop() {
  stop_.store(true, std::memory_order_release);
  publish(epoch_);
  for (std::thread& worker : workers_) worker.join();
}

void Team::run(const std::function<void(int)>& work) {
  const Clock::time_point begin = Clock::now();
  active_ = begin < alone_until_ ? 1 : size_;
  next_.store(0, std::memory_order_relaxed);
  slept_.store(0, std::memory_order_relaxed);
  work_ = &work;
  if (active_ > 1) publish(epoch_);
  {
    FloatEnvironment environment;
    work(0);
  }
  barrier();
  if (active_ > 1) watch(begin);
}

// After a run of all: was a thread put aside? What the ends of phases cost on a quiet machine is a small part of a run.
void Team::watch(Clock::time_point begin) {
  const Clock::time_point now = Clock::now();
  const std::chrono::nanoseconds slept(slept_.load(std::memory_order_relaxed));
  if (slept > (size_ - 1) * std::max<std::chrono::nanoseconds>(kPutAside, (now - begin) / 3)) {
    alone_until_ = now + alone_for_;
    alone_for_ = std::min(2 * alone_for_, kAloneMost);
  } else if (now > alone_until_ + 2 * alone_for_) {  // all went well for as long as they have been kept apart
    alone_for_ = kAloneFirst;
  }
}

void Team::worker(int thread) {
  std::uint32_t seen = 0;
  for (;;) {
    wait_for_change(epoch_, seen, kStepSpins);
    ++seen;
    if (stop_.load(std::memory_order_acquire)) return;
    {
      FloatEnvironment environment;
      (*work_)(thread);
    }
    barrier();
  }
}

}  // namespace octavo
