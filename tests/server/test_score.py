"""/v1/score tells what a model gives to continuations, the same that LLM.score does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from math import fsum
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo import limits
from octavo.engine.score import continuation_logprobs
from octavo.server import score_routes
from octavo.server.errors import json_bytes
from tests.support.live_server import LiveServer, serve
from tests.support.llms import open_llm
from tests.support.tiny_llm import write_tiny_llm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llm(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[LiveServer]:
    with serve(folder) as server:
        yield server


def ask(live: LiveServer, **body: Any) -> httpx.Response:
    return httpx.post(f"{live.url}/v1/score", json=body, timeout=30)


def test_scores_are_those_of_the_engine(live: LiveServer, folder: Path) -> None:
    continuations = [" yes", "no", [76, 77]]
    answer = ask(live, prompt="is it?", continuations=continuations)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    with open_llm(folder) as llm:
        expected = llm.score("is it?", continuations)
        ids = llm.tokenizer.encode("is it?")
    for index, (found, score) in enumerate(zip(body["scores"], expected)):
        assert found["index"] == index
        assert (found["token_ids"], found["logprobs"]) == (score.token_ids, score.logprobs)
        assert found["logprob"] == score.logprob == fsum(found["logprobs"])
    assert "".join(body["scores"][0]["tokens"]) == " yes"
    assert len(body["scores"]) == 3
    assert body["usage"]["prompt_tokens"] == 3 * len(ids) + 4 + 2 + 2
    again = ask(live, prompt_token_ids=ids, continuations=continuations).json()
    assert again["scores"] == body["scores"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert again["system_fingerprint"] == body["system_fingerprint"]


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt_token_ids": [3]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"continuations": []}, "continuations"),
        ({"continuations": ["x", ""]}, "continuations[1]"),
        ({"continuations": [[]]}, "continuations[0]"),
        ({"continuations": [[131]]}, "continuations"),
        ({"continuations": "x"}, "continuations"),
        ({"continuations": ["x"] * (limits.MAX_REQUEST_SEQUENCES + 1)}, "continuations"),
        ({"priority": 1 << 63}, "priority"),
        ({"request_timeout": 0}, "request_timeout"),
    ],
)
def test_what_is_wrong_is_named(live: LiveServer, changed: dict[str, Any], param: str) -> None:
    answer = ask(live, **{"prompt": "x", "continuations": ["a", "b"], **changed})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_an_answer_is_built_and_written_beside_the_event_loop(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_loop: list[bool] = []

    def loop_runs_here() -> None:
        try:
            asyncio.get_running_loop()
            on_loop.append(True)
        except RuntimeError:
            on_loop.append(False)

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            loop_runs_here()
            return real(*given)

        return call

    monkeypatch.setattr(score_routes, "continuation_logprobs", watched(continuation_logprobs))
    monkeypatch.setattr(score_routes, "json_bytes", watched(json_bytes))
    assert ask(live, prompt="x", continuations=["a", "b"]).status_code == 200
    assert on_loop == [False, False, False]


def test_what_does_not_fit_is_refused(live: LiveServer) -> None:
    answer = ask(live, prompt="x", continuations=["a" * 300])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
