from __future__ import annotations

import random

import pytest

from octavo.errors import InvalidParameterError
from octavo.kv.blocks import BlockPool


def test_free_cached_and_used_always_add_up_to_total() -> None:
    rng = random.Random(0)
    pool = BlockPool(12)
    owners: list[int] = []  # one entry an owner
    held: set[int] = set()
    for _ in range(2_000):
        move = rng.random()
        if move < 0.3 and pool.num_free:
            owners.append(pool.allocate())
        elif move < 0.45 and (owners or held):
            block = rng.choice(owners + sorted(held))
            pool.retain(block)
            owners.append(block)
        elif move < 0.8 and owners:
            block = owners.pop(rng.randrange(len(owners)))
            assert pool.release(block) == (block in held and block not in owners)
        elif move < 0.9 and set(owners) - held:
            block = rng.choice(sorted(set(owners) - held))
            pool.hold(block)
            held.add(block)
        elif held:
            block = rng.choice(sorted(held))
            pool.drop(block)
            held.remove(block)
        assert pool.num_used == len(set(owners))
        assert pool.num_cached == len(held - set(owners))
        assert pool.num_free == 12 - len(held | set(owners))
        assert pool.num_available == pool.num_free + pool.num_cached
        assert all(pool.refs(b) == owners.count(b) + (b in held) and pool.held(b) == (b in held) for b in range(12))


def test_low_blocks_are_used_first_so_that_memory_is_touched_lazily() -> None:
    pool = BlockPool(100)
    assert [pool.allocate() for _ in range(3)] == [0, 1, 2]
    pool.release(1)
    assert pool.allocate() == 1


MISUSES = {
    "double release": ("release", "release"),
    "retain free": ("release", "retain"),
    "hold twice": ("hold", "hold"),
    "hold free": ("release", "hold"),
    "drop unheld": ("retain", "drop"),
    "release what only the tree holds": ("hold", "release", "release"),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_is_noticed_at_once(misuse: str) -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    *moves, last = MISUSES[misuse]
    for move in moves:
        getattr(pool, move)(block)
    with pytest.raises(AssertionError):
        getattr(pool, last)(block)


def test_an_exhausted_pool_hands_out_nothing() -> None:
    pool = BlockPool(1)
    pool.allocate()
    with pytest.raises(AssertionError):
        pool.allocate()


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="num_blocks=0"):
        BlockPool(0)
