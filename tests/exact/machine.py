"""Engines for the exactness suite, and how cases are run on one: step by step, on this thread, nothing hidden."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from octavo.engine.core import Engine, EngineConfig
from octavo.engine.request import Drawn, Request
from octavo.executor.native import NativeExecutor
from octavo.models.registry import build_program
from octavo.outputs import RequestOutput
from octavo.params import SamplingParams
from octavo.tokenizer import Tokenizer
from octavo.weights.checkpoint import Checkpoint

_ids = count()


@dataclass(frozen=True)
class Case:
    name: str
    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class Trace:
    """Everything a request gave, to the bit: floats are compared with ==, which is by value and so by bits here."""

    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[Any, ...]
    prompt_logprobs: Any
    texts: tuple[str, ...]
    reasons: tuple[Any, ...]

    @staticmethod
    def of(output: RequestOutput) -> Trace:
        if output.error is not None:
            raise output.error
        return Trace(
            tokens=tuple(tuple(o.token_ids) for o in output.outputs),
            logprobs=tuple(tuple(_plain(entry) for entry in o.logprobs or ()) for o in output.outputs),
            prompt_logprobs=None if output.prompt_logprobs is None else tuple(map(_plain, output.prompt_logprobs)),
            texts=tuple(o.text for o in output.outputs),
            reasons=tuple((o.finish_reason, o.stop_reason) for o in output.outputs),
        )


def _plain(entry: Mapping[int, Any] | None) -> Any:
    return None if entry is None else tuple((i, e.logprob.hex(), e.rank) for i, e in entry.items())


@dataclass
class Model:
    """A checkpoint with its tokenizer, and the options that define its arithmetic's bits."""

    name: str
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    weights: str = "auto"
    kv_dtype: str = "f16"
    eos: frozenset[int] = field(default_factory=frozenset)

    def executor(self, *, num_blocks: int = 1024, **options: Any) -> NativeExecutor:
        program = build_program(self.checkpoint.config)
        return NativeExecutor(
            program,
            self.checkpoint.tensors,
            num_blocks=num_blocks,
            weights=self.weights,
            kv_dtype=self.kv_dtype,
            **options,
        )

    @contextmanager
    def engine(
        self,
        *,
        chunk_size: int | None = None,
        policy: str = "fcfs",
        max_num_seqs: int = 32,
        inter_token_target: float = 0.1,
        jump_forward: bool = True,
        wrap: Callable[[NativeExecutor], Any] = lambda executor: executor,
        **options: Any,
    ) -> Iterator[Engine]:
        executor = wrap(self.executor(**options))
        config = EngineConfig(
            max_model_len=min(self.checkpoint.config.context, executor.num_blocks * 16),
            max_num_seqs=max_num_seqs,
            max_rows=512,
            policy=policy,
            inter_token_target=inter_token_target,
            chunk_size=chunk_size,
            jump_forward=jump_forward,
        )
        try:
            yield Engine(executor, self.tokenizer, self.eos, config)
        finally:
            executor.close()


@dataclass
class Run:
    """The traces by case name, and the requests for what else a scenario wants to know."""

    traces: dict[str, Trace]
    requests: dict[str, Request]


def run(
    engine: Engine,
    cases: Sequence[Case],
    *,
    arrivals: Sequence[int] | None = None,
    on_step: Callable[[Engine, list[Request]], None] | None = None,
    emitted: Mapping[str, Sequence[Sequence[Drawn]]] | None = None,
) -> Run:
    """Runs the cases together; case i is added before step arrivals[i] (default: all before the first)."""
    outputs: dict[str, RequestOutput] = {}
    requests: dict[str, Request] = {}
    when = list(arrivals) if arrivals is not None else [0] * len(cases)
    pending = sorted(range(len(cases)), key=lambda i: (when[i], i))
    step = 0
    while pending or engine.has_work():
        while pending and (when[pending[0]] <= step or not engine.has_work()):
            case = cases[pending.pop(0)]

            def sink(update: Any, name: str = case.name) -> None:
                if isinstance(update, RequestOutput):
                    outputs[name] = update

            request = engine.prepare(f"exact-{next(_ids)}", case.prompt, case.params, sink)
            engine.add(request, (emitted or {}).get(case.name, ()))
            requests[case.name] = request
        engine.step()
        step += 1
        if on_step is not None:
            on_step(engine, list(requests.values()))
    return Run({name: Trace.of(output) for name, output in outputs.items()}, requests)


def run_alone(engine: Engine, cases: Sequence[Case]) -> dict[str, Trace]:
    """Each case by itself, from a cold cache."""
    traces = {}
    for case in cases:
        engine.flush_cache()
        traces.update(run(engine, [case]).traces)
    return traces


def assert_same(expected: Mapping[str, Trace], got: Mapping[str, Trace], what: str) -> None:
    """Names the first difference: which case, which output, which token."""
    for name, trace in got.items():
        if trace == expected[name]:
            continue
        wanted = expected[name]
        for o, (a, b) in enumerate(zip(wanted.tokens, trace.tokens)):
            for i, (x, y) in enumerate(zip(a, b)):
                if x != y or wanted.logprobs[o][i] != trace.logprobs[o][i]:
                    before, after = wanted.logprobs[o][i], trace.logprobs[o][i]
                    raise AssertionError(f"{what}: {name}, output {o}, token {i}: {x} {before} became {y} {after}")
        raise AssertionError(f"{what}: {name}: {wanted} became {trace}")
