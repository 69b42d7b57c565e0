"""OpenAI's own client, unchanged, gets from us what it expects."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.live_server import MODEL, LiveServer

HI = [{"role": "user", "content": "hi"}]
SAMPLED: dict[str, Any] = {"model": MODEL, "messages": HI, "seed": 7, "temperature": 1.0}


@pytest.fixture(scope="module")
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def test_chat_answers_with_usage_and_what_makes_it_again(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**SAMPLED, max_completion_tokens=9)
    choice = answer.choices[0]
    assert (choice.message.role, choice.finish_reason, choice.model_extra["seed"]) == ("assistant", "length", 7)
    assert answer.usage.completion_tokens == 9
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 9
    again = client.chat.completions.create(**SAMPLED, max_completion_tokens=9)
    assert again.choices[0].message.content == choice.message.content
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1
    assert again.system_fingerprint == answer.system_fingerprint


def test_a_seed_that_was_not_asked_for_is_told_and_makes_the_same_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HI, max_tokens=20)
    seed = answer.choices[0].model_extra["seed"]
    assert 0 <= seed < 1 << 53
    again = client.chat.completions.create(model=MODEL, messages=HI, max_tokens=20, seed=seed)
    assert again.choices[0].message.content == answer.choices[0].message.content
    other = client.chat.completions.create(model=MODEL, messages=HI, max_tokens=20)
    assert other.choices[0].model_extra["seed"] != seed


@pytest.mark.parametrize("n", [1, 3])
def test_streamed_deltas_are_the_answer_in_one_piece(client: openai.OpenAI, n: int) -> None:
    for stop in (None, ["e"], ["qz", "#"]):
        asked = {**SAMPLED, "n": n, "max_tokens": 40, "stop": stop}
        whole = client.chat.completions.create(**asked)
        texts = [""] * n
        reasons: list[str | None] = [None] * n
        usage = None
        for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        assert texts == [choice.message.content for choice in whole.choices]
        assert reasons == [choice.finish_reason for choice in whole.choices]
        assert usage.completion_tokens == whole.usage.completion_tokens


def test_completions_take_every_form_of_prompt(client: openai.OpenAI, live: LiveServer) -> None:
    ids = live.state.tokenizer.encode("hello")
    texts = {}
    for name, prompt in {"text": "hello", "texts": ["hello"], "ids": ids, "lists": [ids]}.items():
        answer = client.completions.create(model=MODEL, prompt=prompt, seed=3, max_tokens=6)
        texts[name] = answer.choices[0].text
    assert len(set(texts.values())) == 1
    several = client.completions.create(model=MODEL, prompt=["hello", "you", "hello"], seed=3, n=2, max_tokens=6)
    assert [choice.index for choice in several.choices] == list(range(6))
    assert several.choices[0].text == several.choices[4].text == texts["text"]
    assert several.choices[0].text != several.choices[1].text
    assert several.usage.completion_tokens == 36


def test_the_default_of_completions_is_sixteen_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="x", extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**SAMPLED, max_tokens=6, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert len(content) == 6
    for entry in content:
        ordered = [top.logprob for top in entry.top_logprobs]
        assert len(ordered) == 3
        assert ordered == sorted(ordered, reverse=True)
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token
        assert entry.logprob <= ordered[0]
    streamed = []
    for chunk in client.chat.completions.create(**SAMPLED, max_tokens=6, logprobs=True, top_logprobs=3, stream=True):
        for choice in chunk.choices:
            streamed += choice.logprobs.content if choice.logprobs else []
    assert streamed == content


def test_completion_logprobs_with_echo_score_the_prompt(client: openai.OpenAI) -> None:
    scored = client.completions.create(model=MODEL, prompt="hello", echo=True, logprobs=1, max_tokens=0)
    choice = scored.choices[0]
    assert choice.text == "hello"
    assert choice.logprobs.tokens == list("hello")
    assert choice.logprobs.text_offset == [0, 1, 2, 3, 4]
    assert choice.logprobs.token_logprobs[0] is None
    assert all(logprob < 0 for logprob in choice.logprobs.token_logprobs[1:])
    assert scored.usage.completion_tokens == 0
    more = client.completions.create(model=MODEL, prompt="hello", echo=True, logprobs=1, max_tokens=3, seed=1)
    assert more.choices[0].text.startswith("hello")
    assert more.choices[0].logprobs.token_logprobs[:5] == choice.logprobs.token_logprobs
    assert len(more.choices[0].logprobs.tokens) == 8


def test_logit_bias_forces_a_token(client: openai.OpenAI, live: LiveServer) -> None:
    (wanted,) = live.state.tokenizer.encode("Q")
    answer = client.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=5, temperature=0, logit_bias={str(wanted): 100}
    )
    assert answer.choices[0].message.content == "QQQQQ"


def test_errors_are_the_types_the_client_knows(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=HI, temperature=3)
    assert (bad.value.param, bad.value.code, bad.value.type) == (
        "temperature",
        "invalid_value",
        "invalid_request_error",
    )
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-7", messages=HI)
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=HI, functions=[{"name": "f"}])
    assert (refused.value.param, refused.value.code) == ("functions", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt="hello " * 200)
    assert long.value.code == "context_length_exceeded"


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_the_async_client_streams_many_at_once(live: LiveServer) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:

            async def one(seed: int) -> tuple[str, str]:
                asked = {**SAMPLED, "seed": seed, "max_tokens": 24}
                text = ""
                async for chunk in await client.chat.completions.create(**asked, stream=True):
                    text += chunk.choices[0].delta.content or ""
                whole = await client.chat.completions.create(**asked)
                return text, whole.choices[0].message.content or ""

            for streamed, whole in await asyncio.gather(*(one(seed) for seed in range(16))):
                assert streamed == whole

    asyncio.run(main())
