from __future__ import annotations

import random
from hashlib import blake2b

import pytest

from octavo.kv.blocks import BlockPool
from octavo.kv.tree import Match, Node, PrefixTree, Salt


def store(tree: PrefixTree, keys: list[int], salt: Salt = "") -> list[int]:
    """Enter keys as a finished sequence does, with blocks of its own; the blocks that the tree took."""
    node: Node | None = None
    taken = []
    for start in range(0, len(keys), 16):
        if tree.pool.num_free == 0:
            tree.evict()
        block = tree.pool.allocate()
        inserted = tree.insert(node, salt, tuple(keys[start : start + 16]), block)
        if inserted.block == block:
            taken.append(block)
        if tree.pool.release(block):
            tree.unreferenced(block)
        node = inserted
    return taken


def hit(tree: PrefixTree, keys: list[int], limit: int | None = None, salt: Salt = "") -> int:
    return tree.match(salt, keys, len(keys) if limit is None else limit).tokens


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 50])
def test_reuse_is_exact_to_the_token(length: int) -> None:
    tree = PrefixTree(BlockPool(16))
    keys = list(range(100, 150))
    store(tree, keys)
    query = [*keys[:length], 7, 7, 7]
    match = tree.match("", query, len(query))
    assert match.tokens == length
    assert len(match.blocks) == length // 16
    assert match.partial_tokens == length % 16
    for limit in range(length + 1):
        assert hit(tree, query, limit) == limit


def test_longest_match_equals_brute_force_on_two_symbols() -> None:
    rng = random.Random(1)
    for _ in range(60):
        tree = PrefixTree(BlockPool(400))
        texts = []
        for _ in range(12):
            base = rng.choice(texts)[: rng.randrange(50)] if texts and rng.random() < 0.8 else []
            texts.append(base + [rng.randrange(2) for _ in range(rng.randint(1, 50 - len(base)))])
            store(tree, texts[-1])
        for _ in range(30):
            query = rng.choice(texts)[: rng.randrange(50)] + [rng.randrange(2) for _ in range(rng.randrange(1, 8))]
            limit = rng.randint(0, len(query))
            assert hit(tree, query, limit) == min(limit, max(common(query, text) for text in texts))


def test_salts_do_not_see_each_other() -> None:
    tree = PrefixTree(BlockPool(16))
    store(tree, list(range(40)), "a")
    assert hit(tree, list(range(40)), salt="a") == 40
    assert hit(tree, list(range(40)), salt="") == 0
    assert hit(tree, list(range(40)), salt=b"a") == 0


def test_an_equal_block_is_not_stored_twice() -> None:
    tree = PrefixTree(BlockPool(16))
    assert len(store(tree, list(range(40)))) == 3
    assert len(store(tree, list(range(40)))) == 0
    assert len(store(tree, list(range(38)))) == 0
    assert len(tree) == 3


def test_a_longer_part_replaces_the_shorter_one_it_covers() -> None:
    tree = PrefixTree(BlockPool(16))
    store(tree, [1, 2, 3])
    store(tree, [1, 2, 3, 4])
    store(tree, list(range(1, 17)))
    assert len(tree) == 1
    assert hit(tree, list(range(1, 17))) == 16


def test_a_growing_block_is_matched_only_as_far_as_it_was_entered() -> None:
    pool = BlockPool(16)
    tree = PrefixTree(pool)
    keys = list(range(16))
    block = pool.allocate()
    node = tree.insert(None, "", tuple(keys[:5]), block)
    assert hit(tree, keys) == 5
    assert tree.extend(node, tuple(keys[:9])) is node
    assert hit(tree, keys) == 9
    assert tree.extend(node, tuple(keys)) is node
    assert tree.match("", keys, 16).blocks == [block]
    assert pool.num_used == 1
    assert len(tree) == 1


def test_growth_into_what_the_tree_has_gives_up_the_own_node() -> None:
    pool = BlockPool(16)
    tree = PrefixTree(pool)
    keys = list(range(16))
    mine = pool.allocate()
    node = tree.insert(None, "", tuple(keys[:5]), mine)
    (other,) = store(tree, keys)
    assert tree.extend(node, tuple(keys)).block == other
    assert not pool.held(mine)
    assert tree.match("", keys, 16).blocks == [other]


def test_eviction_takes_leaves_least_recently_used_first() -> None:
    tree = PrefixTree(BlockPool(16))
    old = store(tree, [1] * 32)
    middle = store(tree, [2] * 32)
    new = store(tree, [3] * 32)
    hit(tree, [1] * 32)
    order = [tree.evict() for _ in range(6)]
    assert order == [middle[1], middle[0], new[1], new[0], old[1], old[0]]
    assert tree.evictions == 6
    assert not tree.roots


def test_what_a_sequence_uses_is_never_evicted() -> None:
    pool = BlockPool(4)
    tree = PrefixTree(pool)
    used = store(tree, [1] * 16)[0]
    pool.retain(used)
    store(tree, [1] * 16 + [2] * 32)
    assert tree.flush() == 2
    assert len(tree) == 1
    assert pool.num_cached == 0
    assert pool.release(used)
    tree.unreferenced(used)
    assert tree.evict() == used
    assert pool.num_free == 4


def test_flush_frees_all_blocks_of_an_idle_pool() -> None:
    tree = PrefixTree(BlockPool(64))
    for i in range(10):
        store(tree, list(range(i, i + 40)), str(i % 3))
    assert tree.flush() == 30
    assert tree.pool.num_free == 64
    assert not tree.roots


def test_drop_path_spares_what_is_in_use() -> None:
    pool = BlockPool(16)
    tree = PrefixTree(pool)
    store(tree, [1] * 16 + [2] * 16 + [3] * 5)
    store(tree, [1] * 16 + [4] * 16)
    match: Match = tree.match("", [1] * 16 + [2] * 16, 32)
    assert match.node is not None
    tree.drop_path(match.node)  # takes the whole prefix with all that hangs on it
    assert len(tree) == 0
    store(tree, [1] * 16 + [2] * 16 + [3] * 5)
    match = tree.match("", [1] * 16 + [2] * 16, 32)
    assert match.node is not None
    pool.retain(match.blocks[0])
    tree.drop_path(match.node)
    assert hit(tree, [1] * 16 + [2] * 16) == 16


def test_chain_hash_names_salt_and_whole_prefix() -> None:
    tree = PrefixTree(BlockPool(32))

    def digest(keys: list[int], salt: Salt = "") -> bytes:
        store(tree, keys, salt)
        node = tree.match(salt, keys, len(keys)).node
        assert node is not None
        return tree.chain_hash(node)

    wide = 1 << 63
    first = digest([wide, *range(31)])
    root = blake2b(b"s", digest_size=16, person=b"octavo.kv.root").digest()
    for block in ([wide, *range(15)], range(15, 31)):
        packed = b"".join(key.to_bytes(8, "little") for key in block)
        root = blake2b(root + packed, digest_size=16, person=b"octavo.kv.block").digest()
    assert first == root
    others = [digest([0, *range(31)]), digest([wide, *range(31)], "x"), digest([wide, *range(31)], b"x")]
    others.append(digest([wide, *range(15)]))
    assert len({first, *others}) == 5
    tree.flush()
    assert digest([wide, *range(31)]) == first


def test_everything_keyed_by_requests_is_bounded_by_the_pool() -> None:
    tree = PrefixTree(BlockPool(8))
    for i in range(20_000):
        store(tree, [i, i, i], f"salt {i}")
        if i % 3 == 0:
            tree.match(f"salt {i}", [i], 1)
        if i % 50 == 0:
            tree.flush()
        assert len(tree.roots) <= len(tree) <= 8
        assert tree.queue_length <= 2 * 8 + 65


def test_a_lookup_costs_little_however_many_children_share_a_start() -> None:
    tree = PrefixTree(BlockPool(5_000))
    rng = random.Random(2)
    texts = [[1, 2, 3] + [rng.randrange(50_000) for _ in range(13)] for _ in range(5_000)]
    for text in texts:
        store(tree, text)

    class Counted(int):
        compared = 0

        def __lt__(self, other: int) -> bool:
            Counted.compared += 1
            return int(self) < int(other)

        def __eq__(self, other: object) -> bool:
            Counted.compared += 1
            return int(self) == other

        __hash__ = int.__hash__

    query = [Counted(key) for key in [*texts[77][:9], 0, 0]]
    assert hit(tree, query) == 9
    assert Counted.compared < 400
