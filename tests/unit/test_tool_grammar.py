"""Under a tool grammar a model can write nothing but the calls it was asked for."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from octavo.chat.formats import (
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    MISTRAL_IDS,
    MISTRAL_NAMES,
    THINK,
    THINK_MISTRAL,
    ReasoningFormat,
    ToolFormat,
)
from octavo.chat.grammar import arguments_schema, behind_thoughts, calls_or, tool_constraint
from octavo.chat.tools import Tools, read_tools
from octavo.errors import InvalidParameterError
from octavo.structured import StructuredOutputs
from tests.support.byte_vocabulary import ByteVocabulary
from tests.support.chats import parse

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
}
UNIT = {"$defs": {"u": {"enum": ["C", "F"]}}, "properties": {"unit": {"$ref": "#/$defs/u"}}, "required": ["unit"]}
FUNCTIONS: list[dict[str, Any]] = [
    {"name": "get", "parameters": CITY},
    {"name": "get_unit", "parameters": UNIT},
    {"name": "now"},
]
FORMATS = (HERMES, LLAMA3_JSON, MISTRAL, MISTRAL_NAMES, MISTRAL_IDS)
MARKS = sorted({mark for format_ in FORMATS for mark in format_.markers} | {"<think>", "</think>"})
PLAIN, CONTROL = ByteVocabulary(), ByteVocabulary(MARKS, ['{"name": "', "get", '"}}'])
VOCABULARIES = pytest.mark.parametrize("vocabulary", [PLAIN, CONTROL], ids=["as text", "as control tokens"])


def tools(*functions: dict[str, Any], choice: Any = "required", parallel: bool = True) -> Tools:
    listed = [{"type": "function", "function": function} for function in functions or FUNCTIONS]
    return read_tools(listed, choice, parallel)


def constraint(
    format_: ToolFormat,
    asked: Tools,
    vocabulary: ByteVocabulary = PLAIN,
    reasoning: ReasoningFormat | None = None,
    thinking: bool = False,
) -> StructuredOutputs:
    control_ids = {mark: i for mark, i in vocabulary.control_ids.items() if mark in MARKS}
    found = tool_constraint(format_, asked, reasoning, thinking=thinking, control_ids=control_ids)
    assert found is not None
    assert found.grammar is not None
    return found


def write(format_: ToolFormat, *calls: tuple[str, str]) -> str:
    """As a model of this format writes them."""
    if format_.names_first:
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in calls)
    members = [f'{{"name": "{name}", "{format_.arguments_key}": {arguments}}}' for name, arguments in calls]
    if format_.style == "tagged":
        return "\n".join(f"<tool_call>\n{member}\n</tool_call>" for member in members)
    return members[0] if format_.style == "bare" else f"[TOOL_CALLS][{', '.join(members)}]"


GOOD = ("get", '{"city": "Oslo", "days": 2}')


@VOCABULARIES
@pytest.mark.parametrize("format_", FORMATS)
def test_required_is_one_or_more_calls_with_arguments_of_the_schema(
    format_: ToolFormat, vocabulary: ByteVocabulary
) -> None:
    lark = constraint(format_, tools(), vocabulary).grammar
    assert lark is not None
    assert vocabulary.takes(lark, write(format_, GOOD))
    assert vocabulary.takes(lark, write(format_, ("now", "{}")))
    assert vocabulary.takes(lark, write(format_, ("get_unit", '{"unit":"C"}')))
    for wrong in (("get", "{}"), ("got", "{}"), ("get_unit", '{"unit": "K"}'), ("now", '{"x": 1}'), ("ge", "{}")):
        assert not vocabulary.takes(lark, write(format_, wrong)), wrong
    for text in ("", "Sure. ", f"Sure. {write(format_, GOOD)}", f"{write(format_, GOOD)} There."):
        assert not vocabulary.takes(lark, text), text
    several = write(format_, GOOD, ("now", "{}"), GOOD)
    assert vocabulary.takes(lark, several)


@VOCABULARIES
@pytest.mark.parametrize("format_", [HERMES, MISTRAL, MISTRAL_NAMES, MISTRAL_IDS])
def test_not_in_parallel_is_exactly_one_call(format_: ToolFormat, vocabulary: ByteVocabulary) -> None:
    lark = constraint(format_, tools(parallel=False), vocabulary).grammar
    assert lark is not None
    assert vocabulary.takes(lark, write(format_, GOOD))
    assert not vocabulary.takes(lark, write(format_, GOOD, GOOD))


@VOCABULARIES
@pytest.mark.parametrize("format_", FORMATS)
def test_a_named_function_is_the_only_one(format_: ToolFormat, vocabulary: ByteVocabulary) -> None:
    named = {"type": "function", "function": {"name": "get"}}
    lark = constraint(format_, tools(choice=named), vocabulary).grammar
    assert lark is not None
    assert vocabulary.takes(lark, write(format_, GOOD))
    assert not vocabulary.takes(lark, write(format_, ("now", "{}")))


@VOCABULARIES
@pytest.mark.parametrize("format_", FORMATS)
def test_strict_under_auto_leaves_text_free_and_binds_calls(format_: ToolFormat, vocabulary: ByteVocabulary) -> None:
    strict = [{**FUNCTIONS[0], "strict": True}, FUNCTIONS[2]]
    lark = constraint(format_, tools(*strict, choice="auto"), vocabulary).grammar
    assert lark is not None
    for text in ("", "It is sunny.", "€ < 5 [TOOL\n", write(format_, GOOD), write(format_, ("now", '{"free": [1]}'))):
        assert vocabulary.takes(lark, text), text
    assert not vocabulary.takes(lark, write(format_, ("get", '{"town": "Oslo"}')))
    assert not vocabulary.takes(lark, write(format_, ("got", "{}")))
    if format_.style != "bare":
        assert vocabulary.takes(lark, f"Let me see.\n{write(format_, GOOD)}")
        assert vocabulary.takes(lark, f"A.{write(format_, GOOD)}B.{write(format_, ('now', '{}'))}")
        assert not vocabulary.takes(lark, f"A.{format_.opener}B.")


@pytest.mark.parametrize("format_", [HERMES, MISTRAL, MISTRAL_NAMES])
def test_auto_not_in_parallel_ends_behind_one_call(format_: ToolFormat) -> None:
    lark = constraint(format_, tools(choice="auto", parallel=False)).grammar
    assert lark is not None
    assert PLAIN.takes(lark, "No call.")
    assert PLAIN.takes(lark, f"One: {write(format_, ('now', '{}'))}")
    assert not PLAIN.takes(lark, f"Two: {write(format_, GOOD, GOOD)}")


def test_auto_with_nothing_to_enforce_has_no_constraint() -> None:
    for asked in (tools(choice="auto"), tools(choice="none"), read_tools(None)):
        assert tool_constraint(HERMES, asked, THINK, thinking=False, control_ids={}) is None


@VOCABULARIES
def test_calls_come_behind_thoughts_where_there_are_some(vocabulary: ByteVocabulary) -> None:
    thought = constraint(HERMES, tools(), vocabulary, THINK)
    assert thought.start_after is None
    assert thought.grammar is not None
    call = write(HERMES, GOOD)
    for text in (call, f"<think>\nHm, <tool {{\n</think>\n\n{call}", f"<think></think>{call}"):
        assert vocabulary.takes(thought.grammar, text), text
    assert not vocabulary.takes(thought.grammar, f"<think>Hm.{call}")
    assert not vocabulary.takes(thought.grammar, f"Hm.</think>{call}")
    begun = constraint(HERMES, tools(), vocabulary, THINK, thinking=True)
    assert begun.start_after == "</think>"
    assert begun.grammar is not None
    assert vocabulary.takes(begun.grammar, f"\n\n{call}")


@VOCABULARIES
@pytest.mark.parametrize("format_", [HERMES, MISTRAL, MISTRAL_NAMES])
def test_under_auto_an_answer_may_be_calls_or_what_is_asked_for(
    format_: ToolFormat, vocabulary: ByteVocabulary
) -> None:
    control_ids = {mark: i for mark, i in vocabulary.control_ids.items() if mark in MARKS}
    wanted = StructuredOutputs(json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    asked = tools(choice="auto")
    lark = calls_or(wanted, format_, asked, None, thinking=False, control_ids=control_ids).grammar
    assert lark is not None
    for text in (write(format_, GOOD), write(format_, ("now", '{"x": 1}'), GOOD), '{"a": 1}'):
        assert vocabulary.takes(lark, text), text
    for text in ("Sure.", '{"b": 1}', f'{{"a": 1}}{write(format_, GOOD)}', "{}"):
        assert not vocabulary.takes(lark, text), text


def test_what_cannot_be_told_apart_from_a_call_is_refused() -> None:
    for wanted, format_ in (
        (StructuredOutputs(json_object=True), LLAMA3_JSON),
        (StructuredOutputs(grammar='start: "x"'), HERMES),
    ):
        with pytest.raises(InvalidParameterError, match="told apart"):
            calls_or(wanted, format_, tools(choice="auto"), None, thinking=False, control_ids={})


@VOCABULARIES
def test_any_constraint_holds_behind_thoughts(vocabulary: ByteVocabulary) -> None:
    control_ids = {mark: i for mark, i in vocabulary.control_ids.items() if mark in MARKS}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"json": schema}, '{"a": 1}', '{"a": "x"}'),
        ({"json": schema, "disable_any_whitespace": True}, '{"a":1}', '{"a": 1}'),
        ({"json": True}, "[1]", "x"),
        ({"json_object": True}, "{}", "[]"),
        ({"regex": r"a/b+\n"}, "a/bb\n", "ab"),
        ({"choice": ["yes", 'n"o']}, 'n"o', "no"),
        ({"choice": ["né", "\U0001f600"]}, "\U0001f600", "né "),
    ]
    for given, right, wrong in cases:
        free = behind_thoughts(StructuredOutputs(**given), THINK, thinking=False, control_ids=control_ids)
        assert free.grammar is not None
        assert free.start_after is None
        for before in ("", "<think>\nHm. {</think>\n\n"):
            assert vocabulary.takes(free.grammar, before + right), given
            assert not vocabulary.takes(free.grammar, before + wrong), given
        begun = behind_thoughts(StructuredOutputs(**given), THINK, thinking=True, control_ids=control_ids)
        assert begun.grammar is not None
        assert begun.start_after == "</think>"
        assert vocabulary.takes(begun.grammar, f"\n\n{right}"), given
        assert not vocabulary.takes(begun.grammar, wrong), given


@pytest.mark.parametrize(
    ("regex", "texts"),
    [
        (r"\d{2}/\d{2}", ["12/34", "12\\/34", "1/2"]),
        (r"\d{2}\/\d{2}", ["12/34", "12\\/34", "12"]),
        (r"a\\/b", ["a\\/b", "a/b", "a\\b"]),
        (r"a\\\/b", ["a\\/b", "a/b", "a\\\\/b"]),
        (r"[/\/]+", ["//", "\\", ""]),
        ("a\nb", ["a\nb", "ab", "a\\nb"]),
        ("a\\\nb", ["a\nb", "ab", "a\\nb", "a\\\nb"]),
        ("a\\\\\nb", ["a\nb", "a\\\nb", "a\\nb"]),
        ("\r\t\\\t", ["\r\t\t", "\r\t", "rtt"]),
        (r"a/i", ["a/i", "A", "a"]),
        ("/*a*/", ["/a", "//", ""]),
    ],
)
def test_a_regex_behind_thoughts_takes_the_texts_it_takes_alone(regex: str, texts: list[str]) -> None:
    alone = LLMatcher.grammar_from_regex(regex)
    behind = behind_thoughts(StructuredOutputs(regex=regex), THINK, thinking=False, control_ids={}).grammar
    assert behind is not None
    found = [PLAIN.takes(behind, text) for text in texts]
    assert found == [PLAIN.takes(alone, text) for text in texts]
    assert any(found)
    assert not all(found)


def test_a_grammar_of_ones_own_is_only_moved_behind_thoughts_that_are_open() -> None:
    own = StructuredOutputs(grammar='start: "x"')
    assert behind_thoughts(own, THINK, thinking=False, control_ids={}) == own
    moved = behind_thoughts(own, THINK, thinking=True, control_ids={})
    assert (moved.grammar, moved.start_after) == (own.grammar, "</think>")


def test_mistral_ids_may_be_written() -> None:
    lark = constraint(MISTRAL_IDS, tools(), CONTROL, THINK_MISTRAL).grammar
    assert lark is not None
    assert CONTROL.takes(lark, "[TOOL_CALLS]now[CALL_ID]abcdef123[ARGS]{}")
    assert not CONTROL.takes(lark, "[TOOL_CALLS]now[CALL_ID]short[ARGS]{}")


def test_the_schema_of_arguments_is_that_of_an_object_without_others() -> None:
    def schema(parameters: Any) -> dict[str, Any]:
        (tool,) = read_tools([{"function": {"name": "f", "parameters": parameters}}], "required").callable
        return arguments_schema(tool)

    assert schema(None) == {"type": "object", "properties": {}, "additionalProperties": False}
    assert schema({}) == {"type": "object"}
    assert schema(CITY) == {**CITY, "additionalProperties": False}
    open_ = {**CITY, "additionalProperties": True}
    assert schema(open_) == open_
    either = {"properties": {"a": {}}, "anyOf": [{"required": ["a"]}]}
    assert schema(either) == {"type": "object", **either}


def test_words_about_a_schema_are_not_part_of_its_grammar() -> None:
    told = {"type": "object", "title": "T", "properties": {"title": {"type": "string", "description": "D"}}}
    (tool,) = tools({"name": "f", "parameters": told}).callable
    bare = {"type": "object", "properties": {"title": {"type": "string"}}, "additionalProperties": False}
    assert arguments_schema(tool) == bare


def test_what_cannot_be_enforced_is_named_with_its_path() -> None:
    wrong = {"properties": {"a": {"items": {"not": {}}}}}
    with pytest.raises(InvalidParameterError) as refused:
        constraint(HERMES, tools(FUNCTIONS[0], {"name": "f", "parameters": wrong}))
    assert refused.value.field == "tools[1].function.parameters.properties.a.items.not"
    with pytest.raises(InvalidParameterError, match="x-guidance"):
        constraint(HERMES, tools({"name": "f", "parameters": {"x-guidance": {}}}))
    unbound = tools({"name": "f", "parameters": wrong}, choice="auto")
    assert tool_constraint(HERMES, unbound, None, thinking=False, control_ids={}) is None


def test_schemas_that_are_too_long_together_are_refused() -> None:
    parameters = {"properties": {f"p{i}": {"type": "string", "description": "d" * 100} for i in range(200)}}
    assert constraint(HERMES, tools(*({"name": f"f{i}", "parameters": parameters} for i in range(6))))
    with pytest.raises(InvalidParameterError, match="tools='20 tools' is not allowed"):
        constraint(HERMES, tools(*({"name": f"f{i}", "parameters": parameters} for i in range(20))))


def test_arguments_have_at_most_one_space_at_a_place() -> None:
    lark = constraint(HERMES, tools({"name": "get", "parameters": CITY})).grammar
    assert lark is not None
    assert PLAIN.takes(lark, write(HERMES, ("get", '{ "city": "Oslo"}')))
    assert not PLAIN.takes(lark, write(HERMES, ("get", '{  "city": "Oslo"}')))


def sample(vocabulary: ByteVocabulary, lark: str, rng: random.Random, longest: int = 900) -> str:
    """What a model that knows nothing writes under the grammar: a random allowed token each time."""
    matcher = vocabulary.matcher(lark)
    ids: list[int] = []
    while not matcher.is_stopped() and len(ids) < longest:
        mask = matcher.compute_logit_bias()
        allowed = [i for i, value in enumerate(mask) if value]
        ends = [i for i in allowed if i == vocabulary.eos_token_id or vocabulary.tokens[i] in (b'"', b"}", b"]")]
        chosen = rng.choice(ends if ends and rng.random() < 0.3 else allowed)
        assert matcher.consume_token(chosen), matcher.get_error()
        if chosen == vocabulary.eos_token_id:
            break
        ids.append(chosen)
    assert matcher.is_accepting()
    return b"".join(vocabulary.tokens[i] for i in ids).decode()


@VOCABULARIES
@pytest.mark.parametrize("format_", FORMATS)
def test_whatever_is_sampled_parses_to_calls_that_keep_to_their_schema(
    format_: ToolFormat, vocabulary: ByteVocabulary
) -> None:
    asked = tools(parallel=False)
    schemas = {tool.name: arguments_schema(tool) for tool in asked.callable}
    lark = constraint(format_, asked, vocabulary).grammar
    assert lark is not None
    seen = set()
    for seed in range(12):
        heard = parse(list(sample(vocabulary, lark, random.Random(seed))), format_, names=asked.names)
        assert heard.content == ""
        ((name, arguments),) = heard.calls
        jsonschema.validate(json.loads(arguments), schemas[name])
        seen.add(name)
    assert len(seen) > 1
