"""`huggingface_hub.InferenceClient`, which TGI's own pages recommend, speaks to the server by its address alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import ValidationError

from tests.support import tool_templates
from tests.support.live_server import LiveServer, serve
from tests.support.tiny_llm import write_tiny_llm


@pytest.fixture
def client(live: LiveServer) -> InferenceClient:
    return InferenceClient(model=live.url, timeout=20)


def test_text_generation(client: InferenceClient) -> None:
    asked = {"max_new_tokens": 12, "do_sample": True, "seed": 3, "return_full_text": False}
    plain = client.text_generation("hello", **asked)
    whole = client.text_generation("hello", details=True, decoder_input_details=True, top_n_tokens=2, **asked)
    pieces = list(client.text_generation("hello", details=True, stream=True, **asked))
    assert whole.generated_text == pieces[-1].generated_text == plain
    assert [piece.token for piece in pieces] == [
        type(pieces[0].token)(id=t.id, logprob=t.logprob, special=t.special, text=t.text) for t in whole.details.tokens
    ]
    assert (whole.details.finish_reason, whole.details.seed, len(whole.details.prefill)) == ("length", 3, 5)
    assert "".join(piece.token.text for piece in pieces if not piece.token.special) == plain
    assert client.text_generation("hello", max_new_tokens=2).startswith("hello")  # the whole text unless told otherwise
    with pytest.raises(ValidationError, match="max_new_tokens"):
        client.text_generation("hello", max_new_tokens=-5)


def test_chat(client: InferenceClient) -> None:
    messages = [{"role": "user", "content": "hi"}]
    asked = {"max_tokens": 12, "seed": 3, "temperature": 0.9}
    whole = client.chat_completion(messages, logprobs=True, top_logprobs=2, **asked)
    stream = client.chat_completion(messages, stream=True, stream_options={"include_usage": True}, **asked)
    pieces = list(stream)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == whole.choices[0].message.content
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens == 12


def test_tools_and_grammars(tmp_path: Path) -> None:
    with serve(write_tiny_llm(tmp_path, template=tool_templates.HERMES)) as live:
        client = InferenceClient(model=live.url, timeout=20)
        messages = [{"role": "user", "content": "hi"}]
        asked: dict[str, Any] = {"tools": [tool_templates.GET, tool_templates.NOW], "max_tokens": 120, "seed": 3}
        choice = {"function": {"name": "now"}}
        whole = client.chat_completion(messages, tool_choice=choice, **asked).choices[0]
        (call,) = whole.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments), whole.finish_reason) == (
            "now",
            {},
            "tool_calls",
        )
        pieces = list(client.chat_completion(messages, tool_choice=choice, stream=True, **asked))
        parts = [part for piece in pieces for part in piece.choices[0].delta.tool_calls or ()]
        assert "".join(part.function.arguments for part in parts) == call.function.arguments
        schema = {"enum": [12, 34]}
        text = client.text_generation("hi", max_new_tokens=9, do_sample=True, grammar={"type": "json", "value": schema})
        assert text.removeprefix("hi") in ("12", "34")
        wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        answer = client.chat_completion(messages, response_format=wanted, max_tokens=9)
        assert answer.choices[0].message.content in ("12", "34")
