"""From tokens to what a user reads: text, the reason it ended, log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.request import Generation
from octavo.params import SamplingParams
from octavo.sampling import resolve
from octavo.scheduler.sequence import Sequence as ScheduledSequence
from octavo.tokenizer import Tokenizer
from tests.exact.machine import Model, Trace
from tests.support.engines import EOS, PROMPTS, engine_of, finish, load_tiny, submit
from tests.support.tiny_llm import VOCAB


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_tiny(tmp_path_factory.mktemp("tiny"))


def test_text_is_the_decode_of_the_tokens(model: Model) -> None:
    with engine_of(model) as engine:
        for skip in (True, False):
            inboxes = [
                submit(
                    engine, f"{skip}{i}", p, max_tokens=60, ignore_eos=True, skip_special_tokens=skip, seed=i, top_p=1.0
                )
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


def _generation(tokenizer: Tokenizer, *, streams: bool = True, **params: Any) -> Generation:
    resolved = resolve(
        SamplingParams(**{"max_tokens": 1000, **params}),
        prompt_len=1,
        vocab_size=VOCAB,
        context_len=10_000,
        eos_ids=frozenset({EOS}),
        encode=lambda text: [],
    )
    return Generation(ScheduledSequence(0, [5], 1, 1 + resolved.max_tokens), 0, [5], resolved, tokenizer, streams)


def _one_shot(text: str, stops: Sequence[str], include: bool) -> str:
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[:end] if include else text[: end - len(max(found, key=len))]
    return text


# Ids 99 onwards are bytes: C3 A9 (é), E2 82 AC (€), F0 9F 98 80 … (emoji).
pieces = st.sampled_from([[3], [36], [37], [99, 100], [101, 102, 103], [104, 105, 106, 107], [102], [104]])
unfinished = st.sampled_from([[], [99], [101], [101, 102], [104], [104, 105], [104, 105, 106]])
some_ids = st.tuples(st.lists(pieces, max_size=5), unfinished).map(
    lambda parts: [*chain.from_iterable(parts[0]), *parts[1]]
)
some_stops = st.lists(st.text("\ufffdAB\né€", min_size=1, max_size=3), max_size=3)


@given(some_ids, some_stops, st.booleans(), st.sampled_from(["length", "eos", "stop id", "shown stop id"]))
@settings(max_examples=600, deadline=None)
def test_i18_deltas_give_the_text_cut_at_the_first_stop_string_however_it_ends(
    model: Model, ids: list[int], stops: list[str], include: bool, end: str
) -> None:
    """Also where the stop string is completed by U+FFFD, which only shows when no more tokens come."""
    include = include or end == "shown stop id"
    params: dict[str, Any] = {"stop": stops, "include_stop_str_in_output": include}
    if end == "length":
        ids = ids or [3]
        params["max_tokens"] = len(ids)
        visible = ids
    elif end == "eos":
        visible = ids
        ids = [*ids, EOS]
    else:
        params["stop_token_ids"] = [120]
        ids = [*ids, 120]
        visible = ids if include else ids[:-1]
    generation = _generation(model.tokenizer, **params)
    shown = ""
    for i in ids:
        shown += generation.accept(i)
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


@given(st.data(), some_ids, st.lists(st.text("\ufffdAB\né€", min_size=1, max_size=3), max_size=1))
@settings(max_examples=600, deadline=None)
def test_text_made_late_is_the_text_made_token_by_token_wherever_it_is_cut(
    model: Model, data: st.DataObject, ids: list[int], stops: list[str]
) -> None:
    params: dict[str, Any] = {
        "stop": stops,
        "stop_token_ids": data.draw(st.sampled_from([[], [37], [99], [102]])),
        "include_stop_str_in_output": data.draw(st.booleans()),
        "ignore_eos": data.draw(st.booleans()),
        "skip_special_tokens": data.draw(st.booleans()),
        "min_tokens": data.draw(st.integers(0, 3)),
        "max_tokens": data.draw(st.integers(3, 12)),
    }
    ids = [token for i in ids for token in ([i] if data.draw(st.integers(0, 9)) else [EOS, 1, i])]
    early = _generation(model.tokenizer, streams=True, **params)
    late = _generation(model.tokenizer, streams=False, **params)
    for i in ids[: data.draw(st.integers(0, len(ids)))]:
        early.accept(i)
        late.accept(i)
        assert (early.finish_reason, early.stop_reason) == (late.finish_reason, late.stop_reason)
        if early.finished:
            break
    assert early.output() == late.output()


def test_a_request_that_does_not_stream_is_told_only_the_end_and_has_the_same_answer(model: Model) -> None:
    styles: list[dict[str, Any]] = [
        {"logprobs": None},
        {"ignore_eos": True, "max_tokens": 40},
        {"n": 2, "stop_token_ids": list(range(20, 40)), "max_tokens": 40},
        {"stop": ["a", "e"], "max_tokens": 40},
        {"presence_penalty": 1.0, "min_tokens": 3, "prompt_logprobs": 1},
    ]
    with engine_of(model) as engine:
        for i, style in enumerate(styles):
            expected = [submit(engine, f"{i}-{j}", prompt, **style) for j, prompt in enumerate(PROMPTS)]
            finish(engine)
            engine.flush_cache()
            quiet = [submit(engine, f"{i}-{j}", p, streams=False, **style) for j, p in enumerate(PROMPTS)]
            finish(engine)
            for told, asked in zip(quiet, expected):
                assert told.deltas == []
                assert asked.deltas != []
                assert Trace.of(told.output) == Trace.of(asked.output)


def test_a_request_that_does_not_stream_keeps_its_text_when_it_is_cancelled(model: Model) -> None:
    with engine_of(model) as engine:
        params: dict[str, Any] = {"ignore_eos": True, "max_tokens": 40, "logprobs": None}
        outputs = []
        for streams in (True, False):
            engine.flush_cache()
            inbox = submit(engine, "r", PROMPTS[0], streams=streams, **params)
            for _ in range(20):
                engine.step()
            engine.cancel("r")
            outputs.append(inbox.output.outputs[0])
        assert outputs[0].text
        assert outputs[0] == outputs[1]
