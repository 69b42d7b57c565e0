"""I1 to I4 and I8 of the reliability rules, recomputed from scratch, and what the tree promises about its blocks."""

from __future__ import annotations

from octavo.kv.blocks import BlockPool
from octavo.kv.tree import Node, PrefixTree
from octavo.limits import BLOCK_TOKENS
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.sequence import Sequence, State, blocks_for

from .fake import FakeExecutor, Oracle, SimulationFault, root


def require(truth: bool, broken: str) -> None:
    if not truth:
        raise SimulationFault(broken)


def check_all(scheduler: Scheduler, executor: FakeExecutor, oracle: Oracle) -> None:
    pool, tree = scheduler.pool, scheduler.tree
    owners = [0] * pool.num_blocks
    for sequence in scheduler.running:
        for block in sequence.block_table:
            owners[block] += 1
    nodes = list(tree.nodes())
    check_accounting(pool, owners, nodes)
    check_sharing(scheduler.running, owners)
    for sequence in scheduler.running:
        check_running(sequence)
    decoding = sum(sequence.num_computed >= sequence.prefill_end for sequence in scheduler.running)
    require(scheduler.num_decoding == decoding, "num_decoding is not what runs past its prefill")
    for sequence in scheduler.waiting:
        require(sequence.state is State.WAITING and not sequence.block_table, "I1: a waiting sequence owns blocks")
    check_waste(scheduler)
    check_tree(tree, nodes, pool)
    check_contents(tree, executor, oracle)
    check_bounds(scheduler, len(nodes))


def check_accounting(pool: BlockPool, owners: list[int], nodes: list[Node]) -> None:
    held = [False] * pool.num_blocks
    for node in nodes:
        require(not held[node.block], "I2: two nodes have one block")
        held[node.block] = True
    free = cached = used = 0
    for block, count in enumerate(owners):
        require(pool.held(block) == held[block], f"I2: block {block}: held is wrong")
        require(
            pool.refs(block) == count + held[block], f"I2: block {block}: {count} sequences, refs {pool.refs(block)}"
        )
        if count:
            used += 1
        elif held[block]:
            cached += 1
        else:
            free += 1
    require(
        (pool.num_free, pool.num_cached, pool.num_used) == (free, cached, used),
        "I1: counts are not those of the blocks",
    )
    listed = set(pool._free)
    require(len(listed) == len(pool._free) == free, "I1: free list")
    require(not any(owners[block] or held[block] for block in listed), "I2: a block is free and owned")


def check_sharing(running: list[Sequence], owners: list[int]) -> None:
    first: dict[int, tuple[int, Sequence]] = {}
    for sequence in running:
        for index, block in enumerate(sequence.block_table):
            if owners[block] < 2:
                continue
            if block not in first:
                first[block] = (index, sequence)
                continue
            other_index, other = first[block]
            end = (index + 1) * BLOCK_TOKENS
            require(
                other_index == index
                and other is not sequence
                and other.salt == sequence.salt
                and min(other.num_computed, sequence.num_computed) >= end
                and other.token_ids[:end] == sequence.token_ids[:end],
                f"I3: sequences {other.id} and {sequence.id} share block {block}, but not the prefix",
            )


def check_running(sequence: Sequence) -> None:
    require(sequence.state is State.RUNNING, "a running sequence is in another state")
    require(0 < sequence.num_computed < len(sequence.token_ids), "num_computed is out of range")
    require(len(sequence.block_table) == blocks_for(sequence.num_computed), "blocks are not allocated lazily")
    # Its whole blocks are in the tree, and are those of its block table: so cached blocks are closed downwards.
    require(sequence.depth == sequence.num_computed // BLOCK_TOKENS, "whole computed blocks are missing in the tree")
    node, depth = sequence.node, sequence.depth
    while node is not None and node.parent is not None:
        depth -= 1
        require(node.block == sequence.block_table[depth], "block table and tree disagree")
        node = node.parent
    require(depth == 0, "the tree path is too short")


def check_waste(scheduler: Scheduler) -> None:
    stored: dict[int, int] = {}
    copied = 0
    for sequence in scheduler.running:
        copied += sequence.copied
        for index, block in enumerate(sequence.block_table):
            stored[block] = min(BLOCK_TOKENS, sequence.num_computed - index * BLOCK_TOKENS)
    slots = len(stored) * BLOCK_TOKENS
    waste = 100 * (1 - (sum(stored.values()) - copied) / slots) if slots else 0.0
    require(abs(scheduler.stats().waste_percent - waste) < 1e-9, "waste is not what the blocks show")


def check_tree(tree: PrefixTree, nodes: list[Node], pool: BlockPool) -> None:
    queued = {id(entry[2]) for entry in tree._queue}
    require(len(tree) == len(nodes), "node count")
    for node in nodes:
        children = node.children
        require(1 <= len(node.keys) <= BLOCK_TOKENS, "a node without keys")
        if children:
            require(len(node.keys) == BLOCK_TOKENS, "a partial node has children")
            require(node.child_keys == [child.keys for child in children], "child keys")
            require(len(children) == 1 or node.child_keys == sorted(set(node.child_keys)), "children are not sorted")
        elif pool.refs(node.block) == 1:
            require(node.queued and id(node) in queued, "an unreferenced leaf cannot be evicted")


def check_contents(tree: PrefixTree, executor: FakeExecutor, oracle: Oracle) -> None:
    """Each matched position holds the KV of exactly its prefix."""
    stack = [(child, root(salt), 0) for salt, top in tree.roots.items() for child in top.children]
    while stack:
        node, before, index = stack.pop()
        cells, after = oracle.block(before, index, node.keys)
        require(executor.cells[node.block][: len(cells)] == cells, f"block {node.block} in the tree has other contents")
        for child in node.children:
            stack.append((child, after, index + 1))


def check_bounds(scheduler: Scheduler, nodes: int) -> None:
    tree, waiting = scheduler.tree, scheduler.waiting
    require(len(tree.roots) <= nodes, "I8: roots without nodes")
    require(nodes <= scheduler.pool.num_blocks, "I8: nodes")
    require(tree.queue_length <= 2 * scheduler.pool.num_blocks + 65, "I8: eviction queue")
    require(len(scheduler.running) <= scheduler.config.max_sequences, "I8: running")
    # Preempted sequences come back to the queue whatever its length.
    require(len(waiting) <= waiting.max_waiting + scheduler.config.max_sequences, "I8: waiting")
    require(len(waiting.young) <= len(waiting), "I8: ageing")
