// The thread team: every item once, barriers hold, sleeping and waking works. Runs under TSan in `make sanitize`.
#include <atomic>
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

static void sleep(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

static void test_threads_that_fell_asleep_wake_up(int threads) {
  Team team(threads);
  std::vector<int> runs(threads, 0);
  for (int round = 0; round < 5; ++round) {
    sleep(5);  // longer than they spin
    const std::function<void(int)> work = [&](int thread) { runs[thread] += 1; };
    team.run(work);
  }
  // A machine so busy that a thread is put aside may leave some to the caller.
  CHECK(runs[0] == 5);
  for (int count : runs) CHECK(count >= 1);
}

static void test_a_thread_that_keeps_the_others_waiting_leaves_the_work_to_the_caller_for_a_while(int threads) {
  Team team(threads);
  std::atomic<int> runs{0};
  const std::function<void(int)> slow = [&](int thread) {
    if (thread != 0) sleep(5);
    team.barrier();
  };
  const std::function<void(int)> count = [&](int) {
    runs += 1;
    team.barrier();
  };
  const auto runs_of_all = [&] {
    runs = 0;
    team.run(count);
    return runs.load() == threads;
  };
  team.run(slow);
  CHECK(threads == 1 || !runs_of_all());
  bool all = false;
  for (int i = 0; i < 100 && !all; ++i) {
    sleep(5);
    all = runs_of_all();
  }
  CHECK(all);
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
    test_a_thread_that_keeps_the_others_waiting_leaves_the_work_to_the_caller_for_a_while(threads);
    test_reset_runs_once_a_barrier(threads);
  }
  return 0;
}
