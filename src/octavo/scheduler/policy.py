"""Who goes first: the order of waiting and running sequences, and the queue of those that wait."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator

from octavo.errors import InvalidParameterError, QueueFullError
from octavo.kv.tree import PrefixTree
from octavo.scheduler.sequence import Sequence

POLICIES = ("fcfs", "priority", "lpm")

# Waiting sequences looked at in one step: bounds a step's cost whatever the length of the queue.
WINDOW = 32


def rank_of(sequence: Sequence) -> tuple[int, int, int, int]:
    return sequence.rank


class Policy:
    """`fcfs`: arrival. `priority`: lower first, then arrival. `lpm`: longest cached prefix first, among the oldest.

    Under the last two, who has waited `ageing_steps` steps goes, for the rest of its life, before all who have not,
    by arrival. So nobody starves, neither in the queue nor by repeated preemption.
    """

    def __init__(self, name: str, ageing_steps: int) -> None:
        if name not in POLICIES:
            raise InvalidParameterError("policy", name, "one of " + ", ".join(POLICIES))
        if ageing_steps < 1:
            raise InvalidParameterError("ageing_steps", ageing_steps, "at least 1")
        self.name = name
        self.ageing_steps = ageing_steps

    @property
    def ages(self) -> bool:
        return self.name != "fcfs"

    def rank(self, sequence: Sequence) -> tuple[int, int, int, int]:
        if sequence.aged:
            return (0, 0, sequence.arrival, sequence.id)
        priority = sequence.priority if self.name == "priority" else 0
        return (1, priority, sequence.arrival, sequence.id)


class WaitingQueue:
    """Waiting sequences sorted by rank. Preempted ones have their old arrival, so they stand before newer ones."""

    def __init__(self, policy: Policy, max_waiting: int) -> None:
        self.policy = policy
        self.max_waiting = max_waiting
        self.aged = 0
        self.sequences: list[Sequence] = []
        self.young: OrderedDict[int, Sequence] = OrderedDict()  # by id: not aged yet, longest in the queue first

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.sequences)

    def check_room(self) -> None:
        if len(self.sequences) >= self.max_waiting:
            raise QueueFullError(
                f"{len(self.sequences)} requests are waiting, the limit is {self.max_waiting}; try again later"
            )

    def add(self, sequence: Sequence) -> None:
        sequence.rank = self.policy.rank(sequence)
        insort(self.sequences, sequence, key=rank_of)
        if self.policy.ages and not sequence.aged:
            self.young[sequence.id] = sequence

    def remove(self, sequence: Sequence) -> None:
        place = bisect_left(self.sequences, sequence.rank, key=rank_of)
        assert self.sequences[place] is sequence
        del self.sequences[place]
        self.young.pop(sequence.id, None)

    def age(self, step: int) -> None:
        """Put those first who have waited long enough."""
        while self.young:
            sequence = next(iter(self.young.values()))
            if step - sequence.enqueued < self.policy.ageing_steps:
                break
            self.remove(sequence)
            sequence.aged = True
            self.aged += 1
            self.add(sequence)

    def candidates(self, tree: PrefixTree) -> list[Sequence]:
        """The next to admit, best first; at most `WINDOW`."""
        window = self.sequences[:WINDOW]
        if self.policy.name != "lpm" or len(window) < 2:
            return window
        aged = [sequence for sequence in window if sequence.aged]
        rest = [sequence for sequence in window if not sequence.aged]
        hit = {s.id: tree.match(s.salt, s.token_ids, s.match_limit).tokens for s in rest}
        rest.sort(key=lambda s: -hit[s.id])  # stable: equal hits stay in order of arrival
        return aged + rest
