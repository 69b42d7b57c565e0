"""The surface of text-generation-inference: its shapes, ranges, statuses and headers."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from octavo.errors import OverloadedError, RequestFailedError
from tests.support.live_server import LiveServer
from tests.support.sse import events


def generate(http: httpx.Client, inputs: str = "hello", route: str = "/generate", **parameters: Any) -> httpx.Response:
    return http.post(route, json={"inputs": inputs, "parameters": parameters})


def stream(http: httpx.Client, inputs: str = "hello", **parameters: Any) -> list[dict[str, Any]]:
    response = generate(http, inputs, "/generate_stream", **parameters)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-compute-type"] == "cpu"
    data, _ = events(response.content)
    return [json.loads(item) for item in data]


def test_an_answer_has_text_details_and_headers(http: httpx.Client, live: LiveServer) -> None:
    asked = {"max_new_tokens": 6, "seed": 3, "do_sample": True, "details": True}
    response = generate(http, decoder_input_details=True, top_n_tokens=2, **asked)
    body = response.json()
    details = body["details"]
    assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == ("length", 6, 3)
    assert [token["text"] for token in details["prefill"]] == list("hello")
    assert details["prefill"][0]["logprob"] is None
    assert all(token["logprob"] < 0 for token in details["prefill"][1:])
    assert all(set(token) == {"id", "text", "logprob", "special"} for token in details["tokens"])
    assert "".join(token["text"] for token in details["tokens"] if not token["special"]) == body["generated_text"]
    assert [len(top) for top in details["top_tokens"]] == [2] * 6
    assert response.headers["x-prompt-tokens"] == "5"
    assert response.headers["x-generated-tokens"] == "6"
    assert response.headers["x-compute-characters"] == "5"
    assert float(response.headers["x-compute-time"]) > 0
    for name in ("total", "validation", "queue", "inference"):
        assert response.headers[f"x-{name}-time"].isdigit()
    assert set(generate(http, max_new_tokens=3).json()) == {"generated_text"}


@pytest.mark.parametrize(
    "asked", [{}, {"do_sample": True, "seed": 9}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 2}]
)
@pytest.mark.parametrize("stop", [[], ["e", "#"], ["q{"]])
def test_a_stream_is_the_answer_in_pieces(http: httpx.Client, asked: dict[str, Any], stop: list[str]) -> None:
    asked = {"max_new_tokens": 40, "details": True, "stop": stop, **asked}
    whole = generate(http, **asked).json()
    pieces = stream(http, **asked)
    assert [piece["index"] for piece in pieces] == list(range(1, len(pieces) + 1))
    assert [piece["token"] for piece in pieces] == whole["details"]["tokens"]
    assert all(piece["generated_text"] is None and piece["details"] is None for piece in pieces[:-1])
    last = pieces[-1]
    assert last["generated_text"] == whole["generated_text"]
    assert last["details"] == {
        **{name: whole["details"][name] for name in ("finish_reason", "generated_tokens", "seed")},
        "input_length": 5,
    }


def test_without_parameters_it_samples_and_with_them_it_does_not(http: httpx.Client) -> None:
    greedy = {generate(http, max_new_tokens=12).json()["generated_text"] for _ in range(3)}
    assert len(greedy) == 1
    free = {http.post("/generate", json={"inputs": "hello"}).json()["generated_text"] for _ in range(3)}
    assert len(free) == 3


def test_the_stop_text_is_kept_and_named(http: httpx.Client) -> None:
    text = generate(http, max_new_tokens=30, do_sample=True, seed=1).json()["generated_text"]
    stop = text[4:6]
    asked = {"max_new_tokens": 30, "do_sample": True, "seed": 1, "stop": [stop], "details": True}
    body = generate(http, **asked).json()
    assert body["generated_text"] == text[: text.index(stop)] + stop
    assert body["details"]["finish_reason"] == "stop_sequence"


def test_the_end_of_sequence_is_told_and_its_text_is_not(http: httpx.Client, live: LiveServer) -> None:
    for seed in range(200):
        body = generate(http, max_new_tokens=200, do_sample=True, seed=seed, details=True, temperature=1.9).json()
        if body["details"]["finish_reason"] == "eos_token":
            break
    last = body["details"]["tokens"][-1]
    assert (last["id"], last["text"], last["special"]) == (2, "</s>", True)
    assert "</s>" not in body["generated_text"]
    shown = "".join(token["text"] for token in body["details"]["tokens"] if not token["special"])
    assert shown == body["generated_text"]


def test_full_text_is_prepended_on_request_and_on_the_root(http: httpx.Client) -> None:
    plain = generate(http, max_new_tokens=4).json()["generated_text"]
    assert generate(http, max_new_tokens=4, return_full_text=True).json()["generated_text"] == "hello" + plain
    assert generate(http, route="/", max_new_tokens=4).json() == [{"generated_text": "hello" + plain}]
    body = {"inputs": "hello", "stream": True, "parameters": {"max_new_tokens": 4, "return_full_text": False}}
    data, _ = events(http.post("/", json=body).content)
    assert json.loads(data[-1])["generated_text"] == plain


def test_best_of_gives_the_likeliest_first(http: httpx.Client) -> None:
    details = generate(http, max_new_tokens=8, do_sample=True, best_of=2, details=True).json()["details"]
    (other,) = details["best_of_sequences"]

    def total(sequence: dict[str, Any]) -> float:
        return sum(token["logprob"] for token in sequence["tokens"])

    assert total(details) >= total(other)
    assert set(other) == {"generated_text", "finish_reason", "generated_tokens", "seed", "prefill", "tokens"}


def test_a_stream_tells_the_same_top_tokens_as_the_answer_in_one_piece(http: httpx.Client) -> None:
    asked = {"max_new_tokens": 8, "top_n_tokens": 3, "do_sample": True, "seed": 5}
    whole = generate(http, details=True, **asked).json()["details"]
    assert [piece["top_tokens"] for piece in stream(http, best_of=1, **asked)] == whole["top_tokens"]
    for token, top in zip(whole["tokens"], whole["top_tokens"]):
        assert [each["logprob"] for each in top] == sorted((each["logprob"] for each in top), reverse=True)
        assert top[0]["logprob"] >= token["logprob"]
        assert all(set(each) == {"id", "text", "logprob", "special"} for each in top)
    assert all("top_tokens" not in piece for piece in stream(http, max_new_tokens=3, top_n_tokens=0))


def test_the_whole_text_is_that_of_every_sequence(http: httpx.Client) -> None:
    asked = {"max_new_tokens": 4, "do_sample": True, "best_of": 2, "details": True, "return_full_text": True}
    body = generate(http, "llo", decoder_input_details=True, top_n_tokens=1, **asked).json()
    (other,) = body["details"]["best_of_sequences"]
    for sequence, text in ((body["details"], body["generated_text"]), (other, other["generated_text"])):
        assert text == "llo" + "".join(token["text"] for token in sequence["tokens"] if not token["special"])
        assert [token["text"] for token in sequence["prefill"]] == list("llo")
        assert len(sequence["top_tokens"]) == 4


def test_a_failure_in_mid_stream_is_an_event_of_tgi(http: httpx.Client, live: LiveServer) -> None:
    from octavo.errors import RequestFailedError

    async def fail_all(client: Any) -> None:
        for entry in list(client._replay.entries.values()):
            entry.stream.cancel(RequestFailedError("the model produced a NaN"))

    body = {"inputs": "hello", "parameters": {"max_new_tokens": 250}}
    collected = b""
    with http.stream("POST", "/generate_stream", json=body) as response:
        for piece in response.iter_raw():
            if not collected:
                live.call(fail_all)
            collected += piece
    data, _ = events(collected)
    last = json.loads(data[-1])
    assert last["error_type"] == "generation"
    assert last["error"].startswith("Request failed during generation: ")
    assert all("error" not in json.loads(item) for item in data[:-1])


def test_truncate_keeps_the_last_tokens(http: httpx.Client) -> None:
    short = generate(http, "llo", max_new_tokens=5).json()
    assert generate(http, "hello", max_new_tokens=5, truncate=3).json() == short


def test_seeds_have_all_64_bits(http: httpx.Client) -> None:
    asked = {"max_new_tokens": 3, "do_sample": True, "details": True}
    for seed in (0, 1 << 62, (1 << 63) + 5, (1 << 64) - 2):
        assert generate(http, seed=seed, **asked).json()["details"]["seed"] == seed
    assert generate(http, seed=1 << 64, **asked).status_code == 422


WRONG: list[dict[str, Any]] = [
    {"best_of": 0},
    {"best_of": 3, "do_sample": True},
    {"best_of": 2},
    {"best_of": 2, "do_sample": True, "seed": 1},
    {"temperature": 0},
    {"temperature": -1.0},
    {"repetition_penalty": 0},
    {"frequency_penalty": 2.5},
    {"top_k": 0},
    {"top_p": 1.0},
    {"top_p": 0},
    {"typical_p": 1.0},
    {"max_new_tokens": 0},
    {"stop": ["a", "b", "c", "d", "e"]},
    {"stop": [""]},
    {"truncate": 0},
    {"truncate": 10_000},
    {"watermark": True},
    {"seed": -1},
    {"top_n_tokens": 6},
    {"grammar": {"type": "regex", "value": "(("}},
    {"adapter_id": "x"},
    {"max_new_tokens": "many"},
]


@pytest.mark.parametrize("parameters", WRONG, ids=json.dumps)
def test_what_is_out_of_range_is_a_validation_error(http: httpx.Client, parameters: dict[str, Any]) -> None:
    response = generate(http, **parameters)
    assert response.status_code == 422
    body = response.json()
    assert set(body) == {"error", "error_type"}
    assert body["error_type"] == "validation"
    assert body["error"].startswith("Input validation error: ")
    assert next(iter(parameters)) in body["error"] or "best_of" in parameters


def test_what_a_stream_cannot_have_is_a_validation_error(http: httpx.Client) -> None:
    for parameters in ({"decoder_input_details": True}, {"best_of": 2, "do_sample": True}):
        assert generate(http, route="/generate_stream", **parameters).status_code == 422


def test_prompts_that_are_none_or_too_long_are_validation_errors(http: httpx.Client) -> None:
    for inputs in ("", "x" * 256, "y" * 100_000):
        response = generate(http, inputs)
        assert (response.status_code, response.json()["error_type"]) == (422, "validation")
    assert http.post("/generate", json={}).status_code == 422
    assert http.post("/generate", content=b"{", headers={"content-type": "application/json"}).status_code == 422


def test_unknown_parameters_are_named(http: httpx.Client) -> None:
    response = generate(http, max_new_tokens=1, wait_for_model=True)
    assert response.headers["x-octavo-ignored-fields"] == "parameters.wait_for_model"


def test_overload_is_429_and_a_failed_generation_424(http: httpx.Client, live: LiveServer) -> None:
    raised: Exception

    @asynccontextmanager
    async def refuse(scope: Any, cost: Any) -> Any:
        raise raised
        yield

    admission, live.state.admission = live.state.admission, refuse
    try:
        raised = OverloadedError("Model is overloaded", 7)
        response = generate(http)
        assert (response.status_code, response.headers["retry-after"]) == (429, "7")
        assert response.json() == {"error": "Model is overloaded", "error_type": "overloaded"}
        raised = RequestFailedError("the model produced a NaN")
        response = generate(http)
        assert (response.status_code, response.json()["error_type"]) == (424, "generation")
    finally:
        live.state.admission = admission


def test_info_tells_the_limits(http: httpx.Client) -> None:
    info = http.get("/info").json()
    assert (info["max_input_tokens"], info["max_total_tokens"]) == (255, 256)
    assert (info["max_best_of"], info["max_stop_sequences"]) == (2, 4)
    assert info["model_id"] == "tiny"
    assert http.get("/").status_code == 200


def test_tokens_say_where_they_lie_in_the_text(http: httpx.Client) -> None:
    text = "hé, €!"
    spans = http.post("/tokenize", json={"inputs": text}).json()
    assert "".join(text[span["start"] : span["stop"]] for span in spans) == text
    assert all(set(span) == {"id", "text", "start", "stop"} for span in spans)
    body = http.post("/chat_tokenize", json={"messages": [{"role": "user", "content": "hi"}], "model": "tgi"}).json()
    assert body["templated_text"] == "user: hi\nassistant: "
    assert "".join(span["text"] for span in body["tokenize_response"]) == body["templated_text"]
    assert http.post("/chat_tokenize", json={"messages": []}).status_code == 422
