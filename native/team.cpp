#include "team.h"

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

void Team::wait_for_change(std::atomic<std::uint32_t>& word, std::uint32_t old, int spins) {
  for (int spin = 0; spin < spins; ++spin) {
    if (word.load(std::memory_order_acquire) != old) return;
    pause_briefly();
  }
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (word.load(std::memory_order_seq_cst) == old) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
#else
    std::this_thread::yield();
#endif
  }
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
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
  next_.store(0, std::memory_order_relaxed);
  work_ = &work;
  if (size_ > 1) publish(epoch_);
  {
    FloatEnvironment environment;
    work(0);
  }
  barrier();
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
