"""What runs in the next step, and who owns which KV block. Pure: no clock, no model, no text.

One step is `plan` → the executor runs it → `commit` → the engine appends the tokens drawn. Between any two of these
calls sequences may be added, cancelled, finished or preempted.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection
from dataclasses import dataclass

from octavo import limits
from octavo.errors import CapacityError, InvalidParameterError
from octavo.kv.blocks import BlockPool
from octavo.kv.tree import Match, PrefixTree
from octavo.limits import BLOCK_TOKENS
from octavo.scheduler.plan import Counters, ScheduledChunk, SchedulerStats, StepPlan
from octavo.scheduler.policy import Policy, WaitingQueue, rank_of
from octavo.scheduler.sequence import Sequence, State, blocks_for, new_table
from octavo.scheduler.sharing import Leaders, follows

# Extra blocks that must be there before a preempted sequence comes back, so that it gets on before the next squeeze.
_READMISSION_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How to schedule. `chunk_size` caps a prompt's rows in one step (None: only the budget does)."""

    policy: str = "fcfs"
    max_sequences: int = 64
    max_rows: int = limits.MAX_STEP_ROWS
    chunk_size: int | None = None
    ageing_steps: int = 1_000
    max_waiting: int = limits.MAX_WAITING_REQUESTS

    def __post_init__(self) -> None:
        if not 1 <= self.max_sequences <= limits.MAX_BATCH_SEQUENCES:
            raise InvalidParameterError("max_sequences", self.max_sequences, f"1 to {limits.MAX_BATCH_SEQUENCES}")
        if not self.max_sequences <= self.max_rows <= limits.MAX_STEP_ROWS:
            raise InvalidParameterError(
                "max_rows", self.max_rows, f"max_sequences ({self.max_sequences}) to {limits.MAX_STEP_ROWS}"
            )
        if self.chunk_size is not None and self.chunk_size < 1:
            raise InvalidParameterError("chunk_size", self.chunk_size, "at least 1, or None")
        if self.max_waiting < 1:
            raise InvalidParameterError("max_waiting", self.max_waiting, "at least 1")


class Scheduler:
    """Owns the sequences' progress and block tables. `running` is sorted by rank; its first is never preempted."""

    def __init__(self, pool: BlockPool, tree: PrefixTree, config: SchedulerConfig) -> None:
        self.pool = pool
        self.tree = tree
        self.config = config
        self.policy = Policy(config.policy, config.ageing_steps)
        self.waiting = WaitingQueue(self.policy, config.max_waiting)
        self.running: list[Sequence] = []
        self.num_decoding = 0  # running sequences that are past their prefill
        self.counters = Counters()

    # Coming and going

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. CapacityError if it could never fit, QueueFullError if the queue is full."""
        blocks = blocks_for(sequence.max_total)
        if blocks > self.pool.num_blocks:
            raise CapacityError(
                f"{sequence.prompt_len} prompt tokens and {sequence.max_total - sequence.prompt_len} new ones need "
                f"{blocks} KV blocks of {BLOCK_TOKENS} tokens, but there are {self.pool.num_blocks}: "
                "shorten the prompt, lower max_tokens or raise kv_memory"
            )
        if not sequence.token_ids or len(sequence.token_ids) >= sequence.max_total:
            raise CapacityError(
                f"{len(sequence.token_ids)} tokens leave no room for a new one: at least 1 and fewer than "
                f"{sequence.max_total} are allowed"
            )
        self.waiting.check_room()
        sequence.enqueued = self.counters.steps
        sequence.state = State.WAITING
        self.waiting.add(sequence)

    def finish(self, sequence: Sequence, cache: bool = True) -> None:
        """Free a sequence's blocks now; with `cache` what it has computed stays in the tree, evictable."""
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is State.RUNNING:
            self._stop(sequence, cache)
        sequence.state = State.FINISHED
        sequence.leader = None

    def cancel(self, sequence: Sequence) -> None:
        """At any moment, in any state."""
        self.finish(sequence, cache=True)

    def preempt(self, sequence: Sequence, flush: bool = False) -> None:
        """Put a running sequence back to waiting; `flush` drops what no other one uses of its path from the tree."""
        if sequence.state is not State.RUNNING:
            return
        path = sequence.node if sequence.tail is None else sequence.tail
        self._stop(sequence, cache=not flush)
        if flush and path is not None:
            self.tree.drop_path(path)
        sequence.state = State.WAITING
        sequence.preemptions += 1
        self.counters.preemptions += 1
        self.waiting.add(sequence)

    def extend(self, sequence: Sequence) -> None:
        """Tokens were appended that need not be drawn: those of a running sequence are computed like a prefill's."""
        if sequence.state is State.RUNNING:
            self.num_decoding -= sequence.num_computed >= sequence.prefill_end
            sequence.prefill_end = len(sequence.token_ids)

    def flush(self) -> int:
        """Drop all cached prefixes that no running sequence uses; returns the blocks freed."""
        return self.tree.flush()

    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def only_decodes(self) -> bool:
        """Whether the next step has nothing but decoding to do, so that its budget does not matter."""
        return self.num_decoding == len(self.running) and not self.waiting.sequences

    def _stop(self, sequence: Sequence, cache: bool) -> None:
        del self.running[bisect_left(self.running, sequence.rank, key=rank_of)]
        self.num_decoding -= sequence.num_computed >= sequence.prefill_end
        if cache:
            self._cache_tail(sequence)
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        # Deepest first, so that the end of a prefix is older than its start and is evicted before it.
        for block in reversed(sequence.block_table):
            if self.pool.release(block):
                self.tree.unreferenced(block)
        sequence.block_table = new_table()
        sequence.num_computed = sequence.depth = sequence.copied = 0
        sequence.node = sequence.tail = sequence.leader = None

    # Planning

    def plan(self, budget_rows: int) -> StepPlan | None:
        """The next step, or None if nothing can run.

        Sequences in decode take one row each; the rest of `budget_rows`, at least 1, goes to prefills in order of rank,
        then to new admissions.
        """
        self.counters.steps += 1
        if self.waiting.young:
            self.waiting.age(self.counters.steps)
        left = max(min(budget_rows, self.config.max_rows) - self.num_decoding, 1)
        plan = StepPlan([], [], [])
        chunks = plan.sequences
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            prefills = sequence.num_computed < sequence.prefill_end
            count = self._prefill_rows(sequence, left) if prefills else 1
            short = sequence.num_computed + count > len(sequence.block_table) * BLOCK_TOKENS
            if short and not self._grow(sequence, count, plan):
                continue  # it was preempted itself, and was the last
            if prefills:
                left -= count
            if count:
                start = sequence.num_computed
                chunks.append(ScheduledChunk(sequence, start, count, start + count == len(sequence.token_ids)))
                plan.rows += count
            index += 1
        if self.waiting.sequences and not plan.preempted and left > 0:
            self._admit(plan, left)
        return plan if chunks else None

    def _prefill_rows(self, sequence: Sequence, left: int) -> int:
        rows = min(sequence.prefill_end - sequence.num_computed, left)
        return rows if self.config.chunk_size is None else min(rows, self.config.chunk_size)

    def _grow(self, sequence: Sequence, count: int, plan: StepPlan) -> bool:
        """Give a running sequence the blocks for its next `count` tokens, preempting from the end of the running list.

        False: the sequence was itself the last and had to go.
        """
        table = sequence.block_table
        missing = blocks_for(sequence.num_computed + count) - len(table)
        while self.pool.num_available < missing:
            victim = self._victim()
            self.preempt(victim)
            plan.preempted.append(victim)
            if victim is sequence:
                return False
        for _ in range(missing):
            table.append(self._take_block(plan))
        return True

    def _victim(self) -> Sequence:
        assert len(self.running) > 1, "the oldest sequence does not fit alone"
        return self.running[-1]

    def _take_block(self, plan: StepPlan) -> int:
        """A block of its own for a sequence, evicting if needed; it is zeroed by the step."""
        if self.pool.num_free == 0:
            self.tree.evict()
        block = self.pool.allocate()
        plan.block_ops.append((block, -1, 0))
        return block

    # Admission

    def _admit(self, plan: StepPlan, left: int) -> None:
        if len(self.running) >= self.config.max_sequences:
            return
        leaders = Leaders()
        owed = 0  # blocks that running prefills will still need
        for sequence in self.running:
            if sequence.num_computed < sequence.prefill_end:
                leaders.add(sequence)
                owed += max(0, sequence.prompt_blocks - len(sequence.block_table))
        for sequence in self.waiting.candidates(self.tree):
            if left <= 0 or len(self.running) >= self.config.max_sequences:
                return
            if follows(sequence):
                continue
            match = self.tree.match(sequence.salt, sequence.token_ids, sequence.match_limit)
            if leaders.find(sequence, match):
                self.counters.prefix_waits += 1
                continue
            if not self._fits(sequence, match, owed):
                return  # nobody overtakes for being smaller
            self._start(sequence, match, plan)
            count = self._prefill_rows(sequence, left)
            grown = self._grow(sequence, count, plan)
            assert grown
            start = sequence.num_computed
            plan.sequences.append(ScheduledChunk(sequence, start, count, start + count == len(sequence.token_ids)))
            plan.rows += count
            left -= count
            leaders.add(sequence)
            owed += max(0, sequence.prompt_blocks - len(sequence.block_table))

    def _fits(self, sequence: Sequence, match: Match, owed: int) -> bool:
        """Whether all its tokens fit now, besides what running prefills are owed and a block of growth for each."""
        needed = sequence.prompt_blocks - len(match.blocks)
        available = self.pool.num_available - sum(1 for block in match.blocks if self.pool.refs(block) == 1)
        if self.running:
            needed += owed + len(self.running)
            if sequence.preemptions:
                needed += _READMISSION_BLOCKS
        return needed <= available

    def _start(self, sequence: Sequence, match: Match, plan: StepPlan) -> None:
        """Make a waiting sequence run, with the prefix the tree gives it."""
        self.waiting.remove(sequence)
        for block in match.blocks:
            self.pool.retain(block)
        sequence.block_table = new_table(match.blocks)
        sequence.node = match.node
        sequence.depth = len(match.blocks)
        if match.partial_tokens:
            self._copy_partial(sequence, match.partial_block, match.partial_tokens, plan)
        hit = sequence.depth * BLOCK_TOKENS + sequence.copied
        sequence.num_computed = hit
        sequence.prefill_end = len(sequence.token_ids)
        sequence.state = State.RUNNING
        if sequence.admitted:
            self.counters.recompute_hit_tokens += hit
        else:
            sequence.admitted = True
            sequence.num_cached = hit
            self.counters.prefix_hit_tokens += hit
        self.counters.copied_tokens += sequence.copied
        insort(self.running, sequence, key=rank_of)

    def _copy_partial(self, sequence: Sequence, source: int, tokens: int, plan: StepPlan) -> None:
        """Start a new block with a copy of the source's first tokens."""
        self.pool.retain(source)  # so that making room does not evict the source itself
        if self.pool.num_available > 0:
            block = self._take_block(plan)
            plan.block_ops[-1] = (block, source, tokens)
            sequence.block_table.append(block)
            sequence.copied = tokens
        if self.pool.release(source):
            self.tree.unreferenced(source)

    # After the step

    def commit(self, plan: StepPlan, failed: Collection[Sequence] = ()) -> None:
        """The plan was executed. Progress counts, and whole blocks enter the tree, but not those of `failed` sequences.

        The caller then finishes each failed one with `cache=False` and appends the others' new tokens. Sequences that
        were finished or preempted since `plan` are left alone.
        """
        for chunk in plan.sequences:
            sequence = chunk.sequence
            if sequence.state is not State.RUNNING or sequence.num_computed != chunk.start or sequence in failed:
                continue
            done = sequence.num_computed = chunk.start + chunk.count
            self.counters.computed_tokens += chunk.count
            if done >= (sequence.depth + 1) * BLOCK_TOKENS:
                self._cache_full(sequence)
            if done == sequence.prefill_end:
                self.num_decoding += 1
                self._cache_tail(sequence)  # so that the same prompt hits it whole from now on

    def _cache_full(self, sequence: Sequence) -> None:
        """Enter whole computed blocks; where the tree has an equal one already, use that and free ours."""
        table = sequence.block_table
        for index in range(sequence.depth, sequence.num_computed // BLOCK_TOKENS):
            keys = tuple(sequence.token_ids[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS])
            if sequence.tail is None:
                node = self.tree.insert(sequence.node, sequence.salt, keys, table[index])
            else:
                node = self.tree.extend(sequence.tail, keys)
                sequence.tail = None
            if node.block != table[index]:
                self._exchange(sequence, index, node.block)
            sequence.node = node
            sequence.depth = index + 1

    def _exchange(self, sequence: Sequence, index: int, block: int) -> None:
        self.pool.retain(block)
        self.pool.release(sequence.block_table[index])
        sequence.block_table[index] = block
        self.counters.shared_blocks += 1

    def _cache_tail(self, sequence: Sequence) -> None:
        """Enter the computed part of the last, not yet full block."""
        start = sequence.depth * BLOCK_TOKENS
        if sequence.num_computed == start:
            return
        keys = tuple(sequence.token_ids[start : sequence.num_computed])
        block = sequence.block_table[sequence.depth]
        if sequence.tail is None:
            node = self.tree.insert(sequence.node, sequence.salt, keys, block)
        else:
            node = self.tree.extend(sequence.tail, keys)
        sequence.tail = node if node.block == block else None

    # Numbers

    def stats(self) -> SchedulerStats:
        pool, counters = self.pool, self.counters
        used = pool.num_used
        # Full blocks waste nothing, shared or not; what is wasted is the room behind each sequence's last token and the
        # tokens it holds as copies of another block.
        unused = sum(len(s.block_table) * BLOCK_TOKENS - s.num_computed + s.copied for s in self.running)
        return SchedulerStats(
            blocks_total=pool.num_blocks,
            blocks_free=pool.num_free,
            blocks_cached=pool.num_cached,
            blocks_used=used,
            waste_percent=100 * unused / (used * BLOCK_TOKENS) if used else 0.0,
            waiting=len(self.waiting),
            running=len(self.running),
            steps=counters.steps,
            computed_tokens=counters.computed_tokens,
            prefix_hit_tokens=counters.prefix_hit_tokens,
            recompute_hit_tokens=counters.recompute_hit_tokens,
            copied_tokens=counters.copied_tokens,
            preemptions=counters.preemptions,
            evictions=self.tree.evictions,
            shared_blocks=counters.shared_blocks,
            prefix_waits=counters.prefix_waits,
            aged=self.waiting.aged,
        )
