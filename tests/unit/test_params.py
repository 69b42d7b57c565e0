"""What a user may ask is checked on construction and against the model, and every refusal names its field."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from octavo import limits
from octavo.errors import CapacityError, InvalidParameterError, RequestFailedError
from octavo.outputs import CompletionOutput, Logprob, RequestOutput, Timings
from octavo.params import SamplingParams
from octavo.sampling import ResolvedParams, resolve

NAN, INF = float("nan"), float("inf")

REFUSED: dict[str, list[Any]] = {
    "n": [0, -1, 17, 1.0, True, "1", None, 10**5000],
    "temperature": [-0.1, 2.01, NAN, INF, "1", True, None, 10**400],
    "top_p": [0, 0.0, 1.1, -0.5, NAN, True, None],
    "typical_p": [0.0, 1.5, NAN, False],
    "min_p": [-0.1, 1.1, NAN, True],
    "top_k": [-2, 1.5, True, 2**31, 2**64],
    "presence_penalty": [-2.1, 2.1, NAN],
    "frequency_penalty": [-2.1, 2.1, INF],
    "repetition_penalty": [0.0, -1.0, INF, NAN, 1e-300, 1e300],
    "seed": [2**63, -(2**63) - 1, 1.5, True, "7"],
    "stop": ["", ["a", ""], 5, [5], b"x", ["s"] * 17, "x" * 1025, {"a": 1}, "\ud800"],
    "stop_token_ids": [[-1], [True], [1.5], 5, "12", [2**31], list(range(257))],
    "include_stop_str_in_output": [1, None, "yes"],
    "ignore_eos": [0],
    "skip_special_tokens": [1],
    "shown_special_ids": [[-1], [True], 3, list(range(65))],
    "max_tokens": [0, -1, True, 1.0, 2**63],
    "min_tokens": [-1, True, 300, None],
    "logprobs": [-1, 21, True, 2**70],
    "prompt_logprobs": [-1, 21],
    "prompt_logprobs_start": [-1, None],
    "logit_bias": [{1: NAN}, {1: INF}, {-1: 0.0}, {True: 0.0}, {"1": 0.0}, {1: "x"}, [1], dict(enumerate([1] * 1025))],
    "allowed_token_ids": [[], [-1], [True], 3],
    "bad_words": ["word", [""], [3], ["w"] * 129, ["x" * 257]],
    "truncate_prompt_tokens": [0, -1, True],
    "priority": [1.5, 2**63, None],
    "cache_salt": ["", "x" * 257, 5, "\udfff"],
    "structured": [{}, 3, "a", ["regex"], {"regx": "a"}, {"regex": "a", "choice": ["b"]}, {"json_object": False}],
}


def resolved(params: SamplingParams | None = None, **changes: Any) -> ResolvedParams:
    given = {
        "prompt_len": 10,
        "vocab_size": 100,
        "context_len": 64,
        "eos_ids": frozenset({2}),
        "encode": lambda text: [ord(c) % 100 for c in text],
        **changes,
    }
    return resolve(params or SamplingParams(), **given)


def test_the_table_of_refusals_covers_every_field():
    assert set(REFUSED) == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_out_of_range_is_refused_by_name(name: str):
    for value in REFUSED[name]:
        with pytest.raises(InvalidParameterError) as caught:
            SamplingParams(**{name: value})
        assert caught.value.field == name
        assert caught.value.allowed in str(caught.value)
        assert str(caught.value).startswith(f"{name}=")


def test_defaults_are_as_promised():
    p = SamplingParams()
    assert (p.n, p.temperature, p.top_p, p.top_k, p.min_p, p.typical_p) == (1, 1.0, 1.0, 0, 0.0, 1.0)
    assert (p.presence_penalty, p.frequency_penalty, p.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (p.max_tokens, p.min_tokens, p.logprobs, p.prompt_logprobs, p.seed) == (256, 0, None, None, None)
    assert (p.stop, p.stop_token_ids, p.bad_words) == ([], [], [])
    assert SamplingParams() == SamplingParams(stop=None, stop_token_ids=None, bad_words=None)


def test_edges_of_the_ranges_are_accepted():
    SamplingParams(n=limits.MAX_N, temperature=2, top_p=1, min_p=1, typical_p=1e-9, top_k=2**31 - 1, seed=-(2**63))
    SamplingParams(temperature=0, seed=2**63 - 1, max_tokens=None, min_tokens=2**63 - 1, logprobs=0, prompt_logprobs=20)
    SamplingParams(max_tokens=5, min_tokens=5, priority=-(2**63), cache_salt="s", truncate_prompt_tokens=1)


def test_values_are_brought_to_one_form():
    p = SamplingParams(stop="a", top_k=-1, seed=-1, stop_token_ids=[3, 3, 1], logit_bias={4: 999, 5: -999})
    assert (p.stop, p.top_k, p.seed, p.stop_token_ids) == (["a"], 0, None, [3, 1])
    assert isinstance(SamplingParams(temperature=1).temperature, float)
    assert p.logit_bias == {4: 100.0, 5: -100.0}
    q = SamplingParams(max_tokens=np.int64(7), temperature=np.float32(0.5), allowed_token_ids=np.array([1, 2]))
    assert type(q.max_tokens) is int
    assert type(q.temperature) is float
    assert q.allowed_token_ids == [1, 2]


def test_later_changes_to_a_given_list_do_not_reach_the_parameters():
    stop, bias = ["a"], {1: 2.0}
    p = SamplingParams(stop=stop, logit_bias=bias)
    stop.append("")
    bias[1] = NAN
    assert p.stop == ["a"]
    assert p.logit_bias == {1: 2.0}


def test_parameters_are_frozen_and_changed_copies_are_checked_again():
    p = SamplingParams()
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.n = 2  # type: ignore[misc]
    with pytest.raises(InvalidParameterError, match="top_p"):
        dataclasses.replace(p, top_p=2.0)
    assert pickle.loads(pickle.dumps(p)) == p  # noqa: S301


def test_several_greedy_outputs_are_refused():
    with pytest.raises(InvalidParameterError, match="n=2"):
        SamplingParams(n=2, temperature=0)


def test_params_do_not_import_numpy():
    code = "import sys, octavo.params, octavo.outputs; assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# Against a model


def test_max_tokens_goes_to_the_end_of_the_context_and_never_beyond():
    assert resolved(SamplingParams(max_tokens=None)).max_tokens == 54
    assert resolved(SamplingParams(max_tokens=1000)).max_tokens == 54
    assert resolved(SamplingParams(max_tokens=5)).max_tokens == 5
    assert resolved(prompt_len=63).max_tokens == 1


def test_a_prompt_that_leaves_no_room_is_refused_with_the_numbers():
    with pytest.raises(CapacityError, match=r"64 tokens.*context of 64"):
        resolved(prompt_len=64)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(stop_token_ids=[100]), "stop_token_ids"),
        (SamplingParams(allowed_token_ids=[1, 100]), "allowed_token_ids"),
        (SamplingParams(logit_bias={100: 1.0}), "logit_bias"),
        (SamplingParams(max_tokens=None, min_tokens=55), "min_tokens"),
        (SamplingParams(prompt_logprobs=0, prompt_logprobs_start=11), "prompt_logprobs_start"),
    ],
)
def test_what_this_model_cannot_do_is_refused_by_name(params: SamplingParams, field: str):
    with pytest.raises(InvalidParameterError) as caught:
        resolved(params)
    assert caught.value.field == field


def test_bad_words_are_encoded_with_and_without_a_leading_space():
    def encode(text: str) -> list[int]:
        return {"cat": [5], " cat": [6], "big dog": [7, 8], " big dog": [9, 8]}[text]

    words = resolved(SamplingParams(bad_words=[" cat", "big dog"]), encode=encode).bad_words
    assert words == ((5,), (6,), (7, 8), (9, 8))
    with pytest.raises(InvalidParameterError, match="bad_words"):
        resolved(SamplingParams(bad_words=["cat"]), encode=lambda text: [100])


def test_a_given_seed_stays_and_a_missing_one_is_drawn_in_63_bits():
    assert resolved(SamplingParams(seed=-5)).seed == -5
    drawn = {resolved().seed for _ in range(20)}
    assert len(drawn) == 20
    assert all(0 <= seed < 2**63 for seed in drawn)


def test_end_ids_outside_the_logits_are_left_out():
    assert resolved(eos_ids=frozenset({2, 100})).eos_ids == {2}


# Outputs


def test_outputs_say_what_they_are():
    one = CompletionOutput(0, "x" * 500, [1, 2], -1.5, [{1: Logprob(-1.5, 1, "x")}], "stop", 7)
    out = RequestOutput("r", "p" * 500, [1], [one], True, seed=3, error=RequestFailedError("NaN"))
    assert one.finished()
    assert not CompletionOutput(0, "", []).finished()
    assert len(repr(out)) < 500
    assert "seed=3" in repr(out)
    assert "NaN" in repr(out)


def test_timings_are_none_until_reached():
    t = Timings(10.0)
    assert (t.queue_time, t.ttft, t.latency) == (None, None, None)
    t = Timings(10.0, 10.5, 11.0, 13.0)
    assert (t.queue_time, t.ttft, t.latency) == (0.5, 1.0, 3.0)
