"""Tool calls over HTTP: OpenAI's client gets them whole and streamed, and its loop of calls and results works."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tests.support import tool_templates
from tests.support.full_server import full_server
from tests.support.live_server import MODEL, LiveServer, serve
from tests.support.tiny_llm import write_tiny_llm
from tests.support.tool_templates import GET, NOW

HI: list[Any] = [{"role": "user", "content": "hi"}]
TOOLS: list[Any] = [GET, NOW]
SCHEMAS = {"get": GET["function"]["parameters"], "now": {"type": "object", "maxProperties": 0}}
FORMATS = ("HERMES", "LLAMA", "MISTRAL", "MISTRAL_NAMES")
ASKED: dict[str, Any] = {"model": MODEL, "messages": HI, "tools": TOOLS, "max_tokens": 200, "temperature": 1.0}


@contextmanager
def opened(folder: Path, template: str, **options: Any) -> Iterator[tuple[LiveServer, openai.OpenAI]]:
    with (
        serve(write_tiny_llm(folder, template=template), **options) as live,
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield live, client


@pytest.fixture(scope="module", params=FORMATS)
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with opened(tmp_path_factory.mktemp("tiny"), getattr(tool_templates, request.param)) as (_, found):
        yield found


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with opened(tmp_path_factory.mktemp("tiny"), tool_templates.HERMES) as (_, found):
        yield found


def streamed(client: openai.OpenAI, **asked: Any) -> tuple[dict[str, Any], str | None, Any]:
    """The message that the deltas make, as a client puts them together; the finish reason; the usage."""
    message: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    reason, usage = None, None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            delta = choice.delta.model_dump(exclude_unset=True)
            for call in delta.pop("tool_calls", ()):
                if call["index"] == len(calls):
                    assert call["type"] == "function"
                    calls.append({"id": call["id"], **call["function"]})
                else:
                    assert call["index"] == len(calls) - 1
                    assert set(call["function"]) == {"arguments"}
                    calls[-1]["arguments"] += call["function"]["arguments"]
            for name, text in delta.items():
                message[name] = text if name == "role" else message.get(name, "") + text
            reason = choice.finish_reason or reason
    return {**message, "tool_calls": calls}, reason, usage


def whole(client: openai.OpenAI, **asked: Any) -> tuple[dict[str, Any], str | None, Any]:
    """The same of an answer in one piece."""
    answer = client.chat.completions.create(**asked)
    choice = answer.choices[0]
    message = choice.message.model_dump(exclude_unset=True)
    calls = [{"id": call["id"], **call["function"]} for call in message.pop("tool_calls", None) or ()]
    message.pop("refusal")
    message["content"] = message["content"] or ""
    return {**message, "tool_calls": calls}, choice.finish_reason, answer.usage


def check(calls: list[dict[str, Any]]) -> None:
    for call in calls:
        jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])
    assert len({call["id"] for call in calls}) == len(calls)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get"}}, "now"])
def test_required_and_named_calls_cannot_fail_and_stream_as_they_are(client: openai.OpenAI, choice: Any) -> None:
    for seed in range(6):
        asked = {**ASKED, "tool_choice": choice, "seed": seed, "parallel_tool_calls": False}
        message, reason, usage = whole(client, **asked)
        assert reason == "tool_calls", message
        assert message["content"] == ""
        (call,) = message["tool_calls"]
        check([call])
        if choice != "required":
            assert call["name"] == (choice if isinstance(choice, str) else "get")
        pieces, streamed_reason, streamed_usage = streamed(client, **asked)
        assert (pieces, streamed_reason) == (message, reason)
        assert streamed_usage.completion_tokens == usage.completion_tokens


def test_several_calls_at_once(hermes: openai.OpenAI) -> None:
    seen = set()
    for seed in range(12):
        asked = {**ASKED, "tools": [NOW], "tool_choice": "required", "seed": seed}
        message, reason, _ = whole(hermes, **asked)
        calls = message["tool_calls"]
        check(calls if reason == "tool_calls" else calls[:-1])
        seen.add(len(calls))
        assert streamed(hermes, **asked)[0] == message
    assert max(seen) > 1


def test_each_of_n_choices_has_its_own_calls(hermes: openai.OpenAI) -> None:
    asked = {**ASKED, "tool_choice": "required", "parallel_tool_calls": False, "n": 3, "seed": 5}
    answer = hermes.chat.completions.create(**asked)
    ids = [choice.message.tool_calls[0].id for choice in answer.choices]
    assert len(set(ids)) == 3
    again = hermes.chat.completions.create(**asked)
    assert [choice.message.tool_calls[0].id for choice in again.choices] == ids


def test_under_auto_text_is_free_beside_a_strict_function(hermes: openai.OpenAI) -> None:
    strict = {"type": "function", "function": {**GET["function"], "strict": True}}
    for seed in range(4):
        asked = {**ASKED, "tools": [strict], "seed": seed, "tool_choice": "auto", "max_tokens": 30}
        message, reason, _ = whole(hermes, **asked)
        assert message["content"]
        assert streamed(hermes, **asked)[:2] == (message, reason)


def test_the_loop_of_calls_and_results(client: openai.OpenAI) -> None:
    """As OpenAI's guide has it: the message goes back as it came, each result with the id of its call."""
    messages: list[Any] = list(HI)
    asked = {**ASKED, "tool_choice": "required", "seed": 1, "parallel_tool_calls": False, "max_tokens": 120}
    for turn in range(2):
        answer = client.chat.completions.create(**{**asked, "messages": messages, "tools": [NOW]})
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls"
        messages.append(message)
        for call in message.tool_calls:
            assert json.loads(call.function.arguments) == {}
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(turn)})
    final = client.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=8
    )
    assert final.choices[0].message.tool_calls is None
    ids = [message.tool_calls[0].id for message in messages if not isinstance(message, dict)]
    assert len(set(ids)) == 2


def test_none_means_that_the_prompt_has_no_tools(hermes: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": HI, "max_tokens": 5, "seed": 1}
    without = hermes.chat.completions.create(**asked)
    none = hermes.chat.completions.create(**asked, tools=TOOLS, tool_choice="none")
    assert none.usage.prompt_tokens == without.usage.prompt_tokens
    assert none.choices[0].message.content == without.choices[0].message.content
    some = hermes.chat.completions.create(**asked, tools=TOOLS)
    assert some.usage.prompt_tokens > none.usage.prompt_tokens


def test_an_answer_may_be_calls_or_json(hermes: openai.OpenAI) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer", "maximum": 99}}}
    kinds = set()
    for seed in range(12):
        message, reason, _ = whole(hermes, **{**ASKED, "tools": [NOW], "response_format": wanted, "seed": seed})
        if message["tool_calls"]:
            assert message["content"] == ""
        else:
            assert reason == "stop"
            assert json.loads(message["content"]) <= 99
        kinds.add(bool(message["tool_calls"]))
    assert kinds == {True, False}


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": {"type": "function", "function": {"name": "gone"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}, "tool_choice": "required"}, "response_format"),
        ({"messages": [{"role": "tool", "tool_call_id": 1, "content": "x"}]}, "messages[0].tool_call_id"),
        (
            {"tools": [{"function": {"name": "f", "strict": True, "parameters": {"properties": {"a": {"not": {}}}}}}]},
            "tools[0].function.parameters.properties.a.not",
        ),
    ],
)
def test_what_is_wrong_is_named(hermes: openai.OpenAI, changed: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        hermes.chat.completions.create(**{**ASKED, **changed})
    assert refused.value.param == param


def test_tools_are_refused_where_calls_cannot_be_read(tmp_path: Path) -> None:
    with opened(tmp_path / "a", tool_templates.HERMES, tool_parser="none") as (_, client):
        with pytest.raises(openai.BadRequestError, match="tool_call_parser"):
            client.chat.completions.create(**ASKED)
        assert client.chat.completions.create(**{**ASKED, "tool_choice": "none"}).choices
    with opened(tmp_path / "b", tool_templates.HERMES, auto_tool_choice=False) as (_, client):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**ASKED)
        assert refused.value.param == "tool_choice"
        assert client.chat.completions.create(**ASKED, tool_choice="now").choices[0].message.tool_calls


def test_a_named_parser_changes_what_is_written(tmp_path: Path) -> None:
    with opened(tmp_path, tool_templates.HERMES, tool_parser="mistral") as (_, client):
        message, _, _ = whole(client, **ASKED, tool_choice="now", seed=1)
        (call,) = message["tool_calls"]
        assert len(call["id"]) == 9


def test_an_engine_that_dies_in_the_midst_of_a_call_changes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path, tool_templates.HERMES, faults={"step_seconds": 0.02}) as (live, client):
        expected = chunks(client, live, None)
        assert len(expected) > 10
        for restarts, after in enumerate((1, 3, 8), 1):
            assert chunks(client, live, after) == expected
            assert live.state.engine.restarts == restarts


def chunks(client: openai.OpenAI, live: LiveServer, dies_after: int | None) -> list[Any]:
    """All that a stream says, but for its name and its time. The engine dies after so many chunks."""
    found = []
    asked = {**ASKED, "tool_choice": "get", "seed": 3}
    for chunk in client.chat.completions.create(**asked, stream=True):
        found.append(chunk.model_dump(exclude={"id", "created"}))
        if len(found) == dies_after:
            os.kill(live.state.engine.engine_pid, signal.SIGKILL)
    return found


def test_logprobs_and_token_ids_of_calls_are_the_same_in_a_stream(hermes: openai.OpenAI) -> None:
    asked = {**ASKED, "tool_choice": "now", "logprobs": True, "top_logprobs": 1, "seed": 1}
    extra = {"return_token_ids": True}
    choice = hermes.chat.completions.create(**asked, extra_body=extra).choices[0]
    logprobs: list[Any] = []
    ids: list[int] = []
    for chunk in hermes.chat.completions.create(**asked, stream=True, extra_body=extra):
        for part in chunk.choices:
            logprobs += part.logprobs.content if part.logprobs else []
            ids += (part.model_extra or {}).get("token_ids", [])
    assert logprobs == choice.logprobs.content
    assert ids == choice.model_extra["token_ids"]
    assert "".join(entry.token for entry in logprobs[:11]) == "<tool_call>"


def test_openais_stream_helper_puts_a_call_together(hermes: openai.OpenAI) -> None:
    strict = {"type": "function", "function": {**GET["function"], "strict": True}}
    asked = {**ASKED, "tools": [strict], "tool_choice": "required", "parallel_tool_calls": False, "seed": 2}
    with hermes.chat.completions.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.delta" in kinds
    assert "tool_calls.function.arguments.done" in kinds
    (call,) = message.tool_calls
    assert call.function.parsed_arguments == json.loads(call.function.arguments)


def test_settings_of_the_server_reach_its_requests(tmp_path: Path) -> None:
    folder = write_tiny_llm(tmp_path, template=tool_templates.BEGINS_THINKING)
    body = {**ASKED, "model": "tiny"}
    with full_server(folder, enable_auto_tool_choice=False, reasoning_parser="none") as full:
        assert full.ask("/v1/chat/completions", body).json["error"]["param"] == "tool_choice"
        plain = full.ask("/v1/chat/completions", {**body, "tools": None, "max_tokens": 3}).json
        assert "reasoning" not in plain["choices"][0]["message"]
    with full_server(folder, tool_call_parser="none") as full:
        assert full.ask("/v1/chat/completions", body).json["error"]["param"] == "tools"
        thought = full.ask("/v1/chat/completions", {**body, "tools": None, "max_tokens": 3}).json
        assert thought["choices"][0]["message"]["reasoning"]


def test_tokenize_counts_what_a_chat_has(hermes: openai.OpenAI) -> None:
    messages = [*HI, {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "now", "arguments": "{}"}}]}]
    counted = hermes.post("/../tokenize", body={"messages": messages, "tools": TOOLS}, cast_to=object)
    answer = hermes.chat.completions.create(**{**ASKED, "messages": messages, "max_tokens": 1})
    assert counted["count"] == answer.usage.prompt_tokens  # type: ignore[index]
