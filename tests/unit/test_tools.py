"""Tools are checked, conversations with calls are written as each template wants them, ids are the request's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo import limits
from octavo.chat.formats import (
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    MISTRAL_IDS,
    MISTRAL_NAMES,
    THINK,
    THINK_ALWAYS,
    THINK_MISTRAL,
    knows_tools,
    reasoning_format,
    tool_format,
)
from octavo.chat.messages import takes_argument_text, with_tool_calls, with_tool_prompt
from octavo.chat.tools import call_ids, read_tools
from octavo.errors import InvalidParameterError
from octavo.tokenizer.chat_template import ChatTemplate

WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Now.", "parameters": {}}}
CLOCK = {"type": "function", "function": {"name": "now"}}

# Templates as the families write them, as short as they can be.
HERMES_TEXT = (
    "{% for t in tools %}{{ t | tojson }}{% endfor %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>\n{\"name\": \"{{ c.function.name }}\", \"arguments\": "
    "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}"
    "{% endif %}}\n</tool_call>{% endfor %}{% endfor %}"
)  # fmt: skip
HERMES_MAPPING = HERMES_TEXT.replace(" is string", " is defined and false")
MISTRAL_TEXT = (
    "{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS]{% for c in m.tool_calls %}{{ c.function | tojson }}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}{{ c.id }}{% endfor %}"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}{{ m.tool_call_id }}{% else %}{{ m.content }}"
    "{% endif %}{% endfor %}{{ tools }}"
)
LLAMA_TEXT = (
    "{% for m in messages %}{% if 'tool_calls' in m %}{\"name\": \"{{ m.tool_calls[0].function.name }}\", "
    "\"parameters\": {{ m.tool_calls[0].function.arguments | tojson }}}{% elif m.role == 'ipython' %}x"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{{ tools }}"
)  # fmt: skip
JOINING = (
    "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments }}{% endfor %}"
    "{% endfor %}"
)
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {})


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (HERMES_TEXT, HERMES),
        (MISTRAL_TEXT, MISTRAL),
        (MISTRAL_TEXT + "[ARGS]", MISTRAL_NAMES),
        (MISTRAL_TEXT + "[CALL_ID][ARGS]", MISTRAL_IDS),
        (LLAMA_TEXT, LLAMA3_JSON),
        (CHATML, HERMES),
        ("{{ tools }}<tool_call><function=f></function></tool_call>", None),
        ("{{ tools }}something new", None),
    ],
)
def test_the_format_is_found_in_the_template(source: str, expected: Any) -> None:
    assert tool_format(source) == expected


def test_a_named_parser_wins_over_the_template() -> None:
    assert tool_format(HERMES_TEXT, "llama3_json") == LLAMA3_JSON
    assert tool_format(HERMES_TEXT, "none") is None
    assert tool_format("[ARGS]", "mistral") == MISTRAL_NAMES
    assert reasoning_format("", "deepseek_r1") == THINK_ALWAYS
    assert reasoning_format("<think>", "none") is None
    with pytest.raises(InvalidParameterError, match="tool_call_parser='pythonic' is not allowed: auto, none, hermes"):
        tool_format("", "pythonic")
    with pytest.raises(InvalidParameterError, match="reasoning_parser='x' is not allowed: auto, none, deepseek_r1"):
        reasoning_format("", "x")


@pytest.mark.parametrize(("source", "expected"), [("<think>", THINK), ("x</think>", THINK), ("[THINK]", THINK_MISTRAL)])
def test_the_marks_of_thoughts_are_found_in_the_template(source: str, expected: Any) -> None:
    assert reasoning_format(source) == expected
    assert reasoning_format(CHATML) is None


def test_the_choice_of_tools() -> None:
    auto = read_tools([WEATHER, CLOCK])
    assert (auto.required, auto.parallel, auto.names) == (False, True, {"get_weather", "now"})
    assert read_tools([WEATHER, CLOCK], "auto", None) == auto
    assert read_tools([WEATHER], "none").offered == ()
    required = read_tools([WEATHER, CLOCK], "required", False)
    assert (required.required, required.parallel) == (True, False)
    for choice in ("now", {"type": "function", "function": {"name": "now"}}, {"function": {"name": "now"}}):
        named = read_tools([WEATHER, CLOCK], choice)
        assert (named.required, named.parallel, named.names, len(named.offered)) == (True, False, {"now"}, 2)
    for nothing in (read_tools(None), read_tools([]), read_tools([], "auto"), read_tools(None, "none")):
        assert not nothing.offered


@pytest.mark.parametrize(
    ("tools", "choice", "field"),
    [
        ("x", None, "tools"),
        ({}, None, "tools"),
        ([CLOCK] * (limits.MAX_TOOLS + 1), None, "tools"),
        ([1], None, "tools[0]"),
        ([CLOCK, {"type": "retrieval"}], None, "tools[1].type"),
        ([{"type": "function"}], None, "tools[0].function"),
        ([{"function": {}}], None, "tools[0].function.name"),
        ([{"function": {"name": "a b"}}], None, "tools[0].function.name"),
        ([{"function": {"name": "a" * (limits.MAX_TOOL_NAME_CHARS + 1)}}], None, "tools[0].function.name"),
        ([CLOCK, CLOCK], None, "tools[1].function.name"),
        ([{"function": {"name": "a", "description": 1}}], None, "tools[0].function.description"),
        ([{"function": {"name": "a", "strict": "yes"}}], None, "tools[0].function.strict"),
        ([{"function": {"name": "a", "parameters": []}}], None, "tools[0].function.parameters"),
        ([{"function": {"name": "a", "parameters": {"type": "string"}}}], None, "tools[0].function.parameters.type"),
        ([{"function": {"name": "a", "parameters": {"x": float("nan")}}}], None, "tools[0].function.parameters"),
        (
            [{"function": {"name": "a", "parameters": {"x": "y" * limits.MAX_TOOL_SCHEMA_CHARS}}}],
            None,
            "tools[0].function.parameters",
        ),
        ([CLOCK], "later", "tool_choice"),
        ([CLOCK], {"type": "function"}, "tool_choice"),
        ([CLOCK], {"type": "custom", "function": {"name": "now"}}, "tool_choice"),
        ([CLOCK], 1, "tool_choice"),
        (None, "required", "tool_choice"),
        ([], {"type": "function", "function": {"name": "now"}}, "tool_choice"),
    ],
)
def test_what_is_wrong_with_tools_is_named(tools: Any, choice: Any, field: str) -> None:
    with pytest.raises(InvalidParameterError) as wrong:
        read_tools(tools, choice)
    assert wrong.value.field == field


def test_tools_reach_the_template_without_what_is_about_decoding() -> None:
    (tool,) = read_tools([{"function": {**WEATHER["function"], "strict": True, "x": 1}}]).offered  # type: ignore[dict-item]
    assert tool.for_template() == WEATHER


def test_ids_are_those_of_the_request() -> None:
    def ids(*asked: Any, short: bool = False) -> list[str]:
        make = call_ids(*asked, short=short)
        return [make(index) for index in range(3)]

    assert ids([1, 2], 7, 0) == ids([1, 2], 7, 0)
    different = [ids([1, 2], 7, 0), ids([1, 2], 7, 1), ids([1, 2], 8, 0), ids([1, 3], 7, 0)]
    assert len({one for some in different for one in some}) == 12
    assert all(one.startswith("call_") and len(one) == 29 for one in different[0])
    assert all(len(one) == 9 and one.isalnum() and one.isascii() for one in ids([1, 2], 7, 0, short=True))


CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "U"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "get", "arguments": '{"city":"Oslo","é":1}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]


def render(source: str, messages: list[dict[str, Any]], short_ids: bool = False) -> str:
    used = template(source)
    text = takes_argument_text(used.render)
    native = knows_tools(source)
    return used.render(with_tool_calls(messages, argument_text=text, native=native, short_ids=short_ids))


def test_arguments_are_text_or_a_mapping_as_the_template_wants_them() -> None:
    assert takes_argument_text(template(HERMES_TEXT).render)
    assert takes_argument_text(template(JOINING).render)
    for source in (HERMES_MAPPING, MISTRAL_TEXT, LLAMA_TEXT, CHATML):
        assert not takes_argument_text(template(source).render)
    assert '"arguments": {"city":"Oslo","é":1}' in render(HERMES_TEXT, CONVERSATION)
    assert '"arguments": {"city": "Oslo", "é": 1}' in render(HERMES_MAPPING, CONVERSATION)
    assert '"parameters": {"city": "Oslo", "é": 1}' in render(LLAMA_TEXT, CONVERSATION)
    given = json.loads(json.dumps(CONVERSATION))
    given[1]["tool_calls"][0]["function"]["arguments"] = {"city": "Oslo"}
    assert '"arguments": {"city": "Oslo"}' in render(HERMES_TEXT, given)


def test_ids_that_a_template_cannot_take_become_others_that_still_match() -> None:
    text = render(MISTRAL_TEXT, CONVERSATION, short_ids=True)
    assert '"arguments": {"city": "Oslo", "é": 1}' in text
    called = text.partition("}}")[2][:9]
    assert text.count(called) == 2


def test_a_message_without_calls_has_no_list_of_them() -> None:
    for calls in (None, []):
        assert render(LLAMA_TEXT, [{"role": "assistant", "content": "Hi.", "tool_calls": calls}]) == "Hi."


def test_thoughts_come_back_under_either_name() -> None:
    for name in ("reasoning", "reasoning_content"):
        message = {"role": "assistant", "content": None, name: "Hm."}
        (prepared,) = with_tool_calls([message], argument_text=True, native=True, short_ids=False)
        assert prepared == {"role": "assistant", "content": "", "reasoning_content": "Hm."}


def test_a_template_without_tools_gets_calls_results_and_tools_as_text() -> None:
    messages = [{"role": "system", "content": "S"}, *CONVERSATION]
    prepared = with_tool_calls(messages, argument_text=False, native=False, short_ids=False)
    tools = read_tools([WEATHER]).offered
    text = template(CHATML).render(with_tool_prompt(prepared, tools, None))
    assert '<tool_call>\n{"name": "get", "arguments": {"city": "Oslo", "é": 1}}\n</tool_call><|im_end|>' in text
    assert "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>" in text
    assert text.startswith("<|im_start|>system\nS\n\n")
    assert json.dumps(WEATHER) in text
    own = template(CHATML).render(with_tool_prompt(CONVERSATION[:1], tools, "Call these:"))
    assert own == f"<|im_start|>user\nCall these:\n{json.dumps(WEATHER)}\n\nU<|im_end|>\n"


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"tool_calls": "x"}, "messages[0].tool_calls"),
        ({"tool_calls": [1]}, "messages[0].tool_calls[0]"),
        ({"tool_calls": [{"function": {"arguments": "{}"}}]}, "messages[0].tool_calls[0]"),
        ({"tool_calls": [{"id": 1, "function": {"name": "f"}}]}, "messages[0].tool_calls[0].id"),
        (
            {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {"tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"tool_calls": [{"function": {"name": "f"}}] * (limits.MAX_TOOL_CALLS + 1)}, "messages[0].tool_calls"),
        ({"reasoning": 1}, "messages[0].reasoning"),
        ({"role": "tool", "tool_call_id": 1}, "messages[0].tool_call_id"),
    ],
)
def test_what_is_wrong_with_a_message_is_named(changed: dict[str, Any], field: str) -> None:
    message = {"role": "assistant", "content": "x", **changed}
    with pytest.raises(InvalidParameterError) as wrong:
        with_tool_calls([message], argument_text=True, native=True, short_ids=False)
    assert wrong.value.field == field
