"""Thoughts are told apart from the answer, whether the model or the prompt opened them."""

from __future__ import annotations

import pytest

from octavo.chat.formats import HERMES, LLAMA3_JSON, THINK, THINK_ALWAYS, THINK_MISTRAL
from octavo.chat.parser import ChatParser
from tests.support.chats import parse

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "thinking", "reasoning", "content", "calls"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, "Hm.", "Yes.", []),
        ("\n<think>Hm.</think>Yes.", False, "Hm.", "Yes.", []),
        ("Hm.\n</think>\n\nYes. ", True, "Hm.", "Yes. ", []),
        ("<think>\nHm.</think>Yes.", True, "Hm.", "Yes.", []),
        ("</think>Yes.", True, "", "Yes.", []),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes.", []),
        ("<think>Still at it", False, "Still at it", "", []),
        ("Still at it </thi", True, "Still at it </thi", "", []),
        ("Yes. <think>no</think>", False, "", "Yes. <think>no</think>", []),
        ("<thinker> is a word", False, "", "<thinker> is a word", []),
        (f"<think>{CALL}</think>{CALL}", False, CALL, "", [["f", '{"a": 1}']]),
        (f"<think>{CALL}", False, CALL, "", []),
        ("<think>a</think>b</think>c", False, "a", "b</think>c", []),
        ("  \n Yes.", False, "", "  \n Yes.", []),
        ("<think>é😀</think>😀é", False, "é😀", "😀é", []),
    ],
)
def test_thoughts_and_answer(text: str, thinking: bool, reasoning: str, content: str, calls: list[list[str]]) -> None:
    whole = parse(text, HERMES, THINK, thinking=thinking)
    assert (whole.reasoning, whole.content, whole.calls) == (reasoning, content, calls)
    assert parse(list(text), HERMES, THINK, thinking=thinking) == whole


def test_a_bare_call_stands_behind_the_thoughts() -> None:
    heard = parse(
        '<think>{"name": "f"}</think>\n{"name": "f", "parameters": {}}', LLAMA3_JSON, THINK, names=frozenset({"f"})
    )
    assert (heard.reasoning, heard.content, heard.calls) == ('{"name": "f"}', "", [["f", "{}"]])


def test_other_marks_of_thoughts() -> None:
    heard = parse("[THINK]Hm.[/THINK]Yes.", None, THINK_MISTRAL)
    assert (heard.reasoning, heard.content) == ("Hm.", "Yes.")


def test_it_is_known_while_it_thinks() -> None:
    parser = ChatParser(None, THINK)
    assert not parser.thinking
    parser.push("<think>a")
    assert parser.thinking
    parser.push("</think>b")
    assert not parser.thinking


@pytest.mark.parametrize(
    ("prompt", "inside", "inside_if_assumed"),
    [
        ("user: hi\nassistant: <think>\n", True, True),
        ("user: hi\nassistant: <think>", True, True),
        ("user: hi\nassistant: <think>\n\n</think>\n\n", False, False),
        ("user: <think> is a tag\nassistant: ", False, True),
    ],
)
def test_the_prompt_tells_whether_thoughts_are_open(prompt: str, inside: bool, inside_if_assumed: bool) -> None:
    assert THINK.begins_inside(prompt) is inside
    assert THINK_ALWAYS.begins_inside(prompt) is inside_if_assumed
