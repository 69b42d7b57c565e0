"""Schemas inside a grammar are held to the same rules as a schema alone."""

from __future__ import annotations

import json

import pytest

from octavo.chat.formats import HERMES
from octavo.chat.grammar import tool_constraint
from octavo.chat.tools import read_tools
from octavo.errors import InvalidParameterError
from octavo.grammar.embedded import SPACES, bounded_schemas
from octavo.grammar.expansion import check_lark


def test_what_cannot_be_enforced_is_refused_with_its_path() -> None:
    for schema, path in (
        ({"properties": {"a": {"not": {}}}}, "structured.grammar: $.properties.a.not"),
        ({"type": "string", "minLength": 1 << 30}, "structured.grammar: $"),
    ):
        with pytest.raises(InvalidParameterError) as refused:
            bounded_schemas("structured.grammar", f"start: %json {json.dumps(schema)}")
        assert refused.value.field == path


def test_the_rest_of_the_grammar_stays() -> None:
    lark = (
        'start: "a" %json {"x-guidance": {"whitespace_flexible": false}, "type": "null"} b\nb: %json\n{} "c" // %json x'
    )
    assert bounded_schemas("g", lark)[0] == 'start: "a"  b\nb:  "c" // %json x'


def test_the_calls_of_many_tools_are_no_long_pattern() -> None:
    parameters = {"properties": {f"parameter_{i}": {"type": "string"} for i in range(5)}}
    tools = [{"function": {"name": f"function_{i}", "parameters": parameters}} for i in range(128)]
    found = tool_constraint(HERMES, read_tools(tools, "required"), None, thinking=False, control_ids={})
    assert found is not None
    assert found.grammar is not None
    check_lark("g", bounded_schemas("g", found.grammar)[0])


@pytest.mark.parametrize(
    "options",
    [
        {"whitespace_pattern": ".*"},
        {"whitespace_pattern": "(a{1000}){1000}"},
        {"whitespace_flexible": 1},
        {"coerce_one_of": True},
        {"item_separator": "x", "whitespace_flexible": True},
        5,
        None,
        [],
    ],
)
def test_a_schema_sets_no_white_space_of_its_own(options: object) -> None:
    lark = f"start: %json {json.dumps({'x-guidance': options, 'type': 'null'})}"
    with pytest.raises(InvalidParameterError, match="x-guidance"):
        bounded_schemas("g", lark)


@pytest.mark.parametrize("options", [None, {}, {"whitespace_flexible": True}])
def test_white_space_is_bounded_in_a_grammar_too(options: object) -> None:
    schema = {"type": "null"} if options is None else {"x-guidance": options, "type": "null"}
    _, bounded = bounded_schemas("g", f'start: "a" %json {json.dumps(schema)} "b"')
    written = json.loads(bounded.removeprefix('start: "a" %json ').removesuffix(' "b"'))
    assert written == {"type": "null", "x-guidance": {"whitespace_pattern": SPACES}}
