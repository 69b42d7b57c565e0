"""Who owns each KV block: reference counts and a free list. Knows no addresses, no tokens and no sequences."""

from __future__ import annotations

from octavo.errors import InvalidParameterError


class BlockPool:
    """Counts the owners of `num_blocks` KV blocks, numbered from 0.

    Owners are sequences (`allocate`, `retain`, `release`) and the prefix tree, at most once a block (`hold`, `drop`).
    A block is free (no owner), cached (the tree alone) or used (at least one sequence), and
    `num_free + num_cached + num_used == num_blocks`.
    """

    __slots__ = ("_free", "_held", "_num_cached", "_refs", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise InvalidParameterError("num_blocks", num_blocks, "at least 1")
        self.num_blocks = num_blocks
        # Last in, first out, low numbers first: memory is touched only as far as it was ever needed.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._refs = [0] * num_blocks
        self._held = bytearray(num_blocks)
        self._num_cached = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - self._num_cached

    @property
    def num_available(self) -> int:
        """Blocks a sequence can get: free ones, and cached ones once the tree evicts them."""
        return len(self._free) + self._num_cached

    def refs(self, block: int) -> int:
        """Owners of a block, the tree included."""
        return self._refs[block]

    def held(self, block: int) -> bool:
        """Whether the tree is one of the owners."""
        return self._held[block] != 0

    def allocate(self) -> int:
        """A free block, with its caller as only owner. Its contents are stale: zero it before use."""
        assert self._free, "allocate from an empty free list"
        block = self._free.pop()
        self._refs[block] = 1
        return block

    def retain(self, block: int) -> None:
        """One more sequence owns a block that is cached or used."""
        refs = self._refs[block]
        assert refs > 0, f"retain of free block {block}"
        if refs == 1 and self._held[block]:
            self._num_cached -= 1
        self._refs[block] = refs + 1

    def release(self, block: int) -> bool:
        """One sequence gives a block up. True: from now on the tree alone holds it."""
        refs = self._refs[block] - 1
        assert refs >= self._held[block], f"release of block {block}, which no sequence owns"
        self._refs[block] = refs
        if refs == 0:
            self._free.append(block)
        elif refs == 1 and self._held[block]:
            self._num_cached += 1
            return True
        return False

    def hold(self, block: int) -> None:
        """The tree becomes an owner of a used block."""
        assert self._refs[block] > 0, f"hold of free block {block}"
        assert not self._held[block], f"second hold of block {block}"
        self._refs[block] += 1
        self._held[block] = 1

    def drop(self, block: int) -> None:
        """The tree gives a block up; it becomes free if no sequence owns it."""
        assert self._held[block], f"drop of block {block}, which the tree does not hold"
        refs = self._refs[block] - 1
        self._refs[block] = refs
        self._held[block] = 0
        if refs == 0:
            self._num_cached -= 1
            self._free.append(block)
