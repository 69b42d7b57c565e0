"""Sequences that wait for another one to compute a prefix they share, instead of computing it twice."""

from __future__ import annotations

from octavo.kv.tree import Match, Salt
from octavo.limits import BLOCK_TOKENS
from octavo.scheduler.sequence import Sequence, State

Place = tuple[Salt, int]  # salt and serial of the deepest full node (0: the root)


def _place(salt: Salt, sequence_or_match: Sequence | Match) -> Place:
    node = sequence_or_match.node
    return (salt, 0 if node is None else node.serial)


class Leaders:
    """The prefills under way in one step, by the tree node below which each computes."""

    def __init__(self) -> None:
        self._at: dict[Place, list[Sequence]] = {}

    def add(self, sequence: Sequence) -> None:
        """A running sequence that is in its prefill."""
        self._at.setdefault(_place(sequence.salt, sequence), []).append(sequence)

    def find(self, sequence: Sequence, match: Match) -> bool:
        """Whether a waiting sequence, which the tree gives `match`, should wait; then its leader is noted in it.

        It waits if a sequence before it in rank is computing the whole next block, or all that a hit could still give
        (so that even short identical prompts are prefilled once).
        """
        others = self._at.get(_place(sequence.salt, match))
        if not others:
            return False
        start = len(match.blocks) * BLOCK_TOKENS
        limit = sequence.match_limit
        wanted = sequence.token_ids[start : min(start + BLOCK_TOKENS, limit)]
        if len(wanted) <= match.partial_tokens:
            return False
        for other in others:
            stop = start + len(wanted)
            if stop <= other.prefill_end and other.rank < sequence.rank and other.token_ids[start:stop] == wanted:
                shared = _shared(sequence.token_ids, other.token_ids, stop, min(limit, other.prefill_end))
                if shared < limit:
                    shared -= shared % BLOCK_TOKENS
                # A block is matched once it is whole, or at the end of the other's prefill.
                sequence.wait_until = min(-(-shared // BLOCK_TOKENS) * BLOCK_TOKENS, other.prefill_end)
                sequence.leader = other
                return True
        return False


def follows(sequence: Sequence) -> bool:
    """Whether a leader noted before is still on its way; if not, it is forgotten."""
    leader = sequence.leader
    if leader is None:
        return False
    if (
        leader.state is State.RUNNING
        and leader.num_computed < min(sequence.wait_until, leader.prefill_end)
        and leader.rank < sequence.rank
    ):
        return True
    sequence.leader = None
    return False


def _shared(a: list[int], b: list[int], start: int, stop: int) -> int:
    """Length of the common prefix of a[:stop] and b[:stop], known to be at least `start`."""
    while start < stop:
        step = min(BLOCK_TOKENS, stop - start)
        if a[start : start + step] == b[start : start + step]:
            start += step
            continue
        while a[start] == b[start]:
            start += 1
        break
    return start
