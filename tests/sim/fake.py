"""A fake executor whose KV cells are hashes, and the pure function it must agree with.

The cell of a token is a hash of the token, its position and all cells before it, as read through the block table; the
next token comes from the last cell. Any mix-up of blocks, at any layer, changes the output.
"""

from __future__ import annotations

from collections.abc import Collection

from octavo.limits import BLOCK_TOKENS
from octavo.scheduler.plan import StepPlan
from octavo.scheduler.sequence import Sequence

ZEROS = [0] * BLOCK_TOKENS
POISON = -(1 << 40)  # stale or not-a-number


class SimulationFault(AssertionError):
    """A promise was broken."""


def root(salt: bytes | str) -> int:
    """The salt is part of the content, as an adapter would be. Not `hash` of text: that differs between processes."""
    raw = b"s" + salt.encode() if isinstance(salt, str) else b"b" + salt
    return hash(tuple(raw))


def cell_of(token: int, position: int, before: int, block: list[int]) -> int:
    """`before`: hash of all whole blocks before this one; `block`: the cells of this block before the token."""
    return hash((token, position, before, *block)) or 1


def token_of(cell: int, vocabulary: int) -> int:
    return (cell >> 7) % vocabulary


class FakeExecutor:
    """Cells of all blocks, at first stale."""

    def __init__(self, num_blocks: int, vocabulary: int) -> None:
        self.cells = [[POISON] * BLOCK_TOKENS for _ in range(num_blocks)]
        self.vocabulary = vocabulary

    def zero(self, block: int) -> None:
        self.cells[block] = ZEROS[:]

    def copy(self, dst: int, src: int, tokens: int) -> None:
        self.cells[dst][:tokens] = self.cells[src][:tokens]

    def step(self, plan: StepPlan, failing: Collection[Sequence]) -> list[int]:
        """Runs a plan; the last cell of each chunk. Rows of `failing` sequences come out as poison."""
        for dst, src, tokens in plan.block_ops:
            self.zero(dst)
            if src >= 0:
                self.copy(dst, src, tokens)
        return [
            self._chunk(chunk.sequence, chunk.start, chunk.start + chunk.count, chunk.sequence in failing)
            for chunk in plan.sequences
        ]

    def _chunk(self, sequence: Sequence, start: int, stop: int, failing: bool) -> int:
        table = sequence.block_table
        cells = self.cells
        before = root(sequence.salt)
        for block in table[: start // BLOCK_TOKENS]:
            before = hash((before, *cells[block]))
        cell = 0
        for position in range(start, stop):
            index, offset = divmod(position, BLOCK_TOKENS)
            content = cells[table[index]]
            if content[offset:] != ZEROS[offset:]:
                # A masked cell is multiplied by 0, and 0 * NaN is NaN; a matched one must never be overwritten.
                raise SimulationFault(
                    f"sequence {sequence.id} writes at {position}, where block {table[index]} is not zero"
                )
            cell = POISON if failing else cell_of(sequence.token_ids[position], position, before, content[:offset])
            content[offset] = cell
            if offset == BLOCK_TOKENS - 1:
                before = hash((before, *content))
        return cell


class Oracle:
    """The pure function: cells and tokens that follow from (salt, tokens) alone."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self._blocks: dict[tuple[int, int, tuple[int, ...]], tuple[list[int], int]] = {}

    def block(self, before: int, index: int, tokens: tuple[int, ...]) -> tuple[list[int], int]:
        """Cells of block `index` of a sequence, and the hash of all blocks up to and with it."""
        key = (before, index, tokens)
        known = self._blocks.get(key)
        if known is None:
            if len(self._blocks) > 50_000:
                self._blocks.clear()
            cells: list[int] = []
            for offset, token in enumerate(tokens):
                cells.append(cell_of(token, index * BLOCK_TOKENS + offset, before, cells))
            known = self._blocks[key] = (cells, hash((before, *cells)))
        return known

    def next(self, salt: bytes | str, tokens: list[int]) -> int:
        """The token that follows."""
        before, cells = root(salt), [0]
        for first in range(0, len(tokens), BLOCK_TOKENS):
            cells, before = self.block(before, first // BLOCK_TOKENS, tuple(tokens[first : first + BLOCK_TOKENS]))
        return token_of(cells[-1], self.vocabulary)

    def check(self, salt: bytes | str, tokens: list[int], prompt_len: int) -> None:
        """Every token behind the prompt is the one that follows from those before it."""
        before = root(salt)
        for index in range(-(-(len(tokens) - 1) // BLOCK_TOKENS)):
            first = index * BLOCK_TOKENS
            part = tuple(tokens[first : first + BLOCK_TOKENS])
            cells, after = self.block(before, index, part)
            for offset, cell in enumerate(cells):
                position = first + offset + 1
                if prompt_len <= position < len(tokens) and token_of(cell, self.vocabulary) != tokens[position]:
                    raise SimulationFault(
                        f"token {position} is {tokens[position]}, which does not follow from the prompt"
                    )
            before = after
