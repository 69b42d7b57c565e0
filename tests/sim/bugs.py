"""Planted bugs: each breaks one small method of one part. The simulation must find every one of them."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf

from octavo.kv.blocks import BlockPool
from octavo.kv.tree import Keys, Match, Node, PrefixTree, Salt
from octavo.scheduler.plan import StepPlan
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.sequence import Sequence

from .fake import FakeExecutor
from .world import Parts


class LostRelease(Scheduler):
    """A sequence that leaves keeps its first block."""

    def _release(self, sequence: Sequence) -> None:
        sequence.block_table = sequence.block_table[1:]
        super()._release(sequence)


class DoubleRelease(Scheduler):
    """A sequence that leaves gives up its last block twice."""

    def _release(self, sequence: Sequence) -> None:
        sequence.block_table = sequence.block_table + sequence.block_table[-1:]
        super()._release(sequence)


class CancelKeepsBlocks(Scheduler):
    """A cancelled sequence is forgotten, with its blocks."""

    def cancel(self, sequence: Sequence) -> None:
        if sequence in self.running:
            self.running.remove(sequence)
            sequence.state = type(sequence.state).FINISHED
        else:
            super().cancel(sequence)


class InsertUncomputed(Scheduler):
    """The tail enters the tree with one token more than was computed."""

    def _cache_tail(self, sequence: Sequence) -> None:
        known = sequence.num_computed % 16
        if known and known < 15 and sequence.num_computed < len(sequence.token_ids):
            sequence.num_computed += 1
            super()._cache_tail(sequence)
            sequence.num_computed -= 1
        else:
            super()._cache_tail(sequence)


class FailedEntersTree(Scheduler):
    """A failed step counts like any other."""

    def commit(self, plan: StepPlan, failed: Collection[Sequence] = ()) -> None:
        super().commit(plan, ())


class ExchangeWithoutRetain(Scheduler):
    """An equal block is taken from the tree without becoming its owner."""

    def _exchange(self, sequence: Sequence, index: int, block: int) -> None:
        self.pool.release(sequence.block_table[index])
        sequence.block_table[index] = block


class OldestPreempted(Scheduler):
    """When blocks run out, the oldest has to go."""

    def _victim(self) -> Sequence:
        return self.running[-2] if len(self.running) == 2 else self.running[-1]


class PartialSharedInPlace(Scheduler):
    """A partly matched block is written behind the match instead of being copied."""

    def _copy_partial(self, sequence: Sequence, source: int, tokens: int, plan: StepPlan) -> None:
        self.pool.retain(source)
        sequence.block_table.append(source)
        sequence.copied = tokens


class SourceNotPinned(Scheduler):
    """Making room for the copy may evict what is to be copied."""

    def _copy_partial(self, sequence: Sequence, source: int, tokens: int, plan: StepPlan) -> None:
        if self.pool.num_available > 0:
            block = self._take_block(plan)
            plan.block_ops[-1] = (block, source, tokens)
            sequence.block_table.append(block)
            sequence.copied = tokens


class MissingSalt(PrefixTree):
    """All tenants have one root."""

    def match(self, salt: Salt, keys: SequenceOf[int], limit: int) -> Match:
        return super().match("", keys, limit)

    def insert(self, parent: Node | None, salt: Salt, keys: Keys, block: int) -> Node:
        return super().insert(parent, "", keys, block)


class PartialMatchTooLong(PrefixTree):
    """A match inside a block is one token longer than what is equal."""

    def match(self, salt: Salt, keys: SequenceOf[int], limit: int) -> Match:
        found = super().match(salt, keys, limit)
        if 0 < found.partial_tokens < 15 and found.tokens < limit:
            found.partial_tokens += 1
        return found


class HitOfAllTokens(PrefixTree):
    """The limit of a match is one token too high."""

    def match(self, salt: Salt, keys: SequenceOf[int], limit: int) -> Match:
        return super().match(salt, keys, limit + 1)


class ReferencedEvicted(PrefixTree):
    """Eviction does not look at who else owns a block."""

    def _evictable(self, node: Node) -> bool:
        return True


class LeafForgotten(PrefixTree):
    """A block whose last sequence left is not offered for eviction."""

    def unreferenced(self, block: int) -> None:
        self._clock += 1


class RootsKept(PrefixTree):
    """A salt's root outlives its last node."""

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        super()._remove(node)
        if parent.parent is None and not parent.children:
            self.roots[parent.salt] = parent


class CachedCountOff(BlockPool):
    """A cached block that is used again still counts as cached."""

    def retain(self, block: int) -> None:
        self._refs[block] += 1


class MissingZeroing(FakeExecutor):
    """Blocks are handed out as their former owner left them."""

    def zero(self, block: int) -> None:
        pass


class CopyOneShort(FakeExecutor):
    """The copy of a partly matched block is one token short."""

    def copy(self, dst: int, src: int, tokens: int) -> None:
        super().copy(dst, src, tokens - 1)


class CopyOneLong(FakeExecutor):
    """The copy of a partly matched block is one token long."""

    def copy(self, dst: int, src: int, tokens: int) -> None:
        super().copy(dst, src, tokens + 1)


BUGS: dict[str, Parts] = {
    "lost release": Parts(scheduler=LostRelease),
    "double release": Parts(scheduler=DoubleRelease),
    "cancel keeps blocks": Parts(scheduler=CancelKeepsBlocks),
    "uncomputed token enters the tree": Parts(scheduler=InsertUncomputed),
    "failed sequence enters the tree": Parts(scheduler=FailedEntersTree),
    "exchange without retain": Parts(scheduler=ExchangeWithoutRetain),
    "oldest preempted": Parts(scheduler=OldestPreempted),
    "partial block shared in place": Parts(scheduler=PartialSharedInPlace),
    "copy source not pinned": Parts(scheduler=SourceNotPinned),
    "missing salt": Parts(tree=MissingSalt),
    "partial match too long": Parts(tree=PartialMatchTooLong),
    "hit of all tokens": Parts(tree=HitOfAllTokens),
    "referenced block evicted": Parts(tree=ReferencedEvicted),
    "leaf never evicted": Parts(tree=LeafForgotten),
    "roots kept": Parts(tree=RootsKept),
    "cached count off": Parts(pool=CachedCountOff),
    "missing zeroing": Parts(executor=MissingZeroing),
    "copy one token short": Parts(executor=CopyOneShort),
    "copy one token long": Parts(executor=CopyOneLong),
}
