"""`huggingface_hub.InferenceClient`, which TGI's own pages recommend, speaks to the server by its address alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import ValidationError

from tests.support.live_server import LiveServer, serve
from tests.support.tiny_llm import write_tiny_llm


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serve(write_tiny_llm(tmp_path_factory.mktemp("tiny"))) as server:
        yield server


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
