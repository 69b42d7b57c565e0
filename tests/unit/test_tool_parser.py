"""Tool calls come out of a text the same however it was cut, and nothing of it is lost."""

from __future__ import annotations

import json
import time
import tracemalloc
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.chat import parser
from octavo.chat.formats import HERMES, LLAMA3_JSON, MISTRAL, THINK, ReasoningFormat, ToolFormat
from octavo.chat.parser import CallStart, ChatParser, Content
from octavo.limits import MAX_JSON_DEPTH, MAX_TOOL_CALL_HEAD_CHARS, MAX_TOOL_NAME_CHARS
from tests.support.chats import parse

NAMES = frozenset({"f", "get_weather"})
FORMATS = (HERMES, LLAMA3_JSON, MISTRAL)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'

# The text; its content; the calls in it.
Case = tuple[str, str, list[list[str]]]
HERMES_CASES: dict[str, Case] = {
    "no call": ("Hello, {name}. ", "Hello, {name}. ", []),
    "nothing": ("", "", []),
    "one call": (CALL, "", [["f", '{"a": 1}']]),
    "text around": (f"Let me see.\n{CALL}\nDone.", "Let me see.Done.", [["f", '{"a": 1}']]),
    "several, text between": (f"{CALL}then{CALL}{CALL}", "then", [["f", '{"a": 1}']] * 3),
    "the model's spacing": (
        '<tool_call> { "name" : "f" , "arguments" : { "a" : [ 1 , 2.50e+1 ] } } </tool_call>',
        "",
        [["f", '{ "a" : [ 1 , 2.50e+1 ] }']],
    ),
    "arguments first": ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [["f", '{"a": 1}']]),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', "", [["f", "{}"]]),
    "null arguments": ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [["f", "{}"]]),
    "null before the name": ('<tool_call>{"arguments": null, "name": "f"}</tool_call>', "", [["f", "{}"]]),
    "empty arguments": ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', "", [["f", "{}"]]),
    "the other key": ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', "", [["f", '{"a": 1}']]),
    "other members": (
        '<tool_call>{"id": 7, "type": ["x", {"name": "g"}], "name": "f", "arguments": {}, "more": null}</tool_call>',
        "",
        [["f", "{}"]],
    ),
    "escapes in the name": ('<tool_call>{"name": "\\u0066", "arguments": {}}</tool_call>', "", [["f", "{}"]]),
    "markers inside strings": (
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call><tool_call>{\\"name\\": \\"g\\"}"}}</tool_call>',
        "",
        [["f", '{"a": "</tool_call><tool_call>{\\"name\\": \\"g\\"}"}']],
    ),
    "characters of several bytes": (
        '€😀<tool_call>{"name": "f", "arguments": {"é": "日本\\ud83d\\ude00"}}</tool_call>😀',
        "€😀😀",
        [["f", '{"é": "日本\\ud83d\\ude00"}']],
    ),
    "line ends in a string": ('<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}', "", [["f", '{"a": "x\ny"}']]),
    "no closer": ('<tool_call>{"name": "f", "arguments": {}}', "", [["f", "{}"]]),
    "cut inside the closer": ('<tool_call>{"name": "f", "arguments": {}}\n</tool_', "", [["f", "{}"]]),
    "something before the closer": (
        '<tool_call>{"name": "f", "arguments": {}}}</tool_call>',
        "}</tool_call>",
        [["f", "{}"]],
    ),
    "cut inside the arguments": ('<tool_call>{"name": "f", "arguments": {"a": "b', "", [["f", '{"a": "b']]),
    "almost a marker": ("a < b <tool <tool_cal", "a < b <tool <tool_cal", []),
    "marker in the end": ("x\n<tool_call>", "x\n<tool_call>", []),
}
BROKEN = [
    "nothing of the kind",
    "[]",
    '"text"',
    "{}",
    '{"arguments": {"a": 1}}',
    '{"name": "", "arguments": {}}',
    '{"name": 7, "arguments": {}}',
    '{"name": "\\ud800", "arguments": {}}',
    '{"name": "f", "arguments": [1]}',
    '{"name": "f", "arguments": "{}"}',
    '{"name": "f", "arguments": {\'a\': 1}}',
    '{"name": "f", "arguments": nil}',
    '{"name": "f" "arguments": {}}',
    '{"name": "f", }',
    "{'name': 'f'}",
    '{"name": "f", "x": 01}',
    '{"name": "f", "x": tru}',
    '{"name": "f", "x": "\\x"}',
    '{"name": "f", "x": 1.}',
    '{"arguments": {"a": 1}, "name"',
    '{"name": "' + "f" * (MAX_TOOL_NAME_CHARS + 1) + '", "arguments": {}}',
    '{"name": "f", "x": ' + "[" * (MAX_JSON_DEPTH + 1),
]
LLAMA_CASES: dict[str, Case] = {
    "bare": ('{"name": "f", "parameters": {"a": 1}}', "", [["f", '{"a": 1}']]),
    "behind whitespace": ('\n {"name": "f", "parameters": {}}\n', "", [["f", "{}"]]),
    "behind the marker": ('Wait. <|python_tag|>{"name": "f", "parameters": {}}', "Wait.", [["f", "{}"]]),
    "several": (
        '{"name": "f", "parameters": {}}; {"name": "get_weather", "parameters": {"a": 1}}',
        "",
        [["f", "{}"], ["get_weather", '{"a": 1}']],
    ),
    "with a type": ('{"type": "function", "name": "f", "parameters": {}}', "", [["f", "{}"]]),
    "the other key": ('{"name": "f", "arguments": {}}', "", [["f", "{}"]]),
    "another JSON object": ('{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    "no parameters": ('{"name": "f"}', '{"name": "f"}', []),
    "later braces": ('So: {"name": "f", "parameters": {}}', 'So: {"name": "f", "parameters": {}}', []),
    "text behind": ('{"name": "f", "parameters": {}}; and', "; and", [["f", "{}"]]),
    "code behind the marker": ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
}
MISTRAL_CASES: dict[str, Case] = {
    "a list": (
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "]"}}, {"name": "g", "arguments": {}, "id": "abcdefghi"}]',
        "",
        [["f", '{"a": "]"}'], ["g", "{}"]],
    ),
    "names first": ('Hm.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', "Hm.", [["f", '{"a": 1}'], ["g", "{}"]]),
    "with an id": ('[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": "[TOOL_CALLS]"}', "", [["f", '{"a": "[TOOL_CALLS]"}']]),
    "markers left out": ('[TOOL_CALLS]f{"a": 1}', "", [["f", '{"a": 1}']]),
    "no bracket in the end": ('[TOOL_CALLS][{"name": "f", "arguments": {}}', "", [["f", "{}"]]),
    "an empty list": ("[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    "broken inside": (
        '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": 1}] x',
        ', {"name": 1}] x',
        [["f", "{}"]],
    ),
    "prose": ("[TOOL_CALLS] are what I make. {}", "[TOOL_CALLS] are what I make. {}", []),
    "no call of a name": ("[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS]f[ARGS]", []),
    "arguments that are a list": ("[TOOL_CALLS]f[ARGS][1]", "[TOOL_CALLS]f[ARGS][1]", []),
}
CASES = [
    *(pytest.param(HERMES, *case, id=f"hermes, {name}") for name, case in HERMES_CASES.items()),
    *(pytest.param(HERMES, f"<tool_call>{text}", f"<tool_call>{text}", [], id=f"broken {i}")
      for i, text in enumerate(BROKEN)),
    *(pytest.param(LLAMA3_JSON, *case, id=f"llama, {name}") for name, case in LLAMA_CASES.items()),
    *(pytest.param(MISTRAL, *case, id=f"mistral, {name}") for name, case in MISTRAL_CASES.items()),
]  # fmt: skip


@pytest.mark.parametrize(("tools", "text", "content", "calls"), CASES)
def test_what_is_a_call_and_what_is_content(tools: ToolFormat, text: str, content: str, calls: list[list[str]]) -> None:
    whole = parse(text, tools, names=NAMES)
    assert (whole.content, whole.calls, whole.reasoning) == (content, calls, "")
    assert parse(list(text), tools, names=NAMES) == whole
    for cut in range(len(text)):
        assert parse([text[:cut], text[cut:]], tools, names=NAMES) == whole


def test_arguments_that_stop_being_json_end_there_and_the_rest_is_content() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1, b}}</tool_call> and <tool_call>{"name": "g"}</tool_call>'
    heard = parse(text, HERMES)
    assert heard.calls == [["f", '{"a": 1, '], ["g", "{}"]]
    assert heard.content == "b}}</tool_call> and"


# Pieces of which texts are put together that are full of what matters, and of what almost does.
PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        *("<|python_tag|>", '{"name": "f", "arguments": ', '{"name": "f", "parameters": {"a": "', '"}}'),
        *('{"a": "é😀\\n"}', "{}", "}", "{", '{"name": "f"}', "[", "]", ",", ";", "\n", " ", "\n" * 70, "f", "text"),
        *('"', "\\", "\\u00e9", "日本", "<", "[T", '{"arguments": {}, "name": "f"}', "null", "-1.5e3", "tru"),
        *("nul", ": ", '"name"', "'", "0", "1"),
        f"<tool_call>{json.dumps({'name': 'f', 'arguments': {'x': '</tool_call>'}})}</tool_call>",
        '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": null}]',
    ]
)  # fmt: skip


@st.composite
def cut_texts(draw: Any) -> tuple[str, list[str]]:
    text = "".join(draw(st.lists(PIECES | st.text(max_size=3), max_size=12)))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return text, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]


@settings(max_examples=400, deadline=None)
@given(
    cut=cut_texts(),
    tools=st.sampled_from([*FORMATS, None]),
    reasoning=st.sampled_from([THINK, None]),
    thinking=st.booleans(),
)
def test_every_cutting_of_a_text_gives_the_same(
    cut: tuple[str, list[str]], tools: ToolFormat | None, reasoning: ReasoningFormat | None, thinking: bool
) -> None:
    text, pieces = cut
    whole = parse(text, tools, reasoning, thinking=thinking, names=NAMES)
    assert parse(pieces, tools, reasoning, thinking=thinking, names=NAMES) == whole
    assert parse(list(text), tools, reasoning, thinking=thinking, names=NAMES) == whole
    if not whole.calls and tools is None and reasoning is None:
        assert whole.content == text


@settings(max_examples=300, deadline=None)
@given(cut=cut_texts(), tools=st.sampled_from(FORMATS), most=st.integers(1, 60))
def test_every_cutting_gives_the_same_where_bounds_are_met(
    cut: tuple[str, list[str]], tools: ToolFormat, most: int
) -> None:
    text, pieces = cut
    with (
        patch.object(parser, "MAX_TOOL_CALL_HEAD_CHARS", most),
        patch.object(parser, "_MAX_BLANK", most // 10),
        patch.object(parser, "_MAX_NAMED_HEAD", most),
    ):
        whole = parse(text, tools, THINK, names=NAMES)
        assert parse(pieces, tools, THINK, names=NAMES) == whole
        assert parse(list(text), tools, THINK, names=NAMES) == whole


def test_long_arguments_are_the_same_in_one_piece_and_in_many() -> None:
    long = json.dumps({"a": "x" * 3 * MAX_TOOL_CALL_HEAD_CHARS, "b": [1] * 1000})
    for text in (
        f'<tool_call>{{"name": "f", "arguments": {long}}}</tool_call>',
        f'<tool_call>{{"name": "f", "x": {{"y": 1}}, "arguments": {long}, "z": "{"z" * 99_999}"}}</tool_call>',
    ):
        whole = parse(text, HERMES)
        assert (whole.calls, whole.content) == ([["f", long]], "")
        assert parse([text[i : i + 4001] for i in range(0, len(text), 4001)], HERMES) == whole


@settings(max_examples=300, deadline=None)
@given(cut=cut_texts(), tools=st.sampled_from(FORMATS))
def test_nothing_but_whitespace_and_the_frame_of_calls_is_lost(cut: tuple[str, list[str]], tools: ToolFormat) -> None:
    text, _ = cut
    heard = parse(text, tools, names=NAMES)
    if not heard.calls:
        assert heard.content.strip() == text.strip()
        assert heard.content in text
    rest = text
    for part in [arguments for _, arguments in heard.calls if arguments != "{}"]:
        assert part in rest
        rest = rest[rest.index(part) + len(part) :]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
ARGUMENTS = st.dictionaries(st.text(), JSON_VALUES, max_size=4)


@settings(max_examples=300, deadline=None)
@given(
    calls=st.lists(st.tuples(st.text(min_size=1, max_size=20), ARGUMENTS), min_size=1, max_size=3),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 1]),
)
def test_arguments_come_out_as_the_model_wrote_them(
    calls: list[tuple[str, dict[str, Any]]], ascii_only: bool, indent: int | None
) -> None:
    def dump(value: Any) -> str:
        return json.dumps(value, ensure_ascii=ascii_only, indent=indent)

    expected = [[name, dump(arguments)] for name, arguments in calls]
    members = [f'{{"name": {dump(name)}, "arguments": {dump(arguments)}}}' for name, arguments in calls]
    tagged = "\n".join(f"<tool_call>\n{member}\n</tool_call>" for member in members)
    assert parse(list(tagged), HERMES).calls == expected
    assert parse(list(f"[TOOL_CALLS][{', '.join(members)}]"), MISTRAL).calls == expected
    bare = "; ".join(members)
    assert parse(list(bare), LLAMA3_JSON, names=frozenset(name for name, _ in calls)).calls == expected


def test_a_call_is_told_as_soon_as_it_is_certain_and_its_arguments_as_they_come() -> None:
    reader = ChatParser(HERMES, None, call_id=lambda index: f"id{index}")
    assert reader.push("Hi <tool") == [Content("Hi")]
    assert reader.push('_call>{"name": "f", "arguments": {') == []
    (start, begun) = reader.push('"a')
    assert start == CallStart(0, "id0", "f")
    assert begun.text == '{"a'  # type: ignore[union-attr]
    assert [event.text for event in reader.push('": 1')] == ['": 1']  # type: ignore[union-attr]
    assert [event.text for event in reader.push("}}</tool_call>\n")] == ["}"]  # type: ignore[union-attr]
    assert reader.finish() == []


def test_plain_text_is_told_at_once() -> None:
    reader = ChatParser(HERMES, THINK)
    assert [reader.push(piece) for piece in ("Hello", " you", ", a < b")] == [
        [Content("Hello")],
        [Content(" you")],
        [Content(", a < b")],
    ]


def test_a_head_that_is_too_long_is_content() -> None:
    for text in (
        '<tool_call>{"x": "' + "a" * MAX_TOOL_CALL_HEAD_CHARS + '", "name": "f", "arguments": {}}</tool_call>',
        "<tool_call>" + " " * (MAX_TOOL_CALL_HEAD_CHARS + 9) + '{"name": "f"}</tool_call>',
    ):
        whole = parse(text, HERMES)
        assert (whole.content, whole.calls) == (text, [])
        assert parse([text[i : i + 4001] for i in range(0, len(text), 4001)], HERMES) == whole


HARD = {
    "one long call": lambda n: '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * n,
    "many numbers": lambda n: '<tool_call>{"name": "f", "arguments": {"a": [' + "1, " * (n // 3),
    "many calls": lambda n: CALL * (n // len(CALL)),
    "calls without an end": lambda n: '<tool_call>{"name": "f"}' * (n // 24),
    "many broken calls": lambda n: "<tool_call>{" * (n // 12),
    "almost markers": lambda n: "<tool_cal" * (n // 9),
    "whitespace": lambda n: "x" + "\n" * n,
    "long thoughts": lambda n: "<think>" + "</thin" * (n // 6),
    "a long number": lambda n: '<tool_call>{"name": "f", "arguments": {"a": ' + "1" * n,
    "names": lambda n: "[TOOL_CALLS]f" * (n // 13),
}


@pytest.mark.parametrize("step", [1, 1 << 20])
@pytest.mark.parametrize("hard", HARD)
def test_work_grows_with_the_text_and_not_faster(hard: str, step: int) -> None:
    def seconds(size: int) -> float:
        text = HARD[hard](size)
        pieces = [text[i : i + step] for i in range(0, len(text), step)]
        tools = MISTRAL if hard == "names" else HERMES
        best = 1e9
        for _ in range(3):
            start = time.process_time()
            parse(pieces, tools, THINK)
            best = min(best, time.process_time() - start)
        return best

    short, long = seconds(8_000), seconds(64_000)
    assert long < 8 * 4 * short + 0.05


def test_memory_does_not_grow_with_what_was_told() -> None:
    for begin, more in (
        ('<tool_call>{"name": "f", "arguments": {"a": "', "x"),
        ("", "text <tool "),
        ("<think>", "thought\n"),
        ('<tool_call>{"name": "f", "arguments": {}, "x": "', "y"),
        ('<tool_call>{"name": "f", "arguments": {}, "', "key"),
    ):
        reader = ChatParser(HERMES, THINK)
        reader.push(begin)
        chunk = more * (4096 // len(more))
        tracemalloc.start()
        for _ in range(512):
            reader.push(chunk)
        kept = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert kept < 4 * MAX_TOOL_CALL_HEAD_CHARS, (begin, kept)
