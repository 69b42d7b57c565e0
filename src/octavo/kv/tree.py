"""The radix tree that maps prefixes of keys to KV blocks, one node a block.

A full node holds the keys of a whole block. A partial node holds fewer; it is a leaf, and its block may belong to a
sequence that still writes behind the node's keys. A match uses full nodes in place; where it ends inside a node's
block, that part is copied by the caller, so nothing ever writes where the tree can match.

Whoever owns the block of a node owns the blocks of all nodes above it. So the nodes owned by the tree alone are closed
downwards, and every cached block can be evicted, leaves first.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from heapq import heapify, heappop, heappush

from octavo.kv.blocks import BlockPool
from octavo.limits import BLOCK_TOKENS

Salt = bytes | str
Keys = tuple[int, ...]

_DIGEST_BYTES = 16
_KEY_MASK = (1 << 64) - 1


class Node:
    """One block of one prefix. `keys` has 16 entries (full) or fewer (partial); a root has none and no block."""

    __slots__ = ("block", "child_keys", "children", "digest", "keys", "parent", "queued", "salt", "serial", "stamp")

    def __init__(self, parent: Node | None, keys: Keys, block: int, salt: Salt, serial: int) -> None:
        self.parent = parent
        self.keys = keys
        self.block = block
        self.salt = salt
        self.serial = serial  # unique in a tree's life; also breaks ties between equal stamps
        self.stamp = 0  # logical time of the last use
        self.queued = False  # has an entry in the eviction queue
        self.digest: bytes | None = None
        # Sorted by keys: of all children, the one that shares the longest prefix with a query is a neighbour of the
        # query's place, so a lookup is one bisection however many children there are.
        self.child_keys: list[Keys] = []
        self.children: list[Node] = []


@dataclass(slots=True)
class Match:
    """The longest cached prefix of some keys, at most the limit asked for.

    `blocks` are whole blocks to share. If `partial_tokens` is not 0, the first so many tokens of `partial_block` come
    next and must be copied. `node` is the deepest full node, None at the root.
    """

    node: Node | None
    blocks: list[int]
    partial_block: int = -1
    partial_tokens: int = 0

    @property
    def tokens(self) -> int:
        return len(self.blocks) * BLOCK_TOKENS + self.partial_tokens


def _common(a: Keys, b: Keys) -> int:
    """Length of the common prefix."""
    n = 0
    for x, y in zip(a, b):
        if x != y:
            break
        n += 1
    return n


class PrefixTree:
    """Radix tree over 64-bit keys, one root a salt; holds its blocks in `pool`.

    Every container is bounded by the pool: a node has a block of its own, a root has at least one node, and the
    eviction queue at most twice the nodes and a constant.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.roots: dict[Salt, Node] = {}
        self.evictions = 0
        self._node_of: list[Node | None] = [None] * pool.num_blocks
        self._num_nodes = 0
        self._clock = 0
        self._serial = 0
        self._queue: list[tuple[int, int, Node]] = []  # heap of (stamp, serial, node): unreferenced leaves

    def __len__(self) -> int:
        """Nodes, which is blocks held."""
        return self._num_nodes

    @property
    def queue_length(self) -> int:
        return len(self._queue)

    def nodes(self) -> Iterator[Node]:
        """Every node, parents before children."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children)

    # Lookup

    def match(self, salt: Salt, keys: Sequence[int], limit: int) -> Match:
        """The longest cached prefix of `keys[:limit]`; marks its nodes as used now."""
        found = Match(None, [])
        node = self.roots.get(salt)
        if node is None:
            return found
        self._clock += 1
        done = 0
        while done < limit:
            want = tuple(keys[done : min(done + BLOCK_TOKENS, limit)])
            place = bisect_left(node.child_keys, want)
            if len(want) == BLOCK_TOKENS and place < len(node.children) and node.child_keys[place] == want:
                node = node.children[place]
                node.stamp = self._clock
                found.blocks.append(node.block)
                found.node = node
                done += BLOCK_TOKENS
                continue
            self._match_inside(node, want, place, found)
            break
        return found

    def _match_inside(self, node: Node, want: Keys, place: int, found: Match) -> None:
        for i in (place - 1, place):
            if 0 <= i < len(node.children):
                shared = _common(node.child_keys[i], want)
                if shared > found.partial_tokens:
                    child = node.children[i]
                    child.stamp = self._clock
                    found.partial_block, found.partial_tokens = child.block, shared

    def chain_hash(self, node: Node) -> bytes:
        """16 bytes that name a node's whole prefix: BLAKE2b over its parent's hash and its keys; a root's, its salt."""
        path: list[Node] = []
        while node.digest is None and node.parent is not None:
            path.append(node)
            node = node.parent
        if node.digest is None:
            raw = node.salt.encode() if isinstance(node.salt, str) else node.salt
            kind = b"s" if isinstance(node.salt, str) else b"b"
            node.digest = blake2b(kind + raw, digest_size=_DIGEST_BYTES, person=b"octavo.kv.root").digest()
        digest = node.digest
        for child in reversed(path):
            packed = struct.pack(f"<{len(child.keys)}Q", *(key & _KEY_MASK for key in child.keys))
            digest = blake2b(digest + packed, digest_size=_DIGEST_BYTES, person=b"octavo.kv.block").digest()
            child.digest = digest
        return digest

    # Growth

    def insert(self, parent: Node | None, salt: Salt, keys: Keys, block: int) -> Node:
        """Put a block under `parent` (None: the salt's root) and hold it.

        Returns the new node, or the node that already covers `keys`; then the tree does not hold `block`.
        """
        if parent is None:
            parent = self._root(salt)
        place = bisect_left(parent.child_keys, keys)
        covering = self._covering(parent, keys, place)
        if covering is not None:
            return covering
        self._serial += 1
        node = Node(parent, keys, block, salt, self._serial)
        self.pool.hold(block)
        self._node_of[block] = node
        self._num_nodes += 1
        self._attach(node, place)
        return node

    def extend(self, node: Node, keys: Keys) -> Node:
        """A partial node's block now holds `keys`, which start with the node's keys.

        Returns the node, or another that already covers `keys`; then the node is removed.
        """
        parent = node.parent
        assert parent is not None
        assert keys[: len(node.keys)] == node.keys
        assert not node.children
        self._detach(node)
        place = bisect_left(parent.child_keys, keys)
        covering = self._covering(parent, keys, place)
        if covering is not None:
            self._forget(node)
            return covering
        node.keys = keys
        node.digest = None
        self._attach(node, place)
        return node

    def _root(self, salt: Salt) -> Node:
        root = self.roots.get(salt)
        if root is None:
            root = self.roots[salt] = Node(None, (), -1, salt, 0)
        return root

    @staticmethod
    def _covering(parent: Node, keys: Keys, place: int) -> Node | None:
        """The child whose keys start with `keys`, if any: in sorted order it stands at their place."""
        if place < len(parent.children) and parent.child_keys[place][: len(keys)] == keys:
            return parent.children[place]
        return None

    def _attach(self, node: Node, place: int) -> None:
        parent = node.parent
        assert parent is not None
        self._clock += 1
        node.stamp = self._clock
        parent.child_keys.insert(place, node.keys)
        parent.children.insert(place, node)
        if place > 0:
            before = parent.children[place - 1]
            if self.pool.refs(before.block) == 1 and node.keys[: len(before.keys)] == before.keys:
                self._remove(before)  # all it could match, the new node matches

    # Shrinking

    def unreferenced(self, block: int) -> None:
        """The last sequence gave up a block the tree holds (`BlockPool.release` returned True)."""
        node = self._node_of[block]
        assert node is not None
        self._clock += 1
        node.stamp = self._clock
        self._offer(node)

    def evict(self) -> int:
        """Free the least recently used block among leaves that the tree alone holds; returns it."""
        block = self._remove_oldest()
        self.evictions += 1
        return block

    def flush(self) -> int:
        """Drop all that no sequence uses; returns the number of blocks freed. What running sequences own stays."""
        freed = 0
        while self.pool.num_cached:
            self._remove_oldest()
            freed += 1
        return freed

    def drop_path(self, node: Node) -> None:
        """Drop a node, its ancestors and all below them, as far as the tree alone holds them."""
        if not self._evictable(node):
            return
        while node.parent is not None and node.parent.parent is not None and self._evictable(node.parent):
            node = node.parent
        below = [node]
        for each in below:
            below.extend(each.children)
        for each in reversed(below):
            self._remove(each)

    def _evictable(self, node: Node) -> bool:
        return self.pool.refs(node.block) == 1

    def _offer(self, node: Node) -> None:
        """Queue a node for eviction if it is an unreferenced leaf. A node has one entry at most."""
        if node.children or node.queued or not self._evictable(node):
            return
        if len(self._queue) > 2 * self._num_nodes + 64:
            self._queue = [entry for entry in self._queue if entry[2].parent is not None]
            heapify(self._queue)
        node.queued = True
        heappush(self._queue, (node.stamp, node.serial, node))

    def _remove_oldest(self) -> int:
        while True:
            stamp, _, node = heappop(self._queue)
            node.queued = False
            if node.parent is None or node.children or not self._evictable(node):
                continue  # removed, grown or used since; offered again when it becomes a free leaf
            if node.stamp != stamp:
                self._offer(node)  # used since: back in line at its new place
                continue
            self._remove(node)
            return node.block

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        assert not node.children
        self._detach(node)
        self._forget(node)
        if parent.parent is not None:
            self._offer(parent)
        elif not parent.children:
            del self.roots[parent.salt]

    def _detach(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        place = bisect_left(parent.child_keys, node.keys)
        del parent.child_keys[place]
        del parent.children[place]

    def _forget(self, node: Node) -> None:
        node.parent = None
        self._node_of[node.block] = None
        self._num_nodes -= 1
        self.pool.drop(node.block)
