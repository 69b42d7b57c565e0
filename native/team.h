// The thread team: the caller and its workers run one function together, with barriers inside it.
//
// Waiting threads spin briefly and then sleep in the kernel, so that a busy neighbour on the same cores costs little
// (a team that only spins falls to a few percent of its speed). When a thread has been put aside for a neighbour, and
// the others have waited for it for a good part of a run, the caller works alone for a while: it keeps a core, while a
// team that meets in a barrier every few microseconds is as slow as its slowest. Each thread enters with the canonical
// float environment (round to nearest, denormals kept) and gets its own back.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace octavo {

class Team {
 public:
  // threads >= 1, the caller included. std::system_error when the system refuses one.
  explicit Team(int threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

  // Runs work(thread) once on every thread, 0 being the caller, or on the caller alone (see above); returns when all
  // have returned. One call at a time.
  // `work` must not throw.
  void run(const std::function<void(int)>& work);

  // Inside run: no thread goes on before all have arrived. `reset` runs once, on the last to arrive, before any goes
  // on.
  template <class Reset>
  void barrier(Reset reset) {
    const int active = active_;  // read before arriving: behind that the caller may begin another run
    if (active == 1) {
      reset();
      return;
    }
    const std::uint32_t generation = generation_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<std::uint32_t>(active)) {
      arrived_.store(0, std::memory_order_relaxed);
      reset();
      publish(generation_);
    } else {
      if (const std::int64_t slept = wait_for_change(generation_, generation, kBarrierSpins)) {
        slept_.fetch_add(slept, std::memory_order_relaxed);
      }
    }
  }
  void barrier() {
    barrier([] {});
  }

  // Inside run: hands out the indices 0 .. count-1 of one phase in chunks, to whoever asks. Call next_phase (a barrier)
  // between phases. Which thread takes what never changes a result: work items are independent.
  template <class Item>
  void share(std::int64_t count, std::int64_t chunk, Item item) {
    for (;;) {
      const std::int64_t begin = next_.fetch_add(chunk, std::memory_order_relaxed);
      if (begin >= count) return;
      item(begin, begin + chunk < count ? begin + chunk : count);
    }
  }
  void next_phase() {
    barrier([this] { next_.store(0, std::memory_order_relaxed); });
  }

 private:
  // Pauses of some 20 ns before a thread sleeps. In a barrier few: with busy neighbours the thread that is awaited may
  // have been put aside, and spinning keeps it so. Between steps the caller has its own work to do, some 100
  // microseconds of it: a worker that fell asleep there would have to be woken for every step.
  static constexpr int kBarrierSpins = 500, kStepSpins = 12000;

  using Clock = std::chrono::steady_clock;
  // The first time alone, and the longest: it doubles when the next try with all fails, too.
  static constexpr std::chrono::milliseconds kAloneFirst{10}, kAloneMost{320};
  static constexpr std::chrono::microseconds kPutAside{500};  // less is no sign of a neighbour

  void watch(Clock::time_point begin);
  void worker(int thread);
  void stop();
  void publish(std::atomic<std::uint32_t>& word);
  // Returns the nanoseconds for which the thread slept.
  std::int64_t wait_for_change(std::atomic<std::uint32_t>& word, std::uint32_t old, int spins);

  const int size_;
  const long owner_;  // the process that made the threads: a forked child has none of them
  const std::function<void(int)>* work_ = nullptr;
  int active_ = 1;  // threads in this run: all, or the caller alone
  Clock::time_point alone_until_{};
  std::chrono::milliseconds alone_for_ = kAloneFirst;
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<std::uint32_t> epoch_{0};
  alignas(64) std::atomic<std::uint32_t> generation_{0};
  alignas(64) std::atomic<std::uint32_t> arrived_{0};
  alignas(64) std::atomic<std::uint32_t> sleepers_{0};
  alignas(64) std::atomic<std::int64_t> slept_{0};  // nanoseconds in barriers, of all threads in this run
  alignas(64) std::atomic<std::int64_t> next_{0};
  std::vector<std::thread> workers_;
};

}  // namespace octavo
