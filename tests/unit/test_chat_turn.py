"""A model's format and a request make a prompt, a constraint and a reader of the answer that fit together."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.chat.formats import HERMES, MISTRAL, THINK
from octavo.chat.tools import read_tools
from octavo.chat.turn import ChatFormat
from octavo.errors import InvalidParameterError
from octavo.structured import StructuredOutputs
from octavo.tokenizer import Tokenizer
from octavo.tokenizer.backend import TokenFacts
from tests.unit.test_tools import CHATML, CONVERSATION, HERMES_TEXT, MISTRAL_TEXT, WEATHER

TOOLS = read_tools([WEATHER])
NONE = read_tools(None)


class Backend:
    """Bytes, and the control tokens given."""

    def __init__(self, *control: str) -> None:
        self.control = dict(enumerate(control, 256))
        self.facts = TokenFacts(256 + len(control), None, (), frozenset(self.control), {}, False)

    def encode(self, text: str, add_special_tokens: bool, parse_special: bool) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return self.control[token_id].encode() if token_id in self.control else bytes([token_id])


def chat(template: str | None, *control: str, **parsers: str) -> ChatFormat:
    return ChatFormat(Tokenizer(Backend(*control), template), **parsers)


def test_formats_are_the_templates_unless_named() -> None:
    found = chat(HERMES_TEXT + "</think>")
    assert (found.tools, found.reasoning) == (HERMES, THINK)
    named = chat(HERMES_TEXT, tool_parser="mistral", reasoning_parser="none")
    assert (named.tools, named.reasoning) == (MISTRAL, None)
    assert chat(None).tools == HERMES


def test_a_template_gets_tools_or_words_about_them() -> None:
    messages, variables = chat(HERMES_TEXT).conversation(CONVERSATION, TOOLS)
    assert variables == {"tools": [WEATHER]}
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"city":"Oslo","é":1}'
    messages, variables = chat(CHATML).conversation(CONVERSATION, TOOLS, "Mine.")
    assert variables == {}
    assert messages[0]["content"].startswith("Mine.\n")
    assert chat(CHATML).conversation(CONVERSATION[:1], NONE) == (CONVERSATION[:1], {})


def test_tools_for_a_model_whose_calls_cannot_be_read_are_refused() -> None:
    for without in (chat("{{ tools }}"), chat(HERMES_TEXT, tool_parser="none")):
        with pytest.raises(InvalidParameterError, match="tool_call_parser"):
            without.conversation([], TOOLS)
        assert without.conversation([], read_tools([WEATHER], "none")) == ([], {})


def test_calls_are_read_only_where_there_are_tools() -> None:
    text = '<tool_call>{"name": "f"}</tool_call>'
    format_ = chat(HERMES_TEXT)
    plain = format_.turn("p", NONE)
    assert not plain.reads
    assert plain.structured is None
    turn = format_.turn("p", TOOLS)
    assert turn.reads
    (start, _) = turn.parser([1], 2, 0).push(text)
    assert start.id.startswith("call_")  # type: ignore[union-attr]
    assert start == turn.parser([1], 2, 0).push(text)[0]
    assert start != turn.parser([1], 2, 1).push(text)[0]


def test_control_tokens_among_the_marks_are_shown_and_forced() -> None:
    format_ = chat(MISTRAL_TEXT, "</s>", "[TOOL_CALLS]", "[ARGS]", "[INST]")
    assert format_.turn("p", NONE).shown_ids == []
    turn = format_.turn("p", read_tools([WEATHER], "required"))
    assert turn.shown_ids == [257, 258]
    assert turn.structured is not None
    assert "<[257]>" in (turn.structured.grammar or "")
    thinking = chat(CHATML + "<think>", "<think>", "</think>")
    assert thinking.turn("p", NONE).shown_ids == [256, 257]


@pytest.mark.parametrize(
    ("prompt", "continued", "thinking"),
    [
        ("x<think>\n", None, True),
        ("x", None, False),
        ("x <think>Hm", "<think>Hm", True),
        ("x <think>Hm</think>So", "<think>Hm</think>So", False),
    ],
)
def test_where_the_answer_begins(prompt: str, continued: str | None, thinking: bool) -> None:
    turn = chat(CHATML + "<think>").turn(prompt, NONE, continued=continued)
    assert turn.thinking is thinking
    assert turn.parser([], None, 0).thinking is thinking


def test_a_constraint_is_put_behind_thoughts_only_where_there_may_be_some() -> None:
    wanted = StructuredOutputs(regex="a+")
    assert chat(CHATML).turn("p", NONE, wanted).structured == wanted
    thinks = chat(CHATML + "<think>")
    open_: Any = thinks.turn("p<think>", NONE, wanted).structured
    assert open_.start_after == "</think>"
    free: Any = thinks.turn("p", NONE, wanted).structured
    assert "thoughts?" in free.grammar
