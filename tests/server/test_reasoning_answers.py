"""Thoughts are told apart from the answer over HTTP, under both names that clients know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support import tool_templates
from tests.support.live_server import MODEL, serve
from tests.support.tiny_llm import write_tiny_llm

HI: list[Any] = [{"role": "user", "content": "hi"}]
SAID = "<think>\nab <tool_call>\n</think>\n\ncd"
# A grammar makes the model say it; without one it says nothing that means anything.
SAYS: dict[str, Any] = {"grammar": "start: " + repr(SAID).replace("'", '"')}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = write_tiny_llm(tmp_path_factory.mktemp("tiny"), template=tool_templates.THINKS)
    with serve(folder) as live, openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def ask(client: openai.OpenAI, **extra: Any) -> Any:
    body = {"structured_outputs": SAYS, **extra}
    return client.chat.completions.create(model=MODEL, messages=HI, max_tokens=99, seed=1, extra_body=body)


def stream(client: openai.OpenAI, **extra: Any) -> tuple[dict[str, str], Any]:
    told: dict[str, str] = {}
    usage = None
    for chunk in client.chat.completions.create(
        model=MODEL,
        messages=HI,
        max_tokens=99,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"structured_outputs": SAYS, **extra},
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            for name, text in choice.delta.model_dump(exclude_unset=True).items():
                told[name] = told.get(name, "") + text
    return told, usage


def test_thoughts_and_answer_whole_and_streamed(client: openai.OpenAI) -> None:
    answer = ask(client)
    message = answer.choices[0].message
    thoughts = "ab <tool_call>"
    assert (message.content, message.reasoning, message.reasoning_content) == ("cd", thoughts, thoughts)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(SAID)
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(SAID) - len("<think>") - len("\n\ncd")
    told, usage = stream(client)
    assert told == {"role": "assistant", "content": "cd", "reasoning": thoughts, "reasoning_content": thoughts}
    assert usage.completion_tokens_details == answer.usage.completion_tokens_details


def test_thoughts_may_be_left_out_or_left_in(client: openai.OpenAI) -> None:
    without = ask(client, include_reasoning=False).choices[0].message
    assert (without.content, without.model_extra) == ("cd", {})
    assert stream(client, include_reasoning=False)[0] == {"role": "assistant", "content": "cd"}
    inside = ask(client, separate_reasoning=False).choices[0].message
    assert (inside.content, inside.model_extra) == (SAID, {})


def test_a_model_that_begins_inside_a_thought_goes_on_thinking(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = write_tiny_llm(tmp_path_factory.mktemp("tiny"), template=tool_templates.BEGINS_THINKING)
    asked: dict[str, Any] = {"model": MODEL, "messages": HI, "max_tokens": 9, "seed": 1}
    with serve(folder) as live, openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(**asked)
        assert answer.choices[0].message.content == ""
        assert answer.choices[0].message.reasoning
        assert answer.usage.completion_tokens_details.reasoning_tokens == 9
    with (
        serve(folder, reasoning_parser="none") as live,
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client,
    ):
        plain = client.chat.completions.create(**asked).choices[0].message
        assert plain.content.strip() == answer.choices[0].message.reasoning.strip()
        assert plain.model_extra == {}


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_thoughts_may_come_back_in_a_conversation(client: openai.OpenAI, name: str) -> None:
    messages = [*HI, {"role": "assistant", "content": None, name: "Hm."}, *HI]
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=3, seed=1)
    assert answer.choices
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=[{"role": "assistant", "content": "x", name: 1}])
    assert refused.value.param == f"messages[0].{name}"
