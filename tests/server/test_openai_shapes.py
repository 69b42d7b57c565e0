"""OpenAI's API on the wire: what is refused and how, what is ignored, what our own fields do."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo import limits
from octavo.server.schema import REFUSED, ChatCompletionRequest, CompletionRequest
from tests.support.live_server import LiveServer, serve
from tests.support.pace import takes_at_most
from tests.support.tiny_llm import write_tiny_llm

HI = [{"role": "user", "content": "hi"}]
ROUTES = {"/v1/completions": {"prompt": "hi"}, "/v1/chat/completions": {"messages": HI}}
KINDS = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatCompletionRequest}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serve(write_tiny_llm(tmp_path_factory.mktemp("tiny")), max_body_bytes=1 << 20) as server:
        yield server


def refused(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response, once its shape is checked."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    for inner in ("Traceback", ".py", "0x", "octavo.", "msgspec"):
        assert inner not in body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize("route", ROUTES)
def test_what_would_change_the_answer_is_refused_by_name(http: httpx.Client, route: str) -> None:
    for name, harmless in REFUSED.items():
        if name in KINDS[route].__struct_fields__:
            continue  # this route has it
        error = refused(http.post(route, json={**ROUTES[route], name: {"a": 1}}), 400)
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        for value in (None, *harmless):
            body = {**ROUTES[route], "max_tokens": 1, name: value}
            assert http.post(route, json=body).status_code == 200, (name, value)


def test_best_of_must_equal_n(http: httpx.Client) -> None:
    ask = {"prompt": "hi", "max_tokens": 2, "n": 2}
    assert refused(http.post("/v1/completions", json={**ask, "best_of": 3}), 400)["param"] == "best_of"
    assert http.post("/v1/completions", json={**ask, "best_of": 2}).status_code == 200


@pytest.mark.parametrize("route", ROUTES)
def test_harmless_unknown_fields_are_ignored_and_named(http: httpx.Client, route: str) -> None:
    extra = {"store": True, "service_tier": "auto", "bad\r\nname": 1, "user": "me"}
    response = http.post(route, json={**ROUTES[route], "max_tokens": 1, **extra})
    assert response.status_code == 200
    assert response.headers["x-octavo-ignored-fields"] == "store, service_tier"
    assert "x-octavo-ignored-fields" not in http.post(route, json={**ROUTES[route], "max_tokens": 1}).headers


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("temperature", "hot", "temperature"),
        ("temperature", -1, "temperature"),
        ("n", 0, "n"),
        ("n", 10**9, "n"),
        ("top_p", 0, "top_p"),
        ("max_tokens", 0, "max_tokens"),
        ("max_tokens", 1.5, "max_tokens"),
        ("seed", 1 << 70, "seed"),
        ("stop", [""], "stop"),
        ("stop", ["x"] * 100, "stop"),
        ("stop_token_ids", [10**6], "stop_token_ids"),
        ("logit_bias", {"x": 1}, "logit_bias"),
        ("logit_bias", {"99999": 1}, "logit_bias"),
        ("cache_salt", "", "cache_salt"),
        ("stream_options", {"include_usage": True}, "stream_options"),
        ("stream_options", {"include_usage": 3}, "stream_options.include_usage"),
        ("request_timeout", 0, "request_timeout"),
        ("bad_words", "x", "bad_words"),
    ],
)
@pytest.mark.parametrize("route", ROUTES)
def test_a_wrong_field_is_named(http: httpx.Client, route: str, field: str, value: Any, param: str) -> None:
    assert refused(http.post(route, json={**ROUTES[route], field: value}), 400)["param"] == param


def test_chat_names_the_fields_that_it_has(http: httpx.Client) -> None:
    def param(**fields: Any) -> str:
        return str(refused(http.post("/v1/chat/completions", json={"messages": HI, **fields}), 400)["param"])

    assert param(max_completion_tokens=0) == "max_completion_tokens"
    assert param(logprobs=True, top_logprobs=21) == "top_logprobs"
    assert param(top_logprobs=2) == "top_logprobs"
    assert param(messages=[]) == "messages"
    assert param(messages=[{"role": "user"}]) == "messages[0].content"
    image = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]
    assert param(messages=[{"role": "user", "content": image}]) == "messages[0].content[0]"
    assert param(add_generation_prompt=True, continue_final_message=True) == "add_generation_prompt"
    assert param(chat_template_kwargs={"messages": []}) == "chat_template_kwargs"


@pytest.mark.parametrize("prompt", ["", [], [[]], [["x"]], ["x", 3], [1.5], [True], [-1], [131], [[1], []], {}, None])
def test_a_prompt_that_is_none_is_refused(http: httpx.Client, prompt: Any) -> None:
    error = refused(http.post("/v1/completions", json={"prompt": prompt}), 400)
    assert error["param"].startswith("prompt")


def test_bodies_that_are_no_request_are_refused(http: httpx.Client) -> None:
    json_type = {"content-type": "application/json"}
    for body in (
        b"",
        b"{",
        b"[]",
        b"3",
        b'{"prompt": "x"} x',
        b'{"prompt": NaN}',
        b'{"prompt": "\xff"}',
        b"\x00" * 100,
    ):
        refused(http.post("/v1/completions", content=body, headers=json_type), 400)
    for headers in ({"content-type": "text/plain"}, {"origin": "http://evil.example"}, {"content-encoding": "gzip"}):
        refused(http.post("/v1/completions", content=b'{"prompt":"x"}', headers=headers), 415)
    refused(http.get("/v1/completions"), 405)
    assert http.get("/v1/completions").headers["allow"] == "POST"
    refused(http.post("/v1/nothing", json={}), 404)


def test_a_body_over_the_limit_is_refused_whatever_length_it_declares(http: httpx.Client) -> None:
    most = 1 << 20
    for size, status in ((most, 400), (most + 1, 413)):
        body = b'{"prompt": "x", "max_tokens": 1, "temperature": "' + b"y" * (size - 51) + b'"}'
        assert len(body) == size
        headers = {"content-type": "application/json"}
        refused(http.post("/v1/completions", content=body, headers=headers), status)
        chunks = iter([body[: size // 2], body[size // 2 :]])  # no content-length
        refused(http.post("/v1/completions", content=chunks, headers=headers), status)


def bombs() -> dict[str, bytes]:
    deep = limits.MAX_JSON_DEPTH
    huge = 1_000_000
    return {
        "deep lists": b'{"prompt":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        "deep unknown": b'{"prompt":"x","u":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        "one too deep": b'{"prompt":"x","u":' + b"[" * deep + b"]" * deep + b"}",
        "only opened": b"[" * huge,
        "quotes": b'{"prompt":' + b'"' * huge + b"[" * 100,
        "escapes": b'{"prompt":"' + b'\\"' * (huge // 2) + b"[" * 100,
        "many lists": b'{"prompt":[' + b"[]," * (huge // 3 - 10) + b"[]]}",
        "many prompts": json.dumps({"prompt": ["x"] * 100_000}).encode(),
        "a long prompt": json.dumps({"prompt": "a" * (huge - 100)}).encode(),
        "a long prompt to cut": json.dumps({"prompt": "a" * (huge - 100), "truncate_prompt_tokens": 1}).encode(),
        "long prompts": json.dumps({"prompt": ["a" * 1000] * 64}).encode(),
        "many ids": json.dumps({"prompt": [7] * 200_000}).encode(),
        "many stops": json.dumps({"prompt": "x", "stop": ["y"] * 100_000}).encode(),
        "many biases": json.dumps({"prompt": "x", "logit_bias": {str(i): 1 for i in range(50_000)}}).encode(),
        "many words": json.dumps({"prompt": "x", "bad_words": ["y"] * 100_000}).encode(),
        "n": json.dumps({"prompt": "x", "n": 10**18}).encode(),
        "a long number": b'{"prompt":"x","seed":' + b"9" * 900_000 + b"}",
        "prompts times n": json.dumps({"prompt": ["x"] * 64, "n": 16}).encode(),
    }


@pytest.mark.parametrize("name", bombs())
def test_i35_a_bomb_is_refused_at_once_and_slows_nobody_down(http: httpx.Client, name: str) -> None:
    begin = time.process_time()
    headers = {"content-type": "application/json"}
    refused(http.post("/v1/completions", content=bombs()[name], headers=headers), 400)
    assert takes_at_most(time.process_time() - begin, 1.0)  # of this process: the server's and the client's
    assert http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1}).status_code == 200


def test_i36_nesting_is_allowed_up_to_the_limit(http: httpx.Client) -> None:
    inside = limits.MAX_JSON_DEPTH - 1
    body = b'{"prompt":"x","max_tokens":1,"u":' + b"[" * inside + b"]" * inside + b"}"
    assert http.post("/v1/completions", content=body, headers={"content-type": "application/json"}).status_code == 200
    text = json.dumps({"prompt": 'x [[{"\\' * 20, "max_tokens": 1})  # brackets in texts do not nest
    assert http.post("/v1/completions", content=text, headers={"content-type": "application/json"}).status_code == 200


def test_token_ids_are_told_on_request(http: httpx.Client, live: LiveServer) -> None:
    ask = {"messages": HI, "seed": 1, "max_tokens": 5, "return_token_ids": True}
    body = http.post("/v1/chat/completions", json=ask).json()
    rendered = live.state.tokenizer.apply_chat_template(HI)
    assert body["prompt_token_ids"] == live.state.tokenizer.encode(rendered, add_special_tokens=False)
    ids = body["choices"][0]["token_ids"]
    assert live.state.tokenizer.decode(ids, at_start=False) == body["choices"][0]["message"]["content"]
    assert len(ids) == 5


def test_prompt_logprobs_are_told_on_request(http: httpx.Client) -> None:
    ask = {"prompt": "hello", "max_tokens": 1, "prompt_logprobs": 1}
    found = http.post("/v1/completions", json=ask).json()["choices"][0]["prompt_logprobs"]
    assert found[0] is None
    assert all(any(entry["rank"] == 1 for entry in position.values()) for position in found[1:])
    assert len(found) == 5
    assert refused(http.post("/v1/completions", json={**ask, "stream": True}), 400)["param"] == "prompt_logprobs"


def test_the_final_message_is_gone_on_from(http: httpx.Client) -> None:
    begun = [*HI, {"role": "assistant", "content": "Well, "}]
    ask = {"messages": begun, "continue_final_message": True, "max_tokens": 4, "seed": 1}
    chat = http.post("/v1/chat/completions", json=ask).json()
    plain = {"prompt": "user: hi\nassistant: Well, ", "max_tokens": 4, "seed": 1, "add_special_tokens": False}
    completion = http.post("/v1/completions", json=plain).json()
    assert chat["choices"][0]["message"]["content"] == completion["choices"][0]["text"]
    assert chat["usage"]["prompt_tokens"] == completion["usage"]["prompt_tokens"]


def test_the_generation_prompt_can_be_left_out(http: httpx.Client) -> None:
    def prompt_tokens(**fields: Any) -> int:
        ask = {"messages": HI, "max_tokens": 1, **fields}
        return int(http.post("/v1/chat/completions", json=ask).json()["usage"]["prompt_tokens"])

    assert prompt_tokens() - prompt_tokens(add_generation_prompt=False) == len("assistant: ")


def test_cache_salts_part_the_prefix_cache(http: httpx.Client) -> None:
    def cached(salt: str) -> int:
        ask = {"prompt": "a prompt that nobody else has", "max_tokens": 1, "cache_salt": salt}
        usage = http.post("/v1/completions", json=ask).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached("a"), cached("b"), cached("a"), cached("b")] == [0, 0, 28, 28]


def test_stop_reasons_and_the_stop_text(http: httpx.Client) -> None:
    ask = {"prompt": "hello", "seed": 1, "max_tokens": 100, "ignore_eos": True}
    text = http.post("/v1/completions", json=ask).json()["choices"][0]["text"]
    stop = text[6:8]
    cut = http.post("/v1/completions", json={**ask, "stop": stop}).json()["choices"][0]
    assert cut["text"] == text[: text.index(stop)]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    kept = http.post("/v1/completions", json={**ask, "stop": [stop], "include_stop_str_in_output": True}).json()
    assert kept["choices"][0]["text"] == text[: text.index(stop)] + stop


def test_tokenize_and_detokenize_are_each_others_inverse(http: httpx.Client) -> None:
    found = http.post("/tokenize", json={"prompt": "hé [/] €", "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 256
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "hé [/] €"}
    chat = http.post("/tokenize", json={"messages": HI}).json()
    assert http.post("/detokenize", json={"tokens": chat["tokens"]}).json() == {"prompt": "user: hi\nassistant: "}
    refused(http.post("/detokenize", json={"tokens": [131]}), 400)
    refused(http.post("/tokenize", json={}), 400)
    refused(http.post("/tokenize", json={"prompt": "x", "messages": HI}), 400)


@pytest.mark.parametrize("stream", [True, False])
def test_i21_a_client_that_goes_away_ends_its_request_within_a_few_steps(tmp_path: Path, stream: bool) -> None:
    with serve(write_tiny_llm(tmp_path / "tiny"), faults={"step_seconds": 0.05}) as live:
        ask = {"prompt": ["hi", "you"], "max_tokens": 200, "n": 4, "ignore_eos": True, "stream": stream}
        body = json.dumps(ask).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        host, port = live.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            while live.call(lambda engine: engine.call("stats"))["running"] < 8:
                time.sleep(0.01)
        steps = live.call(lambda engine: engine.call("stats"))["steps"]
        while (stats := live.call(lambda engine: engine.call("stats")))["requests"]:
            assert stats["steps"] < steps + 20  # of 200
        assert stats["blocks_used"] == 0
        while not live.records:
            time.sleep(0.01)
        assert live.records[0].disconnected


def test_the_document_describes_every_route(http: httpx.Client, live: LiveServer) -> None:
    from octavo.server import openai_routes, score_routes, tgi_routes, tokenize_routes

    document = http.get("/openapi.json").json()
    described = {(path, method.upper()) for path, methods in document["paths"].items() for method in methods}
    surfaces = (openai_routes, score_routes, tgi_routes, tokenize_routes)
    served = {
        (route.path.replace(":path", ""), method)
        for surface in surfaces
        for route in surface.routes(live.state)
        for method in (route.methods or ())
        if method != "HEAD"
    }
    assert described == served
    assert "continue_final_message" in document["components"]["schemas"]["ChatCompletionRequest"]["properties"]


def test_requests_before_the_model_is_there_are_told_to_come_back(tmp_path: Path) -> None:
    import asyncio

    from octavo.engine.client import EngineClient
    from octavo.engine.ipc import EngineOptions
    from octavo.server.state import ServerState
    from tests.support.live_server import app

    async def main() -> None:
        state = ServerState(EngineClient(EngineOptions()), ["tiny"])
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app(state)), base_url="http://x") as client:
            for route, body in ROUTES.items():
                response = await client.post(route, json=body)
                assert refused(response, 503)["code"] == "engine_unavailable"
                assert int(response.headers["retry-after"]) > 0
            health = await client.get("/")
            assert (health.status_code, health.json()["error_type"]) == (503, "healthcheck")
        state.close()

    asyncio.run(main())
