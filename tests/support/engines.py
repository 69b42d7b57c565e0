"""Step-by-step engines over the tiny model, and listeners for their requests."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo.engine.core import Engine
from octavo.outputs import RequestOutput, TextDelta
from octavo.params import SamplingParams
from octavo.tokenizer import Tokenizer
from octavo.weights.checkpoint import load_checkpoint
from tests.exact.machine import Model, Trace
from tests.support.tiny_llm import write_tiny_llm

EOS = 2
PROMPTS = [list(range(3 + i, 3 + i + n)) for i, n in enumerate((20, 5, 33))]


def load_tiny(folder: Path) -> Model:
    checkpoint = load_checkpoint(write_tiny_llm(folder))
    tokenizer = Tokenizer.from_assets(checkpoint.tokenizer, checkpoint.config.vocab_size)
    return Model("tiny", checkpoint, tokenizer, weights="f32", eos=frozenset({EOS}))


@contextmanager
def engine_of(model: Model, **options: Any) -> Iterator[Engine]:
    with model.engine(**{"threads": 1, "num_blocks": 64, **options}) as engine:
        yield engine


class Inbox:
    """What one request was told."""

    def __init__(self) -> None:
        self.deltas: list[TextDelta] = []
        self.ends: list[RequestOutput] = []

    def __call__(self, update: TextDelta | RequestOutput) -> None:
        if isinstance(update, RequestOutput):
            self.ends.append(update)
        else:
            self.deltas.append(update)

    @property
    def output(self) -> RequestOutput:
        assert len(self.ends) == 1
        return self.ends[0]


def submit(
    engine: Engine,
    name: str,
    prompt: Sequence[int],
    sink: Any = None,
    emitted: Any = (),
    streams: bool = True,
    **params: Any,
) -> Any:
    """Adds a request; returns its inbox."""
    inbox = Inbox() if sink is None else sink
    params = {"max_tokens": 6, "temperature": 1.0, "seed": 7, "logprobs": 2, **params}
    engine.add(engine.prepare(name, prompt, SamplingParams(**params), inbox, streams=streams), emitted)
    return inbox


def finish(engine: Engine) -> None:
    for _ in range(2000):
        if not engine.has_work():
            assert engine.scheduler.pool.num_used == 0
            assert not engine.scheduler.has_work()
            assert engine.stats()["requests"] == 0
            return
        engine.step()
    raise AssertionError("the engine does not come to an end")


def answers(engine: Engine, prompts: Sequence[Sequence[int]] = PROMPTS, **params: Any) -> list[Trace]:
    inboxes = [submit(engine, f"r{i}-{random.random()}", prompt, **params) for i, prompt in enumerate(prompts)]
    finish(engine)
    return [Trace.of(inbox.output) for inbox in inboxes]
