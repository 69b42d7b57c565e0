"""One simulated world: random requests and mishaps, all from one seed, with every promise checked after each step."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass

from octavo.errors import CapacityError
from octavo.kv.blocks import BlockPool
from octavo.kv.tree import PrefixTree
from octavo.limits import BLOCK_TOKENS
from octavo.scheduler.plan import StepPlan
from octavo.scheduler.scheduler import Scheduler, SchedulerConfig
from octavo.scheduler.sequence import Sequence, State

from .fake import FakeExecutor, Oracle, SimulationFault, token_of
from .invariants import check_all, require

STEPS = 2_000  # of one world

# Every kind of event; a long run must see each often.
EVENTS = (
    "admission",
    "admission after preemption",
    "aged",
    "arrival",
    "cache flush",
    "cancel: running",
    "cancel: running between plan and commit",
    "cancel: waiting",
    "cancel: waiting between plan and commit",
    "equal block shared at commit",
    "eviction",
    "failure",
    "finish",
    "forced preemption: flushed",
    "forced preemption: kept",
    "forced run",
    "hit of all but one",
    "idle",
    "leader lost",
    "limited by prompt logprobs",
    "lost step",
    "n > 1",
    "partial block copied",
    "policy: fcfs",
    "policy: lpm",
    "policy: priority",
    "preemption for blocks",
    "prefix hit",
    "prompt in chunks",
    "recompute hit",
    "refused: never fits",
    "refused: queue full",
    "salted arrival",
    "step",
    "token",
    "wait for a shared prefix",
)


@dataclass(frozen=True)
class Parts:
    """What the world is built of; a planted bug replaces one."""

    pool: type[BlockPool] = BlockPool
    tree: type[PrefixTree] = PrefixTree
    scheduler: type[Scheduler] = Scheduler
    executor: type[FakeExecutor] = FakeExecutor


class World:
    def __init__(self, seed: int, parts: Parts | None = None) -> None:
        parts = parts or Parts()
        self.rng = rng = random.Random(seed)
        self.num_blocks = rng.choice((2, 3, 4, 6, 8, 12, 16, 24))
        self.capacity = self.num_blocks * BLOCK_TOKENS
        self.vocabulary = rng.choice((2, 2, 3))
        self.salts: list[bytes | str] = ["", "a", b"a"][: rng.choice((1, 2, 3))]
        self.budget = rng.choice((None, 1, 8, 40, 200))  # None: another one each step
        self.config = SchedulerConfig(
            policy=rng.choice(("fcfs", "priority", "lpm")),
            max_sequences=rng.choice((1, 3, 6, 8)),
            max_rows=rng.choice((8, 64, 512)),
            chunk_size=rng.choice((None, None, 1, 7, 16, 17)),
            ageing_steps=rng.choice((3, 20, 100)),
            max_waiting=rng.choice((3, 6, 12)),
        )
        self.arrival_rate = rng.choice((0.05, 0.1, 0.3))
        self.mishap_rate = rng.choice((0.0, 0.02, 0.08))
        self.pool = parts.pool(self.num_blocks)
        self.tree = parts.tree(self.pool)
        self.scheduler = parts.scheduler(self.pool, self.tree, self.config)
        self.executor = parts.executor(self.num_blocks, self.vocabulary)
        self.oracle = Oracle(self.vocabulary)
        # Prompts are prefixes of a few texts, or of what earlier requests ended with, so that prefixes are shared.
        self.texts = deque((self._random_tokens(self.capacity) for _ in range(3)), maxlen=8)
        self.live: dict[int, Sequence] = {}
        self.lost: set[tuple[int, int]] = set()  # (sequence, the leader it lost)
        self.next_id = 0
        self.seen: Counter[str] = Counter()
        self.steps = 0
        self.last_progress = 0

    # Requests

    def _random_tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(self.vocabulary) for _ in range(count)]

    def _prompt(self, longest: int) -> list[int]:
        rng = self.rng
        text = rng.choice(self.texts)
        length = rng.randint(1, min(longest, len(text)))
        prompt = text[:length]
        if rng.random() < 0.3:
            suffix = rng.randint(1, 20)
            prompt = prompt[: max(0, longest - suffix)] + self._random_tokens(min(suffix, longest))
        return prompt

    def arrive(self) -> None:
        rng = self.rng
        prompt = self._prompt(min(self.capacity - 1, rng.choice((10, 40, self.capacity))))
        new_tokens = rng.randint(1, rng.choice((4, 60, self.capacity)))
        fits = rng.random() > 0.03
        if fits:
            new_tokens = min(new_tokens, self.capacity - len(prompt))
        else:
            new_tokens = self.capacity - len(prompt) + rng.randint(1, 20)
        copies = rng.randint(2, 4) if rng.random() < 0.2 else 1
        if copies > 1:
            self.seen["n > 1"] += 1
        limited = rng.random() < 0.08
        salt, priority = rng.choice(self.salts), rng.randint(-1, 2)
        for _ in range(copies):
            self.add(
                Sequence(
                    id=self.next_id,
                    token_ids=list(prompt),
                    prompt_len=len(prompt),
                    max_total=len(prompt) + new_tokens,
                    priority=priority,
                    salt=salt,
                    arrival=self.next_id,
                    cache_limit=rng.randint(0, len(prompt)) if limited else None,
                ),
                fits,
            )

    def add(self, sequence: Sequence, fits: bool) -> None:
        self.next_id += 1
        waiting = len(self.scheduler.waiting)
        try:
            self.scheduler.add(sequence)
        except CapacityError:
            require(not fits or waiting >= self.config.max_waiting, "a request that fits was refused")
            require(len(self.scheduler.waiting) == waiting, "a refused request is in the queue")
            self.scheduler.cancel(sequence)
            self.seen["refused: queue full" if fits else "refused: never fits"] += 1
            return
        require(fits, "I5: a request that can never fit was admitted")
        self.live[sequence.id] = sequence
        self.seen["arrival"] += 1
        self.seen["salted arrival"] += sequence.salt != ""
        self.seen["limited by prompt logprobs"] += sequence.cache_limit is not None

    def end(self, sequence: Sequence, cache: bool) -> None:
        self.scheduler.finish(sequence, cache)
        self.leave(sequence)

    def leave(self, sequence: Sequence) -> None:
        require(not sequence.block_table and sequence.state is State.FINISHED, "blocks are not freed in that step")
        self.oracle.check(sequence.salt, sequence.token_ids, sequence.prompt_len)
        del self.live[sequence.id]
        self.last_progress = self.steps

    # Mishaps

    def cancel_one(self, moment: str) -> None:
        if self.live:
            sequence = self.rng.choice(list(self.live.values()))
            self.seen[f"cancel: {sequence.state.value}{moment}"] += 1
            self.scheduler.cancel(sequence)
            self.leave(sequence)

    def preempt_one(self) -> None:
        if self.scheduler.running:
            sequence = self.rng.choice(self.scheduler.running)
            flush = self.rng.random() < 0.5
            self.scheduler.preempt(sequence, flush=flush)
            self.seen["forced preemption: " + ("flushed" if flush else "kept")] += 1
            self.last_progress = self.steps

    def mishap(self) -> None:
        kind = self.rng.random()
        if kind < 0.45:
            self.cancel_one("")
        elif kind < 0.85:
            self.preempt_one()
        else:
            self.scheduler.flush()
            self.seen["cache flush"] += 1
            require(self.pool.num_cached == 0, "a flush left cached blocks")

    # A step

    def step(self) -> None:
        rng = self.rng
        while rng.random() < self.arrival_rate:
            self.arrive()
        if rng.random() < self.mishap_rate:
            self.mishap()
        if not self.live:
            require(self.pool.num_used == 0, "I4: nobody lives, yet blocks are in use")
            require(not self.scheduler.has_work(), "I4: nobody lives, yet there is work")
            self.seen["idle"] += 1
            self.arrive()
        if self.live:
            self.run_plan()
        check_all(self.scheduler, self.executor, self.oracle)

    def run_plan(self) -> None:
        scheduler, rng = self.scheduler, self.rng
        running = list(scheduler.running)
        self.note_lost_leaders()
        plan = scheduler.plan(self.budget or rng.randint(1, 60))
        require(plan is not None, "I6: there is work, but no plan")
        assert plan is not None
        self.steps += 1
        self.check_plan(plan, running)
        self.note(plan, running)
        if rng.random() < self.mishap_rate / 8:
            self.lose_step(plan)
            return
        failed: list[Sequence] = []
        if rng.random() < self.mishap_rate:
            failed.append(rng.choice(plan.sequences).sequence)
        cells = self.executor.step(plan, failed)
        if rng.random() < self.mishap_rate / 4:
            self.cancel_one(" between plan and commit")
        scheduler.commit(plan, failed)
        for sequence in failed:
            if sequence.state is State.RUNNING:
                self.end(sequence, cache=False)
                self.seen["failure"] += 1
        for chunk, cell in zip(plan.sequences, cells):
            if chunk.samples and chunk.sequence.state is State.RUNNING:
                self.draw(chunk.sequence, cell)
        require(self.steps - self.last_progress <= self.capacity + 16, "I6: no progress")

    def lose_step(self, plan: StepPlan) -> None:
        """The executor raised before it did anything: all the step's sequences fail."""
        failed = [chunk.sequence for chunk in plan.sequences]
        self.scheduler.commit(plan, failed)
        for sequence in failed:
            self.end(sequence, cache=False)
        self.seen["lost step"] += 1

    def draw(self, sequence: Sequence, cell: int) -> None:
        sequence.token_ids.append(token_of(cell, self.vocabulary))
        self.last_progress = self.steps
        self.seen["token"] += 1
        stopped = self.rng.random() < 0.01
        if stopped or len(sequence.token_ids) == sequence.max_total:
            if self.rng.random() < 0.3:
                self.texts.append(list(sequence.token_ids))
            self.end(sequence, cache=self.rng.random() < 0.95)
            self.seen["finish"] += 1
        elif self.rng.random() < 0.01:
            self.force(sequence)

    def force(self, sequence: Sequence) -> None:
        """Tokens that a grammar forces: known without a draw, as many as leave one to draw."""
        most = sequence.max_total - 1 - len(sequence.token_ids)
        for _ in range(min(most, self.rng.randint(1, 40))):
            sequence.token_ids.append(self.oracle.next(sequence.salt, sequence.token_ids))
        self.scheduler.extend(sequence)
        self.seen["forced run"] += 1

    # What a plan promises

    def rank(self, sequence: Sequence) -> tuple[int, int, int]:
        if sequence.aged:
            return (0, 0, sequence.arrival)
        return (1, sequence.priority if self.config.policy == "priority" else 0, sequence.arrival)

    def check_plan(self, plan: StepPlan, before: list[Sequence]) -> None:
        if before:
            require(min(before, key=self.rank) not in plan.preempted, "I7: the oldest running sequence was preempted")
        rows = sum(chunk.count for chunk in plan.sequences)
        require(rows == plan.rows <= self.config.max_rows, "too many rows")
        planned = set()
        for chunk in plan.sequences:
            sequence = chunk.sequence
            require(sequence.id in self.live and sequence.id not in planned, "a stranger, or one twice, in the plan")
            planned.add(sequence.id)
            require(chunk.count >= 1 and chunk.start == sequence.num_computed, "chunk")
            require(chunk.samples == (chunk.start + chunk.count == len(sequence.token_ids)), "samples")
        for sequence in before:
            if sequence.state is State.RUNNING and sequence.num_computed >= sequence.prefill_end:
                require(sequence.id in planned, "a sequence in decode was left out")
        started = [chunk.sequence for chunk in plan.sequences if chunk.sequence not in before]
        for sequence in started:
            limit = sequence.cache_limit
            hit = sequence.num_computed
            require(limit is None or hit <= limit, "a hit beyond the prompt logprobs' start")
            require(hit < len(sequence.token_ids), "a hit of all tokens")
        for waiting in self.scheduler.waiting:
            if waiting.leader is None and (self.config.policy != "lpm" or waiting.aged):
                for sequence in started:
                    require(self.rank(sequence) < self.rank(waiting), "I7: overtaken in the queue")
            waited = self.scheduler.counters.steps - waiting.enqueued
            others = self.config.max_waiting + self.config.max_sequences
            require(waited < 2 * self.config.ageing_steps + others * 2 * self.capacity, "I7: starved")

    # What was seen

    def note_lost_leaders(self) -> None:
        for sequence in self.scheduler.waiting:
            leader = sequence.leader
            if leader is not None and leader.state is not State.RUNNING and (sequence.id, leader.id) not in self.lost:
                self.lost.add((sequence.id, leader.id))
                self.seen["leader lost"] += 1

    def note(self, plan: StepPlan, before: list[Sequence]) -> None:
        seen = self.seen
        seen["preemption for blocks"] += len(plan.preempted)
        seen["policy: " + self.config.policy] += 1
        for chunk in plan.sequences:
            sequence = chunk.sequence
            if chunk.count > 1 and not chunk.samples:
                seen["prompt in chunks"] += 1
            if sequence in before:
                continue
            again = sequence.preemptions > 0
            seen["admission after preemption" if again else "admission"] += 1
            if sequence.num_computed:
                seen["recompute hit" if again else "prefix hit"] += 1
            if sequence.num_computed == len(sequence.token_ids) - 1:
                seen["hit of all but one"] += 1
            if sequence.copied:
                seen["partial block copied"] += 1

    def drain(self) -> None:
        """Let all finish without newcomers; then nothing is in use, and a flush frees all."""
        self.arrival_rate = self.mishap_rate = 0.0
        while self.live:
            self.run_plan()
            check_all(self.scheduler, self.executor, self.oracle)
        require(self.pool.num_used == 0, "I4: nobody lives, yet blocks are in use")
        self.scheduler.flush()
        require(self.pool.num_free == self.num_blocks, "I1: a flush of an idle pool must free all")
        require(not self.tree.roots, "I8: roots without nodes")

    def totals(self) -> Counter[str]:
        counters = self.scheduler.counters
        self.seen["eviction"] = self.tree.evictions
        self.seen["equal block shared at commit"] = counters.shared_blocks
        self.seen["wait for a shared prefix"] = counters.prefix_waits
        self.seen["aged"] = self.scheduler.waiting.aged
        self.seen["step"] = self.steps
        return self.seen


def run_world(seed: int, steps: int = STEPS, parts: Parts | None = None) -> Counter[str]:
    """Runs one world; what it saw. `SimulationFault` says what broke, in which step, and how to replay it."""
    world = World(seed, parts)
    try:
        while world.steps < steps:
            world.step()
        world.drain()
    except Exception as error:
        raise SimulationFault(
            f"seed {seed}, step {world.steps}: {type(error).__name__}: {error}\n"
            f"replay: python -m tests.sim --seed {seed} --steps {steps}"
        ) from error
    return world.totals()
