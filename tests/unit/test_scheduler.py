from __future__ import annotations

import random
import time

import pytest

from octavo.errors import CapacityError, InvalidParameterError
from octavo.kv.blocks import BlockPool
from octavo.kv.tree import PrefixTree
from octavo.scheduler.budget import TokenBudget
from octavo.scheduler.plan import StepPlan
from octavo.scheduler.scheduler import Scheduler, SchedulerConfig
from octavo.scheduler.sequence import Sequence, State


class Bench:
    """A scheduler, and an engine that draws token after token from a counter."""

    def __init__(self, num_blocks: int = 64, **config: object) -> None:
        self.pool = BlockPool(num_blocks)
        self.tree = PrefixTree(self.pool)
        self.scheduler = Scheduler(self.pool, self.tree, SchedulerConfig(**config))  # type: ignore[arg-type]
        self.added = 0
        self.drawn = 1_000_000

    def sequence(self, prompt: list[int], new: int = 8, **fields: object) -> Sequence:
        self.added += 1
        return Sequence(
            self.added,
            list(prompt),
            len(prompt),
            len(prompt) + new,
            arrival=self.added,
            **fields,  # type: ignore[arg-type]
        )

    def add(self, prompt: list[int], new: int = 8, **fields: object) -> Sequence:
        sequence = self.sequence(prompt, new, **fields)
        self.scheduler.add(sequence)
        return sequence

    def step(self, budget: int = 512) -> StepPlan:
        plan = self.scheduler.plan(budget)
        assert plan is not None
        self.scheduler.commit(plan)
        for chunk in plan.sequences:
            if chunk.samples:
                self.drawn += 1
                chunk.sequence.token_ids.append(self.drawn)
                if len(chunk.sequence.token_ids) == chunk.sequence.max_total:
                    self.scheduler.finish(chunk.sequence)
        return plan

    def finish_all(self, budget: int = 512) -> list[StepPlan]:
        plans = []
        while self.scheduler.has_work():
            plans.append(self.step(budget))
            assert len(plans) < 10_000
        return plans


def rows(plan: StepPlan) -> dict[int, int]:
    return {chunk.sequence.id: chunk.count for chunk in plan.sequences}


PROMPT = list(range(40))


# Sharing


@pytest.mark.parametrize("length", [1, 2, 10, 16, 17, 30, 33, 48])
@pytest.mark.parametrize("chunk_size", [None, 1, 7, 16])
def test_n_siblings_prefill_their_prompt_once(length: int, chunk_size: int | None) -> None:
    bench = Bench(chunk_size=chunk_size)
    siblings = [bench.add(PROMPT[:1] * length) for _ in range(4)]
    bench.finish_all()
    assert siblings[0].num_cached == 0
    assert [s.num_cached for s in siblings[1:]] == [length - 1] * 3
    prompt_rows = length + 3  # the others compute the last token only
    assert bench.scheduler.counters.computed_tokens == prompt_rows + 4 * 7


def test_siblings_share_whole_blocks_and_copy_only_the_partial_one() -> None:
    bench = Bench()
    first, second = bench.add(PROMPT), bench.add(PROMPT)
    bench.step()
    plan = bench.step()
    assert second.num_computed == 40
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]
    assert (second.block_table[2], first.block_table[2], 7) in plan.block_ops


def test_a_waiter_computes_alone_when_its_leader_goes() -> None:
    bench = Bench(chunk_size=16)
    leader, waiter = bench.add(PROMPT), bench.add(PROMPT)
    bench.step()
    assert waiter.leader is leader
    bench.scheduler.cancel(leader)
    assert rows(bench.step()) == {waiter.id: 16}
    assert waiter.num_cached == 16


def test_a_waiter_goes_on_when_its_leader_fails() -> None:
    bench = Bench(chunk_size=16)
    leader, waiter = bench.add(PROMPT), bench.add(PROMPT)
    plan = bench.scheduler.plan(512)
    assert plan is not None
    bench.scheduler.commit(plan, [leader])
    bench.scheduler.finish(leader, cache=False)
    assert rows(bench.step()) == {waiter.id: 16}
    assert waiter.num_cached == 0


def test_sequences_that_share_less_than_a_block_do_not_wait() -> None:
    bench = Bench()
    a, b = bench.add([1] * 15 + [2] * 9), bench.add([1] * 15 + [3] * 9)
    assert rows(bench.step()) == {a.id: 24, b.id: 24}


def test_who_waits_for_a_prefix_does_not_hold_up_others() -> None:
    bench = Bench(chunk_size=16)
    leader, waiter, other = bench.add(PROMPT), bench.add(PROMPT), bench.add([7] * 20)
    assert rows(bench.step()) == {leader.id: 16, other.id: 16}
    assert waiter.state is State.WAITING


def test_equal_blocks_of_two_sequences_become_one() -> None:
    bench = Bench()
    a = bench.add(PROMPT, new=60)
    bench.step()
    b = bench.add(PROMPT, new=60, cache_limit=0)  # computes the same prefix again
    bench.step()
    assert b.block_table[:2] == a.block_table[:2]
    assert bench.scheduler.stats().shared_blocks == 2
    assert bench.pool.num_used == 4


def test_the_next_turn_of_a_conversation_hits_prompt_and_answer() -> None:
    bench = Bench()
    first = bench.add(PROMPT, new=10)
    bench.finish_all()
    second = bench.add([*first.token_ids, 1, 2, 3])
    bench.step()
    assert second.num_cached == 49  # the last token drawn was never computed


def test_prompt_logprobs_from_s_use_the_cache_only_below_s() -> None:
    bench = Bench()
    bench.add(PROMPT)
    bench.finish_all()
    for limit, expected in [(0, 0), (5, 5), (16, 16), (23, 23), (100, 39), (-1, 0)]:
        sequence = bench.add(PROMPT, cache_limit=limit)
        bench.step()
        assert sequence.num_cached == expected
        bench.finish_all()


def test_failed_blocks_do_not_enter_the_tree() -> None:
    bench = Bench()
    sequence = bench.add(PROMPT)
    plan = bench.scheduler.plan(512)
    assert plan is not None
    bench.scheduler.commit(plan, [sequence])
    bench.scheduler.finish(sequence, cache=False)
    assert len(bench.tree) == 0
    assert bench.pool.num_free == 64


# Rows


def test_running_sequences_take_one_row_and_prompts_share_the_rest_in_order() -> None:
    bench = Bench()
    a = bench.add([1] * 20)
    bench.step()
    b, c, d = bench.add([2] * 20), bench.add([3] * 20), bench.add([4] * 20)
    plan = bench.step(budget=31)
    assert rows(plan) == {a.id: 1, b.id: 20, c.id: 10}
    assert plan.rows == 31
    assert [chunk.samples for chunk in plan.sequences] == [True, True, False]
    assert rows(bench.step(budget=22)) == {a.id: 1, b.id: 1, c.id: 10, d.id: 10}


def test_decode_and_prefill_go_on_however_small_the_budget() -> None:
    bench = Bench(max_rows=64)
    a, b = bench.add([1] * 4), bench.add([2] * 4)
    bench.step()
    c = bench.add([3] * 4)
    assert rows(bench.step(budget=1)) == {a.id: 1, b.id: 1, c.id: 1}


def test_blocks_are_allocated_only_when_needed() -> None:
    bench = Bench()
    sequence = bench.add([1] * 15, new=40)
    for _ in range(30):
        bench.step()
        assert len(sequence.block_table) == -(-sequence.num_computed // 16)


def test_every_new_block_is_zeroed_once_before_use() -> None:
    bench = Bench(num_blocks=6)
    bench.add([1] * 30, new=30)
    bench.add([2] * 10, new=30)
    known: dict[int, set[int]] = {}
    while bench.scheduler.has_work():
        plan = bench.scheduler.plan(512)
        assert plan is not None
        zeroed = [dst for dst, _, _ in plan.block_ops]
        for chunk in plan.sequences:
            table = set(chunk.sequence.block_table)
            new = table - known.get(chunk.sequence.id, set())
            assert all(zeroed.count(block) == 1 for block in new)
            known[chunk.sequence.id] = table
        bench.scheduler.commit(plan)
        for chunk in plan.sequences:
            if chunk.samples:
                chunk.sequence.token_ids.append(5)
                if len(chunk.sequence.token_ids) == chunk.sequence.max_total:
                    bench.scheduler.finish(chunk.sequence)


# Order


def started(bench: Bench, budget: int = 512) -> list[int]:
    return [chunk.sequence.id for plan in bench.finish_all(budget) for chunk in plan.sequences if chunk.start == 0]


def test_fcfs_admits_in_order_of_arrival_and_small_ones_do_not_overtake() -> None:
    bench = Bench(num_blocks=6)
    bench.add([1] * 40, new=40)
    big = bench.add([2] * 60, new=8)
    small = bench.add([3], new=2)
    bench.step()
    assert big.state is small.state is State.WAITING
    assert started(bench) == [big.id, small.id]


def test_priority_admits_lower_numbers_first() -> None:
    bench = Bench(policy="priority", max_sequences=1)
    ids = [bench.add([i] * 5, priority=p).id for i, p in enumerate((3, 1, 2, 1))]
    assert started(bench) == [ids[1], ids[3], ids[2], ids[0]]


def test_lpm_admits_the_longest_cached_prefix_first() -> None:
    bench = Bench(policy="lpm", max_sequences=1)
    bench.add(PROMPT)
    bench.finish_all()
    none, some, most = bench.add([9] * 40), bench.add(PROMPT[:20] + [9] * 20), bench.add([*PROMPT[:39], 9])
    order = [chunk.sequence.id for plan in bench.finish_all() for chunk in plan.sequences]  # one after another
    assert list(dict.fromkeys(order)) == [most.id, some.id, none.id]


@pytest.mark.parametrize("policy", ["priority", "lpm"])
def test_a_flood_of_favoured_requests_does_not_starve_anyone(policy: str) -> None:
    bench = Bench(policy=policy, max_sequences=2, ageing_steps=50)
    bench.add([1] * 33)
    bench.finish_all()
    victim = bench.add([2] * 20, priority=9)
    for _ in range(200):
        while len(bench.scheduler.waiting) < 10:
            bench.add([1] * 33, new=3, priority=0)
        bench.step()
        if victim.state is State.FINISHED:
            break
    assert victim.state is State.FINISHED
    assert victim.aged


def test_unknown_policies_and_bad_bounds_are_refused() -> None:
    with pytest.raises(InvalidParameterError, match="policy='random'"):
        Bench(policy="random")
    bad = {"max_sequences": 0, "max_rows": 3, "chunk_size": 0, "ageing_steps": 0, "max_waiting": 0}
    for field, value in bad.items():
        with pytest.raises(InvalidParameterError, match=field):
            Bench(**{field: value})


# Room


def test_what_can_never_fit_is_refused_at_once_with_numbers() -> None:
    bench = Bench(num_blocks=4)
    busy = bench.add([1] * 30, new=34)  # 64 tokens: just fits
    bench.step()
    with pytest.raises(CapacityError, match=r"30 prompt tokens and 35 new ones need 5 KV blocks .* there are 4"):
        bench.add([2] * 30, new=35)
    assert len(bench.scheduler.waiting) == 0
    bench.finish_all()
    assert len(busy.token_ids) == 64


def test_a_full_queue_refuses_and_a_refused_request_can_be_cancelled() -> None:
    bench = Bench(max_waiting=2)
    bench.add([1])
    bench.add([2])
    refused = bench.sequence([3])
    with pytest.raises(CapacityError, match="2 requests are waiting, the limit is 2"):
        bench.scheduler.add(refused)
    bench.scheduler.cancel(refused)
    assert len(bench.scheduler.waiting) == 2


def test_a_prompt_that_leaves_no_room_for_a_token_is_refused() -> None:
    bench = Bench()
    with pytest.raises(CapacityError, match="no room"):
        bench.add([1, 2, 3], new=0)
    with pytest.raises(CapacityError, match="no room"):
        bench.add([], new=1)


def test_cancel_at_any_moment_frees_blocks_in_that_step() -> None:
    for moment in range(12):
        bench = Bench(num_blocks=16, chunk_size=7)
        sequence = bench.add(PROMPT)
        for _ in range(moment):
            bench.step()
        plan = bench.scheduler.plan(512)
        bench.scheduler.cancel(sequence)
        assert bench.pool.num_used == 0
        assert not sequence.block_table
        assert plan is not None
        bench.scheduler.commit(plan)
        bench.scheduler.cancel(sequence)  # twice is harmless
        assert not bench.scheduler.has_work()
        bench.scheduler.flush()
        assert bench.pool.num_free == 16


def test_the_newest_is_preempted_and_its_blocks_are_hit_when_it_returns() -> None:
    bench = Bench(num_blocks=9)
    old, new = bench.add([1] * 40, new=60), bench.add([2] * 40, new=60)
    preempted = [s for plan in bench.finish_all() for s in plan.preempted]
    assert new.preemptions == 1
    assert preempted == [new]
    assert old.preemptions == 0
    assert bench.scheduler.stats().recompute_hit_tokens >= 16
    assert (len(old.token_ids), len(new.token_ids)) == (100, 100)


def test_the_lowest_priority_is_preempted_though_it_is_older() -> None:
    bench = Bench(num_blocks=9, policy="priority")
    low = bench.add([1] * 40, new=60, priority=5)
    bench.step()
    high = bench.add([2] * 40, new=60, priority=0)
    bench.finish_all()
    assert low.preemptions == 1
    assert high.preemptions == 0


def test_the_oldest_running_is_never_preempted_in_a_flood() -> None:
    bench = Bench(num_blocks=12, max_sequences=8)
    rng = random.Random(3)
    long = bench.add([1] * 20, new=150)
    preempted = 0
    while long.state is not State.FINISHED:
        while len(bench.scheduler.waiting) < 4:
            bench.add([rng.randrange(100) for _ in range(rng.randint(1, 30))], new=rng.randint(1, 60))
        preempted += len(bench.step().preempted)
        assert long.preemptions == 0
    assert preempted > 1


def test_preemption_does_not_thrash() -> None:
    bench = Bench(num_blocks=40, max_sequences=16)
    rng = random.Random(4)
    for _ in range(60):
        bench.add([rng.randrange(1000) for _ in range(30)], new=60)
    bench.finish_all()
    stats = bench.scheduler.stats()
    useful = 60 * (30 + 60 - 1)  # 16 at once would need 96 blocks in the end
    assert 0 < stats.preemptions < 30
    assert stats.computed_tokens < 1.25 * useful


def test_forced_preemption_keeps_or_flushes_the_path() -> None:
    for flush, expected in [(False, 43), (True, 0)]:
        bench = Bench()
        sequence = bench.add(PROMPT, new=20)
        for _ in range(5):
            bench.step()
        bench.scheduler.preempt(sequence, flush=flush)
        assert (sequence.state, list(sequence.block_table)) == (State.WAITING, [])
        assert bench.pool.num_used == 0
        bench.step()
        assert bench.scheduler.stats().recompute_hit_tokens == expected + (not flush)
        assert sequence.num_cached == 0
        bench.finish_all()
        assert len(sequence.token_ids) == 60


def test_waste_counts_unused_room_and_copied_tokens() -> None:
    bench = Bench()
    bench.add(PROMPT), bench.add(PROMPT)
    bench.step()
    assert bench.scheduler.stats().waste_percent == pytest.approx(100 * 8 / 48)
    bench.step()  # 41 and 40 tokens stored in 2 shared blocks and 2 of their own; 7 copied
    assert bench.scheduler.stats().waste_percent == pytest.approx(100 * (7 + 8 + 7) / 64)


def test_a_step_of_32_decoding_sequences_costs_microseconds() -> None:
    bench = Bench(num_blocks=3_000)
    rng = random.Random(5)
    for _ in range(32):
        bench.add([rng.randrange(49_152) for _ in range(160)], new=400)
    for _ in range(12):
        bench.step()
    best = 1.0
    for _ in range(12):
        spent = 0.0
        for _ in range(16):  # each sequence completes a block once
            begin = time.perf_counter()
            plan = bench.scheduler.plan(512)
            assert plan is not None
            bench.scheduler.commit(plan)
            spent += time.perf_counter() - begin
            assert plan.rows == 32
            for chunk in plan.sequences:
                chunk.sequence.token_ids.append(rng.randrange(49_152))
        best = min(best, spent / 16)
    assert best < 300e-6  # about 70 µs on a quiet machine; the promise is 150


# Budget


def test_budget_finds_the_rows_that_keep_the_target() -> None:
    budget = TokenBudget(target_seconds=0.1, min_rows=8, max_rows=1024)
    assert budget.rows() == 8
    rng = random.Random(6)
    for _ in range(200):
        rows = rng.choice((1, 4, 30, budget.rows()))
        budget.observe(rows, (0.02 + 0.0005 * rows) * rng.uniform(0.95, 1.05))
    assert 130 <= budget.rows() <= 190  # (0.1 - 0.02) / 0.0005 = 160
    assert budget.rows(decoding=False) == 1024


def test_budget_follows_a_slower_machine_and_stays_in_bounds() -> None:
    budget = TokenBudget(target_seconds=0.05, min_rows=4, max_rows=256)
    for _ in range(50):
        budget.observe(10, 0.0001)
    assert budget.rows() == 256
    for _ in range(200):
        budget.observe(10, 10.0)
    assert budget.rows() == 4
    budget.observe(0, 1.0)
    budget.observe(5, float("nan"))
    budget.observe(5, -1.0)
    assert budget.rows() == 4


def test_one_stall_does_not_shrink_the_budget_for_long() -> None:
    budget = TokenBudget(target_seconds=0.1, min_rows=4, max_rows=1024)
    for rows in range(1, 200):
        budget.observe(rows, 0.001 * rows)
    before = budget.rows()
    budget.observe(100, 60.0)
    assert budget.rows() > before / 2


def test_budget_refuses_nonsense() -> None:
    for target, low, high in [(0.0, 1, 2), (float("nan"), 1, 2), (0.1, 0, 2), (0.1, 3, 2)]:
        with pytest.raises(InvalidParameterError):
            TokenBudget(target, low, high)
