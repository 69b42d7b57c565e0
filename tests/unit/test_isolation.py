"""An exception that belongs to one request ends that request: its neighbours keep their bits, the engine goes on."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

from octavo.engine.core import Engine
from octavo.engine.request import Generation, Request
from octavo.errors import EngineClosedError, RequestFailedError
from octavo.executor.interface import Batch, SamplingRows, StepResult
from octavo.sampling import RowEdits
from tests.exact.machine import Model, Trace
from tests.support.engines import PROMPTS, Inbox, answers, engine_of, finish, load_tiny, submit


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_tiny(tmp_path_factory.mktemp("tiny"))


PER_REQUEST = ("/octavo/sampling/", "/octavo/tokenizer/", "/octavo/engine/request.py", "/tests/support/engines.py")
IN_CORE = {"_add_scoring_rows", "_accept", "_logprobs"}
GUARDS = {"complete", "refused"}  # what brings the failure to its request


class _Injected(Exception):
    pass


def _is_request_code(frame: FrameType) -> bool:
    code = frame.f_code
    if code.co_name in GUARDS or code.co_name == "<genexpr>":  # an abandoned generator can't raise to anyone
        return False
    if code.co_filename.endswith("/octavo/engine/core.py"):
        return code.co_name in IN_CORE
    return any(part in code.co_filename for part in PER_REQUEST)


def _steps_failing_at_call(engine: Engine, number: int) -> str | None:
    """Runs the engine to its end; the number-th call of request code in a step raises. Returns its name, if reached."""
    calls = 0
    name: str | None = None

    def inject(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls, name
        if event == "call" and name is None and _is_request_code(frame):
            calls += 1
            if calls == number:
                name = frame.f_code.co_name
                raise _Injected(name)

    while engine.has_work():
        if name is None:
            sys.setprofile(inject)
        try:
            engine.step()
        finally:
            sys.setprofile(None)
    return name


def test_a_failure_in_any_call_that_serves_a_request_ends_at_most_that_request(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    """Every call, found by running: a new piece of request code in a step is injected into without a word here."""
    caplog.set_level("CRITICAL")
    styles = [{"prompt_logprobs": 1}, {"stop": ["zz"], "presence_penalty": 0.5, "n": 2}, {"bad_words": ["ab"]}]
    with engine_of(model) as engine:

        def start(tag: int) -> list[Inbox]:
            engine.flush_cache()
            many = zip(PROMPTS, styles)
            return [submit(engine, f"{tag}-{i}", p, max_tokens=2, **style) for i, (p, style) in enumerate(many)]

        expected = start(0)
        finish(engine)
        wanted = [Trace.of(inbox.output) for inbox in expected]
        failed_in: dict[str, int] = {}
        for number in range(1, 1000):
            inboxes = start(number)
            name = _steps_failing_at_call(engine, number)
            finish(engine)
            failed = [i for i, inbox in enumerate(inboxes) if not inbox.ends or inbox.output.error is not None]
            assert len(failed) <= 1, f"call {number}, {name}: requests {failed} failed"
            for i, inbox in enumerate(inboxes):
                if i not in failed:
                    assert Trace.of(inbox.output) == wanted[i], f"call {number}, {name}: request {i} has changed"
                elif inbox.ends and inbox.output.error is not None:
                    assert isinstance(inbox.output.error, RequestFailedError)
            if name is None:
                break
            failed_in[name] = failed_in.get(name, 0) + len(failed)
        else:
            raise AssertionError("the run has no end")
    reached = {"edits", "prompt_scalars", "append", "push", "flush", "accept", "emit", "score", "_logprobs", "__call__"}
    assert reached <= {name for name, count in failed_in.items() if count}, failed_in
    assert sum(failed_in.values()) > 100


def _spoil_sampler_row(request: Request) -> None:
    sampler = request.generations[0].sampler
    sampler.edits_logits = True
    sampler.edits = _raise  # type: ignore[method-assign]


def _spoil_row_arrays(request: Request) -> None:
    sampler = request.generations[0].sampler
    sampler.edits_logits = True
    sampler.edits = lambda: RowEdits(bias=(np.zeros(2, np.int32), "x"))  # type: ignore


def _spoil_output(request: Request) -> None:
    class Broken(Generation):
        __slots__ = ()
        output = _raise

    request.generations[0].__class__ = Broken


def _raise(*_: Any) -> Any:
    raise KeyError("injected")


@pytest.mark.parametrize("spoil", [_spoil_sampler_row, _spoil_row_arrays, _spoil_output])
@pytest.mark.parametrize("when", ["prefill", "decode"])
def test_a_broken_request_gets_an_error_and_its_neighbours_their_bits(
    model: Model, spoil: Callable[[Request], None], when: str
) -> None:
    with engine_of(model) as engine:
        expected = answers(engine)
        engine.flush_cache()
        inboxes = [submit(engine, f"r{i}", prompt) for i, prompt in enumerate(PROMPTS)]
        if when == "decode":
            engine.step()
            engine.step()
        spoil(engine._requests["r1"])
        finish(engine)
        assert isinstance(inboxes[1].output.error, RequestFailedError)
        assert [Trace.of(inboxes[i].output) for i in (0, 2)] == [expected[0], expected[2]]
        assert answers(engine) == expected


def test_a_sink_that_raises_ends_its_request_alone(model: Model) -> None:
    with engine_of(model) as engine:
        expected = answers(engine)
        inboxes = [submit(engine, f"r{i}", p, sink=_raise if i == 0 else None) for i, p in enumerate(PROMPTS)]
        finish(engine)
        assert [Trace.of(inbox.output) for inbox in inboxes[1:]] == expected[1:]
        submit(engine, "cancelled", PROMPTS[0], sink=_raise)
        assert engine.cancel("cancelled")
        finish(engine)


class Poisoned:
    """An executor that goes wrong for sequences whose chunk has a marked token, or in marked steps."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.marked_token = -1
        self.field = "finite"
        self.failing_steps: set[int] = set()
        self.steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def step(self, batch: Batch, sampling: SamplingRows) -> StepResult:
        self.steps += 1
        if self.steps in self.failing_steps:
            raise MemoryError("injected")
        result: StepResult = self._executor.step(batch, sampling)
        marked = [token_id == self.marked_token for token_id in batch.token_ids]
        if self.field == "finite":
            return dataclasses.replace(result, finite=bytes(not bad for bad in marked))
        ok = bytes(not marked[row] for row in batch.logit_rows)
        ids = [token_id if good else -1 for token_id, good in zip(result.ids, ok)]
        return dataclasses.replace(result, ok=ok, ids=ids)


@pytest.mark.parametrize("field", ["finite", "ok"])
def test_a_nan_ends_its_request_alone_and_its_blocks_never_enter_the_cache(model: Model, field: str) -> None:
    prompts = [PROMPTS[0], [*range(50, 75), 99], PROMPTS[2]]
    with engine_of(model, wrap=Poisoned) as engine:
        expected = answers(engine, prompts)
        engine.flush_cache()
        poison: Any = engine.executor
        poison.marked_token, poison.field = 99, field
        inboxes = [submit(engine, f"r{i}", prompt) for i, prompt in enumerate(prompts)]
        finish(engine)
        error = inboxes[1].output.error
        assert isinstance(error, RequestFailedError)
        assert "NaN" in str(error)
        assert inboxes[1].output.outputs[0].finish_reason == "error"
        assert [Trace.of(inboxes[i].output) for i in (0, 2)] == [expected[0], expected[2]]
        poison.marked_token = -1
        again = submit(engine, "again", prompts[1])
        finish(engine)
        assert Trace.of(again.output) == expected[1]
        assert again.output.num_cached_tokens == 0


def test_a_nan_in_one_of_n_outputs_ends_the_request_once(model: Model) -> None:
    with engine_of(model, wrap=Poisoned) as engine:
        drawn = answers(engine, [PROMPTS[1]], n=3)[0].tokens
        only_second = next(iter(set(drawn[1][:-1]) - set(drawn[0]) - set(drawn[2]) - set(PROMPTS[1])))
        engine.executor.marked_token = only_second  # type: ignore[attr-defined]
        inbox = submit(engine, "n", PROMPTS[1], n=3)
        finish(engine)
        assert isinstance(inbox.output.error, RequestFailedError)
        assert len(inbox.output.outputs) == 3


def test_a_step_that_fails_ends_the_requests_in_it_and_no_others(model: Model) -> None:
    with engine_of(model, wrap=Poisoned, max_num_seqs=2) as engine:
        prompts = [*PROMPTS, PROMPTS[0][::-1]]
        expected = answers(engine, prompts)
        engine.flush_cache()
        poison: Any = engine.executor
        poison.failing_steps = {poison.steps + 2}
        inboxes = [submit(engine, f"r{i}", prompt) for i, prompt in enumerate(prompts)]
        finish(engine)
        for inbox in inboxes[:2]:
            assert isinstance(inbox.output.error, RequestFailedError)
            assert isinstance(inbox.output.error.__cause__, MemoryError)
        assert [Trace.of(inbox.output) for inbox in inboxes[2:]] == expected[2:]
        assert answers(engine, prompts) == expected


def test_a_step_that_fails_before_its_blocks_are_zeroed_leaves_no_stale_block_behind(model: Model) -> None:
    with engine_of(model, wrap=Poisoned, num_blocks=8) as engine:
        expected = answers(engine)
        poison: Any = engine.executor
        for _ in range(4):
            poison.failing_steps = {poison.steps + 1}
            inboxes = [submit(engine, f"r{i}", prompt) for i, prompt in enumerate(PROMPTS)]
            finish(engine)
            assert any(inbox.output.error for inbox in inboxes)
            assert answers(engine) == expected


def test_an_executor_that_answers_an_impossible_id_fails_the_request_alone(model: Model) -> None:
    class Impossible(Poisoned):
        def step(self, batch: Batch, sampling: SamplingRows) -> StepResult:
            result = self._executor.step(batch, sampling)
            marked = [batch.token_ids[row] == self.marked_token for row in batch.logit_rows]
            ids = [1 << 30 if bad else token_id for token_id, bad in zip(result.ids, marked)]
            return dataclasses.replace(result, ids=ids)

    with engine_of(model, wrap=Impossible) as engine:
        expected = answers(engine)
        engine.executor.marked_token = PROMPTS[1][-1]  # type: ignore[attr-defined]
        inboxes = [submit(engine, f"r{i}", prompt) for i, prompt in enumerate(PROMPTS[:2])]
        finish(engine)
        assert Trace.of(inboxes[0].output) == expected[0]
        assert inboxes[1].output.error is not None


def test_a_scheduler_that_finds_nothing_to_run_is_an_error_not_a_spin(model: Model) -> None:
    with engine_of(model) as engine:
        submit(engine, "r", PROMPTS[0])
        engine.scheduler.plan = lambda rows: None  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="none can run"):
            engine.step()


def test_closing_tells_everyone_even_when_the_scheduler_is_broken(model: Model) -> None:
    with engine_of(model) as engine:
        inboxes = [submit(engine, f"r{i}", prompt) for i, prompt in enumerate(PROMPTS)]
        engine.step()
        engine.scheduler = None  # type: ignore[assignment]
        engine.close(EngineClosedError("the end"))
        for inbox in inboxes:
            assert isinstance(inbox.output.error, EngineClosedError)
            assert inbox.output.outputs[0].finish_reason == "abort"
        assert not engine.has_work()
