"""Output under a grammar: always within it, to the same bits however it is computed, or a clear error."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.core import Engine
from octavo.engine.request import Drawn
from octavo.errors import InvalidParameterError, RequestFailedError
from octavo.outputs import CompletionOutput, RequestOutput
from tests.exact.machine import Model, Trace
from tests.support.engines import EOS, Inbox, engine_of, finish, load_tiny, submit

PROMPT = list(range(3, 20))
FORCED = {"regex": "[ab](--forced--[cd]){2}"}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "kind": {"enum": ["alpha one", "alpha two"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "forced": FORCED,
    "json": {"json": SCHEMA, "disable_any_whitespace": True},
    "spaced json": {"json": SCHEMA},
    "choice": {"choice": ["one of them", "one of these", "another"]},
    "all forced": {"choice": ["nothing is drawn here"]},
    "gbnf": {"grammar": 'root ::= item+\nitem ::= "<" [a-c]{1,2} "/>" | "(" root ")"'},
    "lark": {"grammar": 'start: "x=" NUMBER ("," NUMBER)*\nNUMBER: /[0-9]{1,3}/'},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_tiny(tmp_path_factory.mktemp("tiny"))


def run(engine: Engine, structured: Any, emitted: Any = (), **params: Any) -> RequestOutput:
    inbox = submit(engine, "r", PROMPT, None, emitted, structured=structured, **{"max_tokens": 60, **params})
    finish(engine)
    output: RequestOutput = inbox.output
    return output


def answer(engine: Engine, structured: Any, **params: Any) -> CompletionOutput:
    output = run(engine, structured, **params)
    if output.error is not None:
        raise output.error
    return output.outputs[0]


@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_jump_forward_changes_no_bit_and_saves_steps(model: Model, name: str, logprobs: int | None) -> None:
    traces, steps, jumped = {}, {}, {}
    for jump in (True, False):
        with engine_of(model, jump_forward=jump) as engine:
            traces[jump] = [
                Trace.of(run(engine, CONSTRAINTS[name], seed=seed, logprobs=logprobs, n=n))
                for seed, n in ((1, 1), (2, 1), (3, 3))
            ]
            steps[jump], jumped[jump] = engine.stats()["steps"], engine.stats()["jump_forward_tokens"]
    assert traces[True] == traces[False]
    assert jumped[False] == 0
    if name != "spaced json":
        assert jumped[True] > 0
        assert steps[True] < steps[False]


@pytest.mark.parametrize("jump", [True, False])
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_an_output_cut_at_any_token_goes_on_with_the_same_bits(model: Model, name: str, jump: bool) -> None:
    with engine_of(model, jump_forward=jump) as engine:
        whole = run(engine, CONSTRAINTS[name])
        output = whole.outputs[0]
        assert output.logprobs is not None
        drawn = [Drawn(i, entry[i].logprob, entry) for i, entry in zip(output.token_ids, output.logprobs)]
        assert len(drawn) > 2
        for cut in range(len(drawn)):
            engine.flush_cache()
            assert Trace.of(run(engine, CONSTRAINTS[name], [drawn[:cut]])) == Trace.of(whole)


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("chunk_size", [1, 3, None])
def test_preemption_and_chunks_inside_forced_runs_change_no_bit(
    model: Model, flush: bool, logprobs: int | None, chunk_size: int | None
) -> None:
    with engine_of(model) as engine:
        expected = [Trace.of(run(engine, each, logprobs=logprobs)) for each in CONSTRAINTS.values()]
    with engine_of(model, chunk_size=chunk_size) as engine:
        for structured, trace in zip(CONSTRAINTS.values(), expected):
            inbox = submit(engine, "r", PROMPT, structured=structured, max_tokens=60, logprobs=logprobs)
            for step in range(10_000):
                if not engine.has_work():
                    break
                engine.step()
                for sequence in list(engine.scheduler.running):
                    # At every draw, and at times within a run: one whose blocks are dropped there would never end.
                    if sequence.num_computed >= sequence.prefill_end or (step % 23 == 0 and not flush):
                        engine.scheduler.preempt(sequence, flush=flush)
            assert Trace.of(inbox.output) == trace
        assert engine.scheduler.counters.preemptions > 20
        assert engine.stats()["jump_forward_tokens"] > 20


def test_a_batch_of_neighbours_changes_no_bit(model: Model) -> None:
    with engine_of(model) as engine:
        alone = [Trace.of(run(engine, each, seed=i)) for i, each in enumerate(CONSTRAINTS.values())]
    with engine_of(model) as engine:
        inboxes = [
            submit(engine, f"r{i}", PROMPT, structured=each, seed=i, max_tokens=60)
            for i, each in enumerate(CONSTRAINTS.values())
        ]
        for i in range(5):
            submit(engine, f"free{i}", PROMPT[i:], seed=i, max_tokens=20)
        finish(engine)
    assert [Trace.of(inbox.output) for inbox in inboxes] == alone


@pytest.mark.parametrize("streams", [True, False])
def test_a_stream_of_a_forced_run_has_a_delta_for_each_token(model: Model, streams: bool) -> None:
    for logprobs in (None, 1):
        with engine_of(model) as engine:
            inbox: Inbox = submit(
                engine, "r", PROMPT, streams=streams, structured=FORCED, max_tokens=60, logprobs=logprobs
            )
            finish(engine)
            output = inbox.output.outputs[0]
            if streams:
                assert "".join(delta.text for delta in inbox.deltas) == output.text
                assert [i for delta in inbox.deltas for i in delta.token_ids] == output.token_ids
                assert all(len(delta.token_ids) == 1 for delta in inbox.deltas)
                assert [delta.finish_reason for delta in inbox.deltas][-1] == "stop"
            assert re.fullmatch(FORCED["regex"], output.text)


@pytest.mark.parametrize("logprobs", [None, 1])
def test_forced_rows_have_logits_only_for_those_who_asked_for_logprobs(model: Model, logprobs: int | None) -> None:
    rows: list[int] = []
    with engine_of(model) as engine:
        step = engine.executor.step

        def counting(batch: Any, sampling: Any) -> Any:
            rows.append(len(batch.logit_rows))
            return step(batch, sampling)

        engine.executor.step = counting  # type: ignore[method-assign]
        output = answer(engine, FORCED, logprobs=logprobs)
        jumped = engine.stats()["jump_forward_tokens"]
    assert jumped > 10
    drawn = len(output.token_ids) - jumped
    assert len(rows) == drawn
    assert sum(rows) == (drawn if logprobs is None else len(output.token_ids))


# What else a request may ask for, inside a forced run


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("jump", [True, False])
class TestInsideARun:
    def answer(self, model: Model, jump: bool, logprobs: int | None, **params: Any) -> CompletionOutput:
        with engine_of(model, jump_forward=jump) as engine:
            return answer(engine, {"choice": ["abcdefgh"]}, logprobs=logprobs, **params)

    def test_a_stop_string_ends_it(self, model: Model, jump: bool, logprobs: int | None) -> None:
        output = self.answer(model, jump, logprobs, stop=["de"])
        assert (output.text, len(output.token_ids)) == ("abc", 5)
        assert (output.finish_reason, output.stop_reason) == ("stop", "de")
        assert output.logprobs is None or len(output.logprobs) == 5

    def test_a_stop_token_ends_it(self, model: Model, jump: bool, logprobs: int | None) -> None:
        stop = model.tokenizer.encode("e")[0]
        output = self.answer(model, jump, logprobs, stop_token_ids=[stop])
        assert (output.text, output.finish_reason, output.stop_reason) == ("abcd", "stop", stop)

    def test_max_tokens_ends_it_marked(self, model: Model, jump: bool, logprobs: int | None) -> None:
        output = self.answer(model, jump, logprobs, max_tokens=3)
        assert (output.text, output.finish_reason) == ("abc", "length")

    def test_a_complete_text_at_max_tokens_is_no_cut(self, model: Model, jump: bool, logprobs: int | None) -> None:
        output = self.answer(model, jump, logprobs, max_tokens=8)
        assert (output.text, output.finish_reason, output.stop_reason) == ("abcdefgh", "stop", None)

    def test_min_tokens_hold_back_a_stop_string(self, model: Model, jump: bool, logprobs: int | None) -> None:
        output = self.answer(model, jump, logprobs, stop=["bc"], min_tokens=5)
        assert output.text == "abcdefgh"

    def test_a_bad_word_ends_it_with_an_error(self, model: Model, jump: bool, logprobs: int | None) -> None:
        with pytest.raises(RequestFailedError, match="bad_words"):
            self.answer(model, jump, logprobs, bad_words=["ef"])

    def test_a_stop_before_the_bad_word_counts(self, model: Model, jump: bool, logprobs: int | None) -> None:
        output = self.answer(model, jump, logprobs, bad_words=["ef"], stop=["de"])
        assert (output.text, output.stop_reason) == ("abc", "de")

    def test_ids_not_allowed_end_it_with_an_error(self, model: Model, jump: bool, logprobs: int | None) -> None:
        with pytest.raises(RequestFailedError, match="allowed_token_ids"):
            self.answer(model, jump, logprobs, allowed_token_ids=model.tokenizer.encode("abcxyz"))

    def test_more_tokens_than_it_has_can_not_be(self, model: Model, jump: bool, logprobs: int | None) -> None:
        with pytest.raises(RequestFailedError, match="min_tokens"):
            self.answer(model, jump, logprobs, min_tokens=9)


def test_an_error_of_one_request_leaves_its_neighbours_alone(model: Model) -> None:
    with engine_of(model) as engine:
        expected = Trace.of(run(engine, FORCED))
    with engine_of(model) as engine:
        good = submit(engine, "good", PROMPT, structured=FORCED, max_tokens=60)
        bad = submit(engine, "bad", PROMPT, structured={"choice": ["abc"]}, bad_words=["b"], max_tokens=9)
        finish(engine)
    assert isinstance(bad.output.error, RequestFailedError)
    assert bad.output.outputs[0].finish_reason == "error"
    assert Trace.of(good.output) == expected


def test_all_edits_work_within_the_grammar(model: Model) -> None:
    ids = {letter: model.tokenizer.encode(letter)[0] for letter in "abcdef"}
    with engine_of(model) as engine:
        structured = {"regex": "[a-f]{12}"}
        assert set(answer(engine, structured, allowed_token_ids=[ids["b"], ids["c"], 99]).text) <= {"b", "c"}
        assert answer(engine, structured, logit_bias={ids["d"]: 100.0}).text == "d" * 12
        assert "aa" not in answer(engine, structured, bad_words=["aa"], logit_bias={ids["a"]: 100.0}).text
        letters = answer(engine, {"regex": "[a-f]{6}"}, presence_penalty=2.0, temperature=0.0, repetition_penalty=1e30)
        assert len(set(letters.text)) == 6


# The end


def test_the_end_comes_exactly_where_the_grammar_accepts(model: Model) -> None:
    with engine_of(model) as engine:
        output = answer(engine, {"regex": "ab*"}, logit_bias={EOS: 100.0})
        assert (output.text, output.token_ids[-1], output.finish_reason) == ("a", EOS, "stop")
        output = answer(engine, {"regex": "a{3}b*"}, logit_bias={EOS: 100.0})
        assert output.text == "aaa"
        output = answer(engine, {"regex": "ab{0,3}"}, logit_bias={EOS: 100.0}, ignore_eos=True)
        assert (output.text, output.finish_reason) == ("abbb", "stop")
        output = answer(engine, {"regex": "ab*"}, ignore_eos=True, max_tokens=7)
        assert (output.text, output.finish_reason) == ("abbbbbb", "length")
        assert len(answer(engine, {"regex": "ab*"}, logit_bias={EOS: 100.0}, min_tokens=5).text) == 5


def test_a_model_without_an_end_ends_with_the_text(model: Model, tmp_path: Path) -> None:
    endless = Model(model.name, model.checkpoint, model.tokenizer, "f32", eos=frozenset())
    with engine_of(endless) as engine:
        output = answer(engine, {"choice": ["ab", "ac"]})
        assert output.text in ("ab", "ac")
        assert output.finish_reason == "stop"


# Where it starts


def test_a_constraint_starts_right_behind_its_marker(model: Model) -> None:
    structured = {"choice": ["yes", "no"], "start_after": "&&"}
    with engine_of(model) as engine:
        amp = model.tokenizer.encode("&")[0]
        for seed in range(4):
            output = answer(engine, structured, seed=seed, max_tokens=200, logit_bias={amp: 5.0, EOS: 100.0})
            assert re.fullmatch(r".*?&&(yes|no)", output.text, re.DOTALL), output.text
            assert output.finish_reason == "stop"
        cut = answer(engine, structured, max_tokens=10, logit_bias={amp: -100.0, EOS: 100.0})
        assert cut.finish_reason == "length"


def test_before_its_marker_a_constraint_is_rebuilt_too(model: Model) -> None:
    structured = {"regex": "[xy]{3}--end", "start_after": "&"}
    bias = {model.tokenizer.encode("&")[0]: 2.0}
    with engine_of(model) as engine:
        whole = run(engine, structured, max_tokens=120, logit_bias=bias)
        output = whole.outputs[0]
        assert re.fullmatch(r"[^&]*&[xy]{3}--end", output.text)
        assert output.logprobs is not None
        drawn = [Drawn(i, entry[i].logprob, entry) for i, entry in zip(output.token_ids, output.logprobs)]
        for cut in range(len(drawn)):
            again = run(engine, structured, [drawn[:cut]], max_tokens=120, logit_bias=bias)
            assert Trace.of(again) == Trace.of(whole)


def test_a_continuation_outside_the_grammar_is_refused_and_changes_nothing(model: Model) -> None:
    with engine_of(model) as engine:
        with pytest.raises(RequestFailedError, match="does not allow"):
            run(engine, FORCED, [[Drawn(model.tokenizer.encode("z")[0], -1.0, {})]])
        assert engine.stats()["requests"] == 0
        assert not engine.has_work()


# Numbers


def test_a_grammar_is_compiled_once_and_kept_in_bounds(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo import limits

    monkeypatch.setattr(limits, "MAX_CACHED_GRAMMARS", 3)
    with engine_of(model) as engine:
        for _ in range(3):
            answer(engine, {"choice": ["a"]})
            with pytest.raises(InvalidParameterError):
                run(engine, {"regex": "(a"})
        stats = engine.stats()
        assert (stats["grammars_compiled"], stats["grammar_cache_hits"]) == (2, 4)
        assert stats["grammar_seconds"] > 0
        for i in range(5):
            answer(engine, {"choice": [f"a{i}"]})
        answer(engine, {"choice": ["a"]})
        assert engine.stats()["grammars_compiled"] == 8
        answer(engine, {"choice": ["a4"]})
        assert engine.stats()["grammars_compiled"] == 8


def test_json_is_json(model: Model) -> None:
    with engine_of(model, num_blocks=256) as engine:
        for seed in range(8):
            output = answer(engine, {"json_object": True}, seed=seed, max_tokens=400, logit_bias={EOS: 100.0})
            if output.finish_reason == "stop":
                assert isinstance(json.loads(output.text), dict)
