"""One request never harms another: failures, ends and folds of the step loop, on a tiny model."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.core import Engine, EngineConfig
from octavo.engine.request import Drawn, Generation, Request
from octavo.errors import CapacityError, EngineClosedError, InvalidParameterError, RequestFailedError
from octavo.executor.interface import Batch, SamplingRows, StepResult
from octavo.outputs import RequestOutput, TextDelta
from octavo.params import SamplingParams
from octavo.sampling import resolve
from octavo.scheduler.sequence import Sequence as ScheduledSequence
from octavo.scheduler.sequence import State
from octavo.tokenizer import Tokenizer
from octavo.weights.checkpoint import load_checkpoint
from tests.exact.machine import Model, Trace
from tests.support.tiny_llm import VOCAB, write_tiny_llm

EOS = 2
PROMPTS = [list(range(3 + i, 3 + i + n)) for i, n in enumerate((20, 5, 33))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    checkpoint = load_checkpoint(write_tiny_llm(tmp_path_factory.mktemp("tiny")))
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


def submit(engine: Engine, name: str, prompt: Sequence[int], sink: Any = None, emitted: Any = (), **params: Any) -> Any:
    """Adds a request; returns its inbox."""
    inbox = Inbox() if sink is None else sink
    params = {"max_tokens": 6, "temperature": 1.0, "seed": 7, "logprobs": 2, **params}
    engine.add(engine.prepare(name, prompt, SamplingParams(**params), inbox), emitted)
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


# One request's failure is its own


PER_REQUEST = ("/octavo/sampling/", "/octavo/tokenizer/", "/octavo/engine/request.py", "/tests/unit/test_engine.py")
IN_CORE = {"_scoring_rows", "_accept", "_logprobs"}
GUARDS = {"complete", "refused", "_stop_after"}  # what brings the failure to its request, and the injector itself


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
    reached = {"row", "prompt_row", "append", "push", "flush", "accept", "emit", "score", "_logprobs", "__call__"}
    assert reached <= {name for name, count in failed_in.items() if count}, failed_in
    assert sum(failed_in.values()) > 100


def _spoil_sampler_row(request: Request) -> None:
    request.generations[0].sampler.row = _raise  # type: ignore[method-assign]


def _spoil_row_arrays(request: Request) -> None:
    sampler = request.generations[0].sampler
    row = sampler.row
    sampler.row = lambda position: row(position)._replace(bias=(np.zeros(2, np.int32), "x"))  # type: ignore


def _spoil_output(request: Request) -> None:
    request.generations[0].output = _raise  # type: ignore[method-assign]


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
        rows = np.flatnonzero(batch.token_ids == self.marked_token)
        if self.field == "finite":
            finite = result.finite.copy()
            finite[rows] = 0
            return dataclasses.replace(result, finite=finite)
        ok = result.ok.copy()
        ok[np.isin(batch.logit_rows, rows)] = 0
        return dataclasses.replace(result, ok=ok, ids=np.where(ok == 0, -1, result.ids).astype(np.int32))


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
            ids = result.ids.copy()
            ids[np.isin(batch.logit_rows, np.flatnonzero(batch.token_ids == self.marked_token))] = 1 << 30
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


# Coming and going


def test_cancel_frees_the_blocks_at_once_in_every_state(model: Model) -> None:
    with engine_of(model, max_num_seqs=2, chunk_size=8) as engine:
        expected = answers(engine, PROMPTS[:1])
        engine.flush_cache()
        for i, prompt in enumerate((PROMPTS[0], PROMPTS[2], PROMPTS[1])):
            submit(engine, f"r{i}", prompt, max_tokens=40, n=1)
        for _ in range(3):
            engine.step()
        by_name = {name: request.generations[0].sequence for name, request in engine._requests.items()}
        assert by_name["r0"].num_computed >= by_name["r0"].prefill_end  # decodes
        assert by_name["r1"].num_computed < by_name["r1"].prefill_end  # in its prefill
        assert by_name["r2"].state is State.WAITING
        for name in ("r2", "r1", "r0"):
            sequence = by_name[name]
            used = engine.scheduler.pool.num_used
            held = len(sequence.block_table)
            assert engine.cancel(name)
            assert engine.scheduler.pool.num_used == used - held
            assert sequence.state is State.FINISHED
            assert not engine.cancel(name)
        assert not engine.has_work()
        assert answers(engine, PROMPTS[:1]) == expected


def test_a_cancelled_request_keeps_what_it_has_said(model: Model) -> None:
    with engine_of(model) as engine:
        inbox = submit(engine, "r", PROMPTS[0], max_tokens=40, ignore_eos=True)
        for _ in range(4):
            engine.step()
        engine.cancel("r")
        output = inbox.output
        assert output.finished
        assert output.error is None
        assert output.outputs[0].finish_reason == "abort"
        assert output.outputs[0].token_ids == [d.token_ids[0] for d in inbox.deltas]
        assert output.outputs[0].text == "".join(d.text for d in inbox.deltas)


def test_a_running_request_id_is_not_taken_twice(model: Model) -> None:
    with engine_of(model) as engine:
        first = submit(engine, "same", PROMPTS[0])
        with pytest.raises(InvalidParameterError, match="request_id"):
            submit(engine, "same", PROMPTS[1])
        finish(engine)
        assert first.output.error is None
        submit(engine, "same", PROMPTS[1])
        finish(engine)


def test_what_can_never_fit_is_refused_at_once_and_changes_nothing(model: Model) -> None:
    with engine_of(model, num_blocks=8) as small:
        engine = Engine(small.executor, model.tokenizer, model.eos, EngineConfig(max_model_len=256, max_num_seqs=8))
        running = submit(engine, "running", PROMPTS[0], max_tokens=20)
        engine.step()
        before = {**engine.stats()}
        with pytest.raises(CapacityError, match="9 KV blocks"):
            submit(engine, "too-long", PROMPTS[0], max_tokens=16 * 8 + 1 - 20 + 1, n=3)
        with pytest.raises(CapacityError, match="256 tokens"):
            submit(engine, "no-room", [5] * 256)
        after = engine.stats()
        assert all(after[name] == before[name] for name in ("requests", "waiting", "running", "blocks_used"))
        finish(engine)
        assert running.output.error is None


def test_a_full_queue_refuses_all_n_outputs_or_none(model: Model) -> None:
    with engine_of(model) as engine:
        engine.scheduler.waiting.max_waiting = 3
        submit(engine, "one", PROMPTS[0])
        with pytest.raises(CapacityError, match="try again later"):
            submit(engine, "three", PROMPTS[1], n=3)
        assert engine.stats()["waiting"] == 1
        finish(engine)


@pytest.mark.parametrize("bad", [[], [VOCAB], [-1], [True], [1.0], ["a"], [None], [np.True_], [np.float32(1)], [[1]]])
def test_prompt_ids_are_checked(model: Model, bad: list[Any]) -> None:
    with engine_of(model) as engine, pytest.raises(InvalidParameterError, match="prompt"):
        engine.prepare("r", bad, SamplingParams(), Inbox())


def test_numpy_integers_are_token_ids(model: Model) -> None:
    with engine_of(model) as engine:
        expected = answers(engine)
        for kind in (np.int32, np.int64, np.uint16):
            assert answers(engine, [np.array(p, dtype=kind) for p in PROMPTS]) == expected  # type: ignore[misc]


def test_max_tokens_ends_at_the_context(model: Model) -> None:
    with engine_of(model, num_blocks=4) as engine:
        inbox = submit(engine, "r", PROMPTS[0], max_tokens=None, ignore_eos=True)
        finish(engine)
        completion = inbox.output.outputs[0]
        assert len(PROMPTS[0]) + len(completion.token_ids) == 64
        assert completion.finish_reason == "length"


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_num_seqs", 0), ("max_num_seqs", True), ("max_num_seqs", 4096), ("chunk_size", 0), ("chunk_size", 1.5),
     ("inter_token_target", 0), ("inter_token_target", "fast"), ("policy", "random")],
)  # fmt: skip
def test_engine_options_are_checked_by_name(model: Model, field: str, value: Any) -> None:
    with engine_of(model) as engine, pytest.raises(InvalidParameterError) as caught:
        config = EngineConfig(**{"max_model_len": 64, field: value})  # type: ignore[arg-type]
        Engine(engine.executor, model.tokenizer, model.eos, config)
    assert caught.value.field == field


# Several outputs, prompt logprobs, continuation


def test_n_outputs_end_at_different_times_and_come_in_order(model: Model) -> None:
    with engine_of(model) as engine:
        params: dict[str, Any] = {"n": 6, "max_tokens": 40, "stop_token_ids": list(range(20, 35))}
        alone = answers(engine, [PROMPTS[0]], **params)[0]
        lengths = [len(tokens) for tokens in alone.tokens]
        assert len(set(lengths)) > 2
        inbox = submit(engine, "n", PROMPTS[0], **params)
        while engine.has_work():
            assert not inbox.ends
            engine.step()
            running = 6 - sum(delta.finish_reason is not None for delta in inbox.deltas)
            assert len(engine.scheduler.running) + len(engine.scheduler.waiting) == running
        finish(engine)
        assert Trace.of(inbox.output) == alone
        assert [completion.index for completion in inbox.output.outputs] == list(range(6))
        assert len(set(alone.tokens)) == 6
        for completion in inbox.output.outputs:
            deltas = [delta for delta in inbox.deltas if delta.index == completion.index]
            assert "".join(delta.text for delta in deltas) == completion.text
            assert [token for delta in deltas for token in delta.token_ids] == completion.token_ids
            assert [entry for delta in deltas for entry in delta.logprobs or ()] == completion.logprobs
            assert [delta.finish_reason for delta in deltas][-1] == completion.finish_reason
            assert all(delta.finish_reason is None for delta in deltas[:-1])


def test_output_i_of_n_is_the_same_whatever_n_is(model: Model) -> None:
    with engine_of(model) as engine:
        many = answers(engine, [PROMPTS[0]], n=4)[0]
        few = answers(engine, [PROMPTS[0]], n=2)[0]
        assert many.tokens[:2] == few.tokens
        assert many.logprobs[:2] == few.logprobs


@pytest.mark.parametrize("start", [0, 1, 15, 16, 17, 33])
@pytest.mark.parametrize("n", [1, 3])
def test_prompt_logprobs_from_a_start_are_the_tail_of_all(model: Model, start: int, n: int) -> None:
    prompt = PROMPTS[2]
    with engine_of(model) as engine:
        whole = answers(engine, [prompt], prompt_logprobs=2)[0].prompt_logprobs
        assert whole[0] is None
        assert [dict((i, rank) for i, _, rank in entry)[token] >= 1 for entry, token in zip(whole[1:], prompt[1:])]
        assert all(prompt[position] in [i for i, _, _ in whole[position]] for position in range(1, len(prompt)))
        inbox = submit(engine, "r", prompt, prompt_logprobs=2, prompt_logprobs_start=start, n=n)
        finish(engine)
        found = Trace.of(inbox.output).prompt_logprobs
        assert found == tuple(None if position < max(start, 1) else whole[position] for position in range(len(prompt)))
        # The cache serves what lies before the start, and nothing behind it.
        assert inbox.output.num_cached_tokens == min(max(start - 1, 0), len(prompt) - 1)


@pytest.mark.parametrize("flush", [False, True])
def test_prompt_logprobs_survive_a_preemption_at_every_step(model: Model, flush: bool) -> None:
    prompt = PROMPTS[2]
    with engine_of(model, chunk_size=7) as engine:
        expected = answers(engine, [prompt], prompt_logprobs=2, n=2)[0]
        engine.flush_cache()
        inbox = submit(engine, "r", prompt, prompt_logprobs=2, n=2)
        steps = 0
        while engine.has_work():
            engine.step()
            steps += 1
            for sequence in list(engine.scheduler.running):
                # A prefill in chunks would begin again for ever if each chunk were followed by a preemption.
                if sequence.num_computed >= sequence.prefill_end or steps == 3:
                    engine.scheduler.preempt(sequence, flush=flush)
        assert engine.stats()["preemptions"] > 5
        assert Trace.of(inbox.output) == expected


def _drawn(output: RequestOutput) -> list[list[Drawn]]:
    result = []
    for completion in output.outputs:
        entries = completion.logprobs or [{} for _ in completion.token_ids]
        pairs = zip(completion.token_ids, entries)
        result.append([Drawn(t, entry[t].logprob if entry else None, entry or None) for t, entry in pairs])
    return result


def test_a_request_is_continued_from_what_each_output_has(model: Model) -> None:
    """Cut at every token; outputs that have ended stay as they are, and the prompt's logprobs come all the same."""
    params: dict[str, Any] = {"n": 3, "max_tokens": 12, "seed": 5, "presence_penalty": 0.4, "stop_token_ids": [*range(20, 35)], "prompt_logprobs": 0}
    with engine_of(model) as engine:
        whole = submit(engine, "whole", PROMPTS[0], **params)
        finish(engine)
        expected = Trace.of(whole.output)
        drawn = _drawn(whole.output)
        assert len({len(tokens) for tokens in drawn}) > 1
        for cut in range(max(map(len, drawn))):
            inbox = submit(engine, f"cut-{cut}", PROMPTS[0], emitted=[tokens[:cut] for tokens in drawn], **params)
            finish(engine)
            assert Trace.of(inbox.output) == expected
            for index, tokens in enumerate(drawn):
                sent = [t for delta in inbox.deltas if delta.index == index for t in delta.token_ids]
                assert sent == [each.token_id for each in tokens[cut:]]
        over = submit(engine, "over", PROMPTS[0], emitted=drawn, **params)
        assert over.output.finished
        assert Trace.of(over.output).tokens == expected.tokens
        assert not over.deltas


def test_a_continuation_that_can_not_be_is_refused(model: Model) -> None:
    with engine_of(model) as engine:
        for emitted in ([[Drawn(5)], [Drawn(5)]], [[Drawn(EOS), Drawn(5)]], [[Drawn(5)] * 7], [[Drawn(VOCAB)]]):
            with pytest.raises(InvalidParameterError, match="emitted"):
                submit(engine, "r", PROMPTS[0], emitted=emitted)
        assert not engine.has_work()
        assert engine.stats()["requests"] == 0


# Cache, policies, numbers


def test_a_salt_keeps_a_prefix_to_itself(model: Model) -> None:
    with engine_of(model) as engine:
        cached = []
        for i, salt in enumerate((None, "a", "b", "a", None)):
            inbox = submit(engine, f"r{i}", PROMPTS[2], cache_salt=salt)
            finish(engine)
            cached.append(inbox.output.num_cached_tokens)
        assert cached == [0, 0, 0, len(PROMPTS[2]) - 1, len(PROMPTS[2]) - 1]


def test_flush_drops_every_prefix_that_no_one_uses(model: Model) -> None:
    with engine_of(model) as engine:
        answers(engine)
        running = submit(engine, "running", PROMPTS[2], max_tokens=20)
        engine.step()
        used = engine.stats()["blocks_used"]
        assert engine.flush_cache() > 0
        stats = engine.stats()
        assert (stats["blocks_cached"], stats["blocks_used"]) == (0, used)
        finish(engine)
        assert running.output.error is None


def _order_of_first_tokens(engine: Engine, requests: Sequence[tuple[Sequence[int], dict[str, Any]]]) -> list[int]:
    order: list[int] = []

    def sink_of(i: int) -> Callable[[Any], None]:
        return lambda update: None if isinstance(update, RequestOutput) or i in order else order.append(i)

    for i, (prompt, params) in enumerate(requests):
        submit(engine, f"r{i}", prompt, sink=sink_of(i), max_tokens=2, **params)
    finish(engine)
    return order


def test_policies_choose_who_goes_first(model: Model) -> None:
    by_priority = [(PROMPTS[0], {"priority": 5}), (PROMPTS[1], {"priority": -1}), (PROMPTS[2], {"priority": 0})]
    with engine_of(model, policy="priority", max_num_seqs=1) as engine:
        assert _order_of_first_tokens(engine, by_priority) == [1, 2, 0]
    with engine_of(model, policy="fcfs", max_num_seqs=1) as engine:
        assert _order_of_first_tokens(engine, by_priority) == [0, 1, 2]
    with engine_of(model, policy="lpm", max_num_seqs=1) as engine:
        answers(engine, [PROMPTS[2]])
        cold = [(prompt[::-1], {}) for prompt in PROMPTS[:2]]
        assert _order_of_first_tokens(engine, [*cold, (PROMPTS[2], {})]) == [2, 0, 1]


def test_stats_name_what_an_operator_asks_for(model: Model) -> None:
    with engine_of(model) as engine:
        submit(engine, "long", PROMPTS[2], max_tokens=30, n=2)
        submit(engine, "short", PROMPTS[1])
        for _ in range(3):
            engine.step()
            stats = engine.stats()
            assert stats["blocks_free"] + stats["blocks_cached"] + stats["blocks_used"] == stats["blocks_total"] == 64
            assert 0 <= stats["waste_percent"] < 100
            assert stats["requests"] == 2
        assert stats["running"] == 3
        finish(engine)
        answers(engine)
        stats = engine.stats()
        assert stats["prefix_hit_tokens"] > 0
        assert stats["waiting"] == stats["running"] == stats["preemptions"] == 0
        assert stats["blocks_used"] == 0
        for name in ("step_seconds", "executor_seconds", "overhead_seconds"):
            assert 0 < stats[name]["p50"] <= stats[name]["p99"]
        assert stats["step_seconds"]["mean"] > stats["executor_seconds"]["mean"]
        assert stats["steps"] > 10
        for word in stats:
            assert word in (Engine.stats.__doc__ or ""), f"{word} is not explained"


def test_timings_are_in_order(model: Model) -> None:
    with engine_of(model, max_num_seqs=1) as engine:
        inboxes = [submit(engine, f"r{i}", prompt) for i, prompt in enumerate(PROMPTS)]
        finish(engine)
        for inbox in inboxes:
            t = inbox.output.timings
            assert t is not None
            assert t.first_scheduled is not None
            assert t.first_token is not None
            assert t.finished is not None
            assert t.arrival <= t.first_scheduled <= t.first_token <= t.finished
        assert inboxes[2].output.timings.queue_time > inboxes[0].output.timings.queue_time


# Text


def test_text_is_the_decode_of_the_tokens(model: Model) -> None:
    with engine_of(model) as engine:
        for skip in (True, False):
            inboxes = [
                submit(engine, f"{skip}{i}", p, max_tokens=60, ignore_eos=True, skip_special_tokens=skip, seed=i, top_p=1.0)
                for i, p in enumerate(PROMPTS * 4)
            ]
            finish(engine)
            texts = [(inbox.output.outputs[0].text, inbox.output.outputs[0].token_ids) for inbox in inboxes]
            assert any("\ufffd" in text for text, _ in texts)
            for text, ids in texts:
                assert text == model.tokenizer.decode(ids, skip_special_tokens=skip, at_start=False)


def test_why_an_output_ended(model: Model) -> None:
    with engine_of(model) as engine:

        def end(**params: Any) -> tuple[str | None, int | str | None, int, str]:
            inbox = submit(engine, "r", PROMPTS[0], max_tokens=40, seed=1, **{"ignore_eos": True, **params})
            finish(engine)
            completion = inbox.output.outputs[0]
            return completion.finish_reason, completion.stop_reason, len(completion.token_ids), completion.text

        reason, stop, count, whole = end()
        assert (reason, stop, count) == ("length", None, 40)
        inbox = submit(engine, "r", PROMPTS[0], max_tokens=40, seed=1, ignore_eos=True)
        finish(engine)
        tenth = inbox.output.outputs[0].token_ids[10]
        first = inbox.output.outputs[0].token_ids.index(tenth)
        reason, stop, count, text = end(stop_token_ids=[tenth])
        assert (reason, stop, count) == ("stop", tenth, first + 1)
        assert whole.startswith(text.rstrip("\ufffd"))
        letter = next(c for c in whole[5:] if c.isalpha() and c.isascii())
        reason, stop, count, text = end(stop=[letter])
        assert (reason, stop, text) == ("stop", letter, whole[: whole.index(letter)])
        reason, stop, count, text = end(stop=[letter], include_stop_str_in_output=True)
        assert text == whole[: whole.index(letter) + 1]
        reason, stop, count, _ = end(logit_bias={EOS: 100.0}, ignore_eos=False)
        assert (reason, stop, count) == ("stop", None, 1)


def _generation(tokenizer: Tokenizer, **params: Any) -> Generation:
    resolved = resolve(
        SamplingParams(**{"max_tokens": 1000, **params}),
        prompt_len=1,
        vocab_size=VOCAB,
        context_len=10_000,
        eos_ids=frozenset({EOS}),
        encode=lambda text: [],
    )
    return Generation(ScheduledSequence(0, [5], 1, 2), 0, [5], resolved, tokenizer)


def _one_shot(text: str, stops: Sequence[str], include: bool) -> str:
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[:end] if include else text[: end - len(max(found, key=len))]
    return text


# The last ids are the bytes of characters of two to four bytes: é €, and emoji.
some_ids = st.lists(st.integers(98, VOCAB - 1) | st.sampled_from([3, 36, 37]), min_size=1, max_size=12)
some_stops = st.lists(st.text("\ufffdAB\ne€", min_size=1, max_size=3), max_size=3)


@given(some_ids, some_stops, st.booleans(), st.sampled_from(["length", "eos", "stop id", "shown stop id"]))
@settings(max_examples=600, deadline=None)
def test_deltas_give_the_text_cut_at_the_first_stop_string_however_it_ends(
    model: Model, ids: list[int], stops: list[str], include: bool, end: str
) -> None:
    """Also where the stop string is completed by U+FFFD, which only shows when no more tokens come."""
    include = include or end == "shown stop id"
    params: dict[str, Any] = {"stop": stops, "include_stop_str_in_output": include}
    if end == "length":
        params["max_tokens"] = len(ids)
        visible = ids
    elif end == "eos":
        visible = ids
        ids = [*ids, EOS]
    else:
        params["stop_token_ids"] = [100]
        ids = [i for i in ids if i != 100] + [100]
        visible = ids if include else ids[:-1]
    generation = _generation(model.tokenizer, **params)
    shown = ""
    for i in ids:
        shown += generation.accept(Drawn(i))
        if generation.finished:
            break
    assert generation.finished
    whole = model.tokenizer.decode(visible, at_start=False)
    expected = _one_shot(whole, stops, include)
    assert shown == generation.output().text == expected
    if expected != whole or (include and any(whole.endswith(stop) for stop in stops)):
        assert generation.finish_reason == "stop"
        assert generation.stop_reason in stops


def test_logprobs_are_a_dict_of_the_token_and_the_most_likely(model: Model) -> None:
    with engine_of(model) as engine:
        inbox = submit(engine, "r", PROMPTS[0], logprobs=3)
        zero = submit(engine, "zero", PROMPTS[0], logprobs=0)
        none = submit(engine, "none", PROMPTS[0], logprobs=None)
        finish(engine)
        completion = inbox.output.outputs[0]
        assert completion.logprobs is not None
        total = 0.0
        for token, entry in zip(completion.token_ids, completion.logprobs):
            assert next(iter(entry)) == token
            assert len(entry) in (3, 4)
            ranks = [each.rank for key, each in entry.items() if key != token or each.rank <= 3]
            assert sorted(ranks) == [1, 2, 3]
            by_rank = sorted(entry.values(), key=lambda each: each.rank)
            assert [each.logprob for each in by_rank] == sorted((e.logprob for e in by_rank), reverse=True)
            assert entry[token].decoded_token == model.tokenizer.token_text(token)
            total += entry[token].logprob
        assert completion.cumulative_logprob == total
        assert [list(entry) for entry in zero.output.outputs[0].logprobs] == [[t] for t in completion.token_ids]
        assert none.output.outputs[0].logprobs is None
        assert none.output.outputs[0].cumulative_logprob is None
        assert none.output.outputs[0].token_ids == completion.token_ids


