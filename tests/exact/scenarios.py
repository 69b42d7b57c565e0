"""What may happen around a request. Each scenario makes it happen, proves from stats that it did, and compares bits."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo import _native
from octavo.engine.core import Engine
from octavo.engine.request import Drawn, Request
from octavo.limits import BLOCK_TOKENS
from octavo.params import SamplingParams
from octavo.scheduler.sequence import State

from .machine import Case, Model, Trace, assert_same, run, run_alone

Expected = Mapping[str, Trace]


def in_random_batches(
    model: Model, cases: Sequence[Case], expected: Expected, *, seeds: Sequence[int], **options: Any
) -> None:
    """With random mates, in random order, arriving at random steps."""
    for seed in seeds:
        rng = random.Random(seed)
        order = rng.sample(list(cases), len(cases))
        mates = [
            Case(
                f"mate-{i}",
                tuple(rng.choices(case.prompt, k=rng.randint(1, 60))),
                SamplingParams(max_tokens=rng.randint(1, 20), seed=i),
            )
            for i, case in enumerate(rng.choices(cases, k=6))
        ]
        together = rng.sample(order + mates, len(order) + len(mates))
        most = 0

        def watch(engine: Engine, _: list[Request]) -> None:
            nonlocal most
            most = max(most, len(engine.scheduler.running))

        with model.engine(**options) as engine:
            traces = run(engine, together, arrivals=[rng.randint(0, 12) for _ in together], on_step=watch).traces
        assert most >= min(4, len(cases)), f"batches of at most {most} sequences"
        assert_same(expected, {c.name: traces[c.name] for c in cases}, f"random batch, seed {seed}")


def with_chunks(model: Model, cases: Sequence[Case], expected: Expected, size: int) -> None:
    """Prompts cut in chunks of `size` tokens."""
    largest: set[int] = set()

    def watch(engine: Engine, _: list[Request]) -> None:
        largest.update(s.num_computed for s in engine.scheduler.running)

    with model.engine(chunk_size=size) as engine:
        traces = run(engine, cases, on_step=watch).traces
    long_prompts = [len(case.prompt) for case in cases if len(case.prompt) > size]
    assert not long_prompts or size in largest, f"no prompt was cut at {size}"
    assert_same(expected, traces, f"chunks of {size}")


def with_prefix_hits(model: Model, cases: Sequence[Case], expected: Expected, hits: Sequence[int | None]) -> None:
    """A prefix of the prompt is in the cache: exactly `hit` tokens (None: all but one)."""
    with model.engine() as engine:
        for case in cases:
            if case.params.prompt_logprobs is not None:
                continue  # computes its whole prompt
            for wanted in hits:
                hit = len(case.prompt) - 1 if wanted is None else wanted
                if not 0 <= hit < len(case.prompt):
                    continue
                engine.flush_cache()
                if hit:
                    run(engine, [Case("primer", case.prompt[:hit], SamplingParams(max_tokens=1, temperature=0.0))])
                result = run(engine, [case])
                found = result.requests[case.name].output().num_cached_tokens
                assert found == hit, f"{case.name}: {found} tokens came from the cache, not {hit}"
                assert_same(expected, result.traces, f"prefix hit of {hit}")


def preempted_at_every_step(model: Model, cases: Sequence[Case], expected: Expected, *, flush: bool) -> None:
    """After every step that drew a token everything that runs is preempted, its blocks kept or dropped as well."""
    with model.engine() as engine:

        def force(engine: Engine, _: list[Request]) -> None:
            for sequence in list(engine.scheduler.running):
                # A prefill is let through, or a prompt longer than a step would never end when its blocks are dropped.
                if not flush or sequence.num_computed >= sequence.prefill_end:
                    engine.scheduler.preempt(sequence, flush=flush)

        for case in cases:
            before = engine.scheduler.counters.preemptions
            jumped_before = engine.stats()["jump_forward_tokens"]
            hits_before = engine.scheduler.counters.recompute_hit_tokens
            engine.flush_cache()
            traces = run(engine, [case], on_step=force).traces
            drawn = max(len(tokens) for tokens in traces[case.name].tokens)
            # A token that is appended costs no step of its own, and the step that computes it is let through.
            jumped = engine.stats()["jump_forward_tokens"] - jumped_before
            assert engine.scheduler.counters.preemptions - before >= drawn - 1 - 2 * jumped, (
                f"{case.name} was not preempted at every step"
            )
            recomputed_hits = engine.scheduler.counters.recompute_hit_tokens - hits_before
            if drawn - jumped > 1 and len(case.prompt) > BLOCK_TOKENS and case.params.n == 1:
                assert (recomputed_hits == 0) == flush, (
                    f"{case.name}: {recomputed_hits} tokens came back from the cache"
                )
            assert_same(expected, traces, f"preempted at every step, flush={flush}")


def squeezed_by_a_tiny_pool(model: Model, cases: Sequence[Case], num_blocks: int) -> None:
    """Blocks run out while outputs grow: the scheduler preempts by itself. Long outputs, so its own reference."""
    longer = [
        dataclasses.replace(case, params=dataclasses.replace(case.params, max_tokens=48, ignore_eos=True, min_tokens=0))
        for case in cases
        if len(case.prompt) + 48 < num_blocks * BLOCK_TOKENS // 2 and case.params.prompt_logprobs is None
    ]
    expected = reference(model, longer)
    with model.engine(num_blocks=num_blocks) as engine:
        traces = run(engine, longer).traces
        assert engine.scheduler.counters.preemptions > 0, "nothing was preempted"
    assert_same(expected, traces, "tiny pool")


def sharing_a_prefix(model: Model, cases: Sequence[Case], prefix: int, **options: Any) -> None:
    """Sequences decode together over the same blocks: attention reads those once, or for each when cascade is off."""
    expected = reference(model, cases)
    for cascade in (True, False):
        sharing = 0

        def watch(engine: Engine, _: list[Request]) -> None:
            nonlocal sharing
            decoding = [s for s in engine.scheduler.running if s.num_computed >= s.prefill_end]
            starts = Counter(tuple(s.block_table[: prefix // BLOCK_TOKENS]) for s in decoding)
            sharing = max([sharing, *starts.values()])

        # No clock decides how many prompts a step takes: all are to decode before the first has ended.
        with model.engine(cascade=cascade, inter_token_target=3600.0, **options) as engine:
            assert engine.executor.cascade == cascade
            together = run(engine, cases).traces
            assert_same(expected, together, f"a prefix computed together, cascade={cascade}")
            engine.flush_cache()
            run(engine, [Case("primer", cases[0].prompt[:prefix], SamplingParams(max_tokens=1))])
            together = run(engine, cases, on_step=watch).traces
        assert sharing >= len(cases) - 1, f"only {sharing} of {len(cases)} sequences shared their blocks"
        assert_same(expected, together, f"a shared prefix, cascade={cascade}")


def other_kernels() -> list[str]:
    """The kernel tables this CPU can run besides the best one, which every other scenario runs on; slowest first."""
    return [name for name in _native.kernel_names() if not name.startswith("faulty-")][:-1]


def with_jump_forward_off(model: Model, cases: Sequence[Case], expected: Expected) -> None:
    """What grammars force is drawn token by token."""
    jumped = {}
    for jump in (True, False):
        with model.engine(jump_forward=jump) as engine:
            assert_same(expected, run(engine, cases).traces, f"jump_forward={jump}")
            jumped[jump] = engine.stats()["jump_forward_tokens"]
    assert jumped[True] > len(cases), "hardly a token was forced"
    assert jumped[False] == 0


def with_options(model: Model, cases: Sequence[Case], expected: Expected, **options: Any) -> None:
    """Other threads, kernels or fusion."""
    with model.engine(**options) as engine:
        for name, value in options.items():
            assert getattr(engine.executor, name) == value
        traces = run(engine, cases).traces
    assert_same(expected, traces, str(options))


def cut_at_every_token(model: Model, cases: Sequence[Case], expected: Expected) -> None:
    """A request continued from what it had already emitted, for every such length, as after a crash or a move."""
    with model.engine() as engine:
        for case in cases:
            if case.params.n != 1:
                continue
            whole = run(engine, [case]).requests[case.name]
            drawn = _drawn_by(whole)
            for cut in range(len(drawn)):
                engine.flush_cache()
                traces = run(engine, [case], emitted={case.name: [drawn[:cut]]}).traces
                assert_same(expected, traces, f"continued after {cut} tokens")


def _drawn_by(request: Request) -> list[Drawn]:
    output = request.output().outputs[0]
    logprobs = output.logprobs or [None] * len(output.token_ids)
    return [
        Drawn(token, None if entry is None else entry[token].logprob, entry)
        for token, entry in zip(output.token_ids, logprobs)
    ]


def cancelled_neighbours(model: Model, cases: Sequence[Case], expected: Expected) -> None:
    """Neighbours are cancelled at random moments; what they had is free at once."""
    rng = random.Random(5)
    victims = [
        Case(f"victim-{i}", case.prompt, SamplingParams(max_tokens=64, seed=i, ignore_eos=True))
        for i, case in enumerate(cases)
    ]

    with model.engine() as engine:
        cancelled = 0

        def cancel(engine: Engine, requests: list[Request]) -> None:
            nonlocal cancelled
            running = [r for r in requests if r.prompt_token_ids and not r.finished and r.params.ignore_eos]
            if running and rng.random() < 0.5:
                cancelled += engine.cancel(rng.choice(running).request_id)
            assert all(s.state is State.RUNNING for s in engine.scheduler.running)

        traces = run(engine, [*victims, *cases], on_step=cancel).traces
        assert cancelled > 0
        assert engine.scheduler.pool.num_used == 0
    assert_same(expected, {case.name: traces[case.name] for case in cases}, "cancelled neighbours")


def on_blocks_full_of_nan(
    model: Model, cases: Sequence[Case], expected: Expected, wrap: Callable[[Any], Any] = lambda e: e
) -> None:
    """Every block holds NaN from a former owner."""

    def poison(executor: Any) -> Any:
        rubbish = b"\xff" * len(executor.export_block(0))  # NaN in every float format, so in the scales of int8 too
        for block in range(executor.num_blocks):
            executor.import_block(block, rubbish)
        return wrap(executor)

    with model.engine(num_blocks=160, wrap=poison) as engine:
        traces = run(engine, [case for case in cases if len(case.prompt) < 1000]).traces
    assert_same(expected, traces, "blocks full of NaN")


def in_a_new_process(arguments: Sequence[str], expected: Expected) -> None:
    """`arguments` make tests.exact print the traces of the same cases as JSON (see tests/exact/__main__.py)."""
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "tests.exact", *arguments], cwd=root, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert sorted(found) == sorted(expected)
    for name, trace in expected.items():
        assert found[name] == repr(trace), f"a new process: {name} differs"


def reference(model: Model, cases: Sequence[Case], **options: Any) -> dict[str, Trace]:
    """What everything is compared with: each case alone, cold."""
    with model.engine(**options) as engine:
        return run_alone(engine, cases)
