// The thread team: every item once, barriers hold, sleeping and waking works. Runs under TSan in `make sanitize`.
#include <chrono>
#include <numeric>

#include "check.h"
#include "team.h"

using octavo::Team;

static void test_every_item_is_done_once_in_every_phase(int threads) {
  Team team(threads);
  for (int round = 0; round < 200; ++round) {
    const std::int64_t count = 1 + round % 37;
    std::vector<int> first(count, 0), second(count, 0);
    const std::function<void(int)> work = [&](int) {
      team.share(count, 1 + round % 3, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) first[i] += 1;
      });
      team.next_phase();
      team.share(count, 2, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) second[i] = first[count - 1 - i] + 1;  // needs the whole first phase
      });
    };
    team.run(work);
    for (std::int64_t i = 0; i < count; ++i) CHECK(first[i] == 1 && second[i] == 2);
  }
}

static void test_threads_that_fell_asleep_wake_up(int threads) {
  Team team(threads);
  std::vector<int> runs(threads, 0);
  for (int round = 0; round < 5; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    const std::function<void(int)> work = [&](int thread) {
      if (thread == 0) std::this_thread::sleep_for(std::chrono::milliseconds(3));  // the others sleep at the barrier
      team.barrier();
      runs[thread] += 1;
    };
    team.run(work);
  }
  for (int count : runs) CHECK(count == 5);
}

static void test_reset_runs_once_a_barrier(int threads) {
  Team team(threads);
  int resets = 0;
  const std::function<void(int)> work = [&](int) {
    for (int i = 0; i < 100; ++i) team.barrier([&] { ++resets; });
  };
  team.run(work);
  CHECK(resets == 100);
}

int main() {
  for (int threads : {1, 2, 4}) {
    test_every_item_is_done_once_in_every_phase(threads);
    test_threads_that_fell_asleep_wake_up(threads);
    test_reset_runs_once_a_barrier(threads);
  }
  return 0;
}
