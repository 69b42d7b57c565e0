"""What a JSON body may look like is checked before the parser, which would hold up every thread."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import limits
from octavo.server.errors import ApiError
from octavo.server.schema import CompletionRequest, _check_shape, decode

SIZE = limits.MAX_BODY_BYTES
BOMBS = {
    "deep": b"[" * (SIZE // 2) + b"]" * (SIZE // 2),
    "only opened": b"[{" * (SIZE // 2),
    "deep at the end": b'{"prompt":[' + b"[]," * 20_000 + b"[" * 100,
    "deep behind texts": b"[" + b'"[",' * (SIZE // 8) + b"[" * 100,
    "deep behind escapes": b'["' + b'\\"\\\\' * (SIZE // 8) + b'",' + b"[" * 100,
    "many lists": b'{"prompt":[' + b"[]," * (SIZE // 4) + b"[]]}",
    "many objects": b'{"prompt":"x","tools":[' + b"{}," * (SIZE // 4) + b"{}]}",
    "many fields": b'{"prompt":"x"' + b"".join(b',"k%d":1' % i for i in range(300_000)) + b"}",
    "many biases": b'{"prompt":"x","logit_bias":{' + b",".join(b'"%d":1' % i for i in range(300_000)) + b"}}",
    "many ids": b'{"prompt":[' + b"1," * (SIZE // 3) + b"1]}",
    "many texts": b'{"prompt":[' + b'"",' * (SIZE // 3) + b'""]}',
}


@pytest.mark.parametrize("name", BOMBS)
def test_i35_no_bomb_gets_to_the_parser(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[Any] = []
    monkeypatch.setattr(msgspec.json, "decode", lambda *given, **options: parsed.append(given))
    with pytest.raises(ApiError) as error:
        decode(BOMBS[name], CompletionRequest)
    assert (error.value.status, error.value.code, parsed) == (400, "invalid_json", [])


def test_what_is_allowed_gets_through() -> None:
    ids = list(range(limits.MAX_DETOKENIZE_TOKENS))
    for body in (
        {"prompt": ids, "n": 1},
        {"prompt": "[" * 1000 + "{" * 1000 + '"' * 1000 + "\\" * 1001 + ":" * 1_000_000 + "," * 2_000_000},
        {"prompt": [[1]] * (limits.MAX_JSON_MEMBERS - 5)},
        {"prompt": "x", "logit_bias": {str(i): 1 for i in range(limits.MAX_JSON_MEMBERS - 5)}},
    ):
        decode(json.dumps(body).encode(), CompletionRequest)


def depth_of(value: Any) -> int:
    if isinstance(value, (list, dict)):
        return 1 + max(map(depth_of, value.values() if isinstance(value, dict) else value), default=0)
    return 0


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=4) | st.dictionaries(st.text('[]{}":,\\x', max_size=6), inner, max_size=4)


@settings(max_examples=200, deadline=None)
@given(st.recursive(st.text('[]{}":,\\x', max_size=8) | st.integers() | st.none(), nested, max_leaves=40))
def test_i35_depth_and_members_are_counted_as_a_parser_would(value: Any) -> None:
    text = json.dumps(value).encode()
    depth = depth_of(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "MAX_JSON_DEPTH", depth)
        _check_shape(text)
        patch.setattr(limits, "MAX_JSON_DEPTH", depth - 1)
        if depth:
            with pytest.raises(ApiError, match="nested deeper"):
                _check_shape(text)
