"""A sequence as the scheduler sees it: token ids in, block table and progress out."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from octavo.kv.tree import Node, Salt
from octavo.limits import BLOCK_TOKENS


def new_table(blocks: Iterable[int] = ()) -> array[int]:
    """A block table; an array, so that a step's batch copies it as one piece."""
    return array("i", blocks)


class State(Enum):
    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One continuation of one prompt (`n` continuations are `n` sequences).

    The engine owns the first group and changes it only by appending tokens, and by lifting `cache_limit` once it has
    all the prompt logprobs it wants. The scheduler owns the rest; of it, others read `state`, `num_computed` (tokens
    whose KV is stored), `prefill_end`, `block_table` (`Scheduler.commit` may exchange entries for equal blocks),
    `num_cached`, `preemptions`.
    """

    id: int
    token_ids: list[int]  # prompt, then output so far
    prompt_len: int
    max_total: int  # prompt_len + the most tokens it may still get
    priority: int = 0  # lower runs first
    salt: Salt = ""
    arrival: int = 0
    cache_limit: int | None = None  # a prefix hit never exceeds this many tokens (nor all but one)

    state: State = State.NEW
    num_computed: int = 0
    block_table: array[int] = field(default_factory=new_table)  # of 32-bit integers
    num_cached: int = 0  # tokens reused at the first admission
    preemptions: int = 0
    prefill_end: int = 0  # tokens known at the last admission or extension; below it this is a prefill
    copied: int = 0  # tokens of the block table that are copies of a partly matched block
    node: Node | None = None  # deepest full node of its path
    depth: int = 0  # full blocks in the tree; `node` is that deep
    tail: Node | None = None  # partial node on its own, still growing block
    rank: tuple[int, int, int, int] = (1, 0, 0, 0)  # order among running and waiting, lower first
    enqueued: int = 0  # step of its arrival
    aged: bool = False
    admitted: bool = False  # at least once
    leader: Sequence | None = None  # computes a prefix that this one waits for …
    wait_until: int = 0  # … until so many of its tokens are computed

    def __repr__(self) -> str:  # never its tokens: they are a user's text
        progress = f"{self.num_computed}/{len(self.token_ids)}/{self.max_total}"
        return f"Sequence({self.id}, {self.state.value}, computed/known/most {progress})"

    @property
    def match_limit(self) -> int:
        """Most tokens a prefix hit may give: the last token is always computed, for its logits."""
        limit = len(self.token_ids) - 1
        return limit if self.cache_limit is None else max(0, min(limit, self.cache_limit))

    @property
    def prompt_blocks(self) -> int:
        """Blocks for all tokens known now and the next one."""
        return blocks_for(min(len(self.token_ids) + 1, self.max_total))


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
