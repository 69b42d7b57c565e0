"""A stream keeps its grammar and says what the answer in one piece says, whatever is asked and whatever happens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.live_server import LiveServer, serve
from tests.support.sse import GrammarError, events, read_openai
from tests.support.tiny_llm import write_tiny_llm

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llm(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[LiveServer]:
    with serve(folder) as server:
        yield server


ASKED = st.fixed_dictionaries(
    {"seed": st.integers(0, 1 << 40), "max_tokens": st.integers(1, 24), "n": st.integers(1, 4)},
    optional={
        "stop": st.lists(st.text("eoaq#{<é€", min_size=1, max_size=3), min_size=1, max_size=4),
        "include_stop_str_in_output": st.booleans(),
        "min_tokens": st.just(1),
        "ignore_eos": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "top_p": st.sampled_from([0.5, 1.0]),
        "return_token_ids": st.booleans(),
        "logit_bias": st.just({"99": 5, "100": 5, "2": 3}),
    },
)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(ASKED, st.booleans(), st.booleans(), st.booleans(), st.sampled_from([None, 0, 2]))
def test_i17_i19_a_stream_is_the_answer_in_pieces(
    http: httpx.Client, asked: dict[str, Any], chat: bool, usage: bool, continuous: bool, logprobs: int | None
) -> None:
    route = "/v1/chat/completions" if chat else "/v1/completions"
    body: dict[str, Any] = {**asked, **({"messages": HI} if chat else {"prompt": ["hi", "you"]})}
    if logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": logprobs} if chat else {"logprobs": logprobs}
    whole = http.post(route, json=body).json()
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": continuous}} if usage else {}
    response = http.post(route, json={**body, "stream": True, **options})
    assert response.headers["content-type"].startswith("text/event-stream")
    count = len(whole["choices"])
    streamed = read_openai(response.content, chat=chat, choices=count, usage=usage)
    for index, choice in enumerate(whole["choices"]):
        piece = streamed.choices[index]
        assert piece.text == (choice["message"]["content"] if chat else choice["text"])
        for name in ("finish_reason", "stop_reason", "seed"):
            assert getattr(piece, name) == choice[name]
        assert piece.token_ids == (choice.get("token_ids") or [])
        if logprobs is not None:
            names = ["content"] if chat else ["text_offset", "token_logprobs", "tokens", "top_logprobs"]
            for name in names:
                assert [item for part in piece.logprobs for item in part[name]] == choice["logprobs"][name]
    if usage:
        counts = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert [streamed.usage[name] for name in counts] == [whole["usage"][name] for name in counts]
        if continuous:
            so_far = [chunk["usage"]["completion_tokens"] for chunk in streamed.chunks]
            assert so_far == sorted(so_far)
            assert so_far[-1] == whole["usage"]["completion_tokens"]
        else:
            assert all(chunk["usage"] is None for chunk in streamed.chunks[:-1])


def test_an_echoed_prompt_comes_first(http: httpx.Client) -> None:
    ask = {"prompt": ["hello", "you"], "echo": True, "max_tokens": 3, "seed": 1, "n": 2}
    whole = http.post("/v1/completions", json=ask).json()
    streamed = read_openai(http.post("/v1/completions", json={**ask, "stream": True}).content, chat=False, choices=4)
    assert streamed.texts == [choice["text"] for choice in whole["choices"]]
    assert [text[:3] for text in streamed.texts] == ["hel", "hel", "you", "you"]
    only = http.post("/v1/completions", json={**ask, "max_tokens": 0, "stream": True})
    assert read_openai(only.content, chat=False, choices=4).texts == ["hello", "hello", "you", "you"]


def test_a_long_wait_is_filled_with_comments(folder: Path) -> None:
    with serve(folder, faults={"step_seconds": 0.5}) as slow:
        ask = {"messages": HI, "max_tokens": 1, "stream": True}
        response = httpx.post(f"{slow.url}/v1/chat/completions", json=ask, timeout=20)
        streamed = read_openai(response.content, chat=True)
        assert streamed.comments >= 2
        assert streamed.choices[0].finish_reason == "length"


def test_a_restart_of_the_engine_is_only_a_pause(folder: Path) -> None:
    import os
    import signal

    with serve(folder, faults={"step_seconds": 0.01}) as live:
        ask = {"messages": HI, "max_tokens": 60, "seed": 5, "ignore_eos": True}
        whole = httpx.post(f"{live.url}/v1/chat/completions", json=ask, timeout=20).json()
        collected = b""
        with httpx.stream(
            "POST", f"{live.url}/v1/chat/completions", json={**ask, "stream": True}, timeout=20
        ) as events_:
            for i, piece in enumerate(events_.iter_raw()):
                collected += piece
                if i == 10:
                    os.kill(live.state.engine.engine_pid, signal.SIGKILL)
        streamed = read_openai(collected, chat=True)
        assert streamed.texts == [whole["choices"][0]["message"]["content"]]
        assert streamed.comments > 0
        assert live.state.engine.restarts == 1


def test_i19_a_failure_in_mid_stream_is_an_error_event_and_no_done(live: LiveServer) -> None:
    ask = {"messages": HI, "max_tokens": 200, "ignore_eos": True, "request_timeout": 5, "stream": True}
    collected = b""
    with httpx.stream("POST", f"{live.url}/v1/chat/completions", json=ask, timeout=20) as response:
        assert response.status_code == 200
        for piece in response.iter_raw():
            if not collected:
                live.call(_fail_all)
            collected += piece
    streamed = read_openai(collected, chat=True)
    assert not streamed.done
    assert streamed.error is not None
    assert (streamed.error["type"], streamed.error["code"]) == ("server_error", "request_failed")


async def _fail_all(client: Any) -> None:
    from octavo.errors import RequestFailedError

    for entry in list(client._replay.entries.values()):
        entry.stream.cancel(RequestFailedError("the model produced a NaN"))


@pytest.mark.parametrize(
    "body",
    [
        "data: {}",
        "data: [DONE]\n\n",
        'data: {"error": {}}\n\n',
        "event: x\ndata: [DONE]\n\n",
        "{chunk}",
        "{chunk}data: [DONE]\n\n",
        "{end}{end}data: [DONE]\n\n",
        "{end}data: [DONE]\n\ndata: [DONE]\n\n",
        "{end}",
        "{end}{usage}data: [DONE]\n\n",
    ],
)
def test_the_reader_of_these_tests_is_strict(body: str) -> None:
    head = {"id": "a", "object": "chat.completion.chunk", "created": 1, "model": "m", "system_fingerprint": "f"}
    choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    last = {**choice, "finish_reason": "stop", "stop_reason": None, "seed": 1}
    parts = {"chunk": [choice], "end": [last], "usage": []}
    for name, choices in parts.items():
        body = body.replace("{" + name + "}", f"data: {json.dumps({**head, 'choices': choices})}\n\n")
    good = f"data: {json.dumps({**head, 'choices': [last]})}\n\ndata: [DONE]\n\n"
    assert read_openai(good.encode(), chat=True).done
    with pytest.raises(GrammarError):
        read_openai(body.encode(), chat=True)


def test_comments_are_no_events() -> None:
    assert events(b": hello\n\ndata: 1\n\n: x\n\n") == (["1"], 2)
