"""Every field of every route with values that are wrong, huge or strange: never a 5xx, and the next request is right.

`python -m tests.fuzz.fields` runs them all over the tiny model.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec

from octavo.server import schema
from tests.support.live_server import LiveServer, serve
from tests.support.tiny_llm import write_tiny_llm

HI = [{"role": "user", "content": "hi"}]
TGI = {"inputs": "hi", "parameters": {"max_new_tokens": 2}}
ROUTES: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/completions": (schema.CompletionRequest, {"prompt": "hi", "max_tokens": 2}),
    "/v1/chat/completions": (schema.ChatCompletionRequest, {"messages": HI, "max_tokens": 2}),
    "/v1/score": (schema.ScoreRequest, {"prompt": "hi", "continuations": ["x"]}),
    "/tokenize": (schema.TokenizeRequest, {"prompt": "hi"}),
    "/detokenize": (schema.DetokenizeRequest, {"tokens": [3]}),
    "/chat_tokenize": (schema.ChatTokenizeRequest, {"messages": HI}),
    "/generate": (schema.TgiRequest, TGI),
    "/generate_stream": (schema.TgiRequest, TGI),
    "/": (schema.TgiRequest, TGI),
}
ABSENT = object()
VALUES: dict[str, Any] = {
    "absent": ABSENT,
    "null": None,
    "empty text": "",
    "empty list": [],
    "empty object": {},
    "0": 0,
    "-1": -1,
    "2^31": 1 << 31,
    "2^63": 1 << 63,
    "2^70": 1 << 70,
    "1e308": 1e308,
    "NaN": float("nan"),
    "infinity": float("inf"),
    "true": True,
    "false": False,
    "nested": [[[[{"a": [None]}]]]],
    "object": {"type": "json_object", "a": {"b": 1}},
    "text": "x",
    "texts": ["x", "y"],
    "mixed": [1, "x", None],
    "out of vocabulary": [131, 1 << 20],
    "bias": {"131": 1, "5": 1e300},
    "a name of ours": {"self": 1},
    "names of ours": {"function": 1, "size": 1, "args": 1, "kwargs": 1, "cls": 1, "state": 1, "octavo meter": 1},
    "surrogate": "\ud800",
    "NUL": "\x00",
    "wrong message": [{"role": "user", "content": None}],
    "1 MiB": "a" * (1 << 20),
    "many": [7] * 100_000,
    "tools": [
        {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}
    ],
    "bad tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": 5}, "strict": True}}],
    "tool choice": {"type": "function", "function": {"name": "f"}},
    "tool message": [{"role": "tool", "content": "x"}, {"role": "assistant", "tool_calls": [{"id": 1}]}],
    "json format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array", "items": 7}}},
    "regex": "[ab]{3}|(x",
    "grammar": {"type": "regex", "value": "[ab]{3}"},
    "structured": {"json": {"properties": {"a": {"$ref": "#/nowhere"}}}, "regex": None},
    "choices": {"choice": ["a", "b"]},
    "a grammar": 'root ::= "a" root | "b"',
}
CANARY = {"prompt": "canary", "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


class Case(NamedTuple):
    route: str
    field: str  # "parameters.x": inside TGI's parameters
    value: str
    stream: bool

    def body(self) -> bytes:
        body = json.loads(json.dumps(ROUTES[self.route][1]))
        inside, name = (body, self.field)
        if self.field.startswith("parameters."):
            inside, name = body["parameters"], self.field.partition(".")[2]
        if self.stream:
            body["stream"] = True
        value = VALUES[self.value]
        if value is ABSENT:
            inside.pop(name, None)
        else:
            inside[name] = value
        return json.dumps(body).encode()


def cases() -> Iterator[Case]:
    for route, (kind, _) in ROUTES.items():
        fields = [*kind.__struct_fields__, *(name for name in schema.REFUSED if name not in kind.__struct_fields__)]
        if kind is schema.TgiRequest:
            fields += [f"parameters.{name}" for name in schema.TgiParameters.__struct_fields__]
        for field in fields:
            for value in VALUES:
                for stream in (False, True) if route in ("/v1/completions", "/v1/chat/completions", "/") else (False,):
                    yield Case(route, field, value, stream)


def run(live: LiveServer, chosen: list[Case]) -> Counter[int]:
    """Raises AssertionError, which names the case, at the first wrong answer. Returns how often each status came."""
    seen: Counter[int] = Counter()
    with httpx.Client(base_url=live.url, timeout=60) as http:
        expected = _canary(http)
        for case in chosen:
            response = http.post(case.route, content=case.body(), headers={"content-type": "application/json"})
            seen[response.status_code] += 1
            assert response.status_code in (200, 400, 404, 413, 422), f"{case}: {response.text[:500]}"
            if response.status_code >= 400:
                _check_error(case, response)
            else:
                assert not response.content.startswith(b'data: {"error"'), f"{case}: {response.text[:500]}"
            assert _canary(http) == expected, f"{case} changed another request's answer"
    return seen


def _canary(http: httpx.Client) -> list[int]:
    response = http.post("/v1/completions", json=CANARY)
    assert response.status_code == 200, response.text
    ids: list[int] = response.json()["choices"][0]["token_ids"]
    return ids


def _check_error(case: Case, response: httpx.Response) -> None:
    body = response.json()
    if set(body) == {"error", "error_type"}:
        message = body["error"]
    else:
        assert set(body) == {"error"}, f"{case}: {body}"
        assert set(body["error"]) == {"message", "type", "param", "code"}, f"{case}: {body}"
        assert response.status_code != 422, f"{case}: {body}"
        message = body["error"]["message"]
    assert len(message) < 1000, f"{case}: {message[:200]}"
    for inner in ("Traceback", "site-packages", ".py", "object at 0x"):
        assert inner not in message, f"{case}: {message}"


def main() -> None:
    chosen = list(cases())
    random.Random(1).shuffle(chosen)
    with tempfile.TemporaryDirectory() as folder, serve(write_tiny_llm(Path(folder) / "tiny")) as live:
        seen = run(live, chosen)
    print(f"{len(chosen)} cases, no 5xx; statuses: {dict(sorted(seen.items()))}")


if __name__ == "__main__":
    sys.exit(main())
