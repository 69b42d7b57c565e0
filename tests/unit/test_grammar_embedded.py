"""Schemas inside a grammar are held to the same rules as a schema alone."""

from __future__ import annotations

import json

import pytest

from octavo.chat.formats import HERMES
from octavo.chat.grammar import tool_constraint
from octavo.chat.tools import read_tools
from octavo.errors import InvalidParameterError
from octavo.grammar.embedded import without_schemas
from octavo.grammar.expansion import check_lark


def test_what_cannot_be_enforced_is_refused_with_its_path() -> None:
    for schema, path in (
        ({"properties": {"a": {"not": {}}}}, "structured.grammar: $.properties.a.not"),
        ({"type": "string", "minLength": 1 << 30}, "structured.grammar: $"),
    ):
        with pytest.raises(InvalidParameterError) as refused:
            without_schemas("structured.grammar", f"start: %json {json.dumps(schema)}")
        assert refused.value.field == path


def test_the_rest_of_the_grammar_stays() -> None:
    lark = 'start: "a" %json {"x-guidance": {"whitespace_flexible": false}, "type": "null"} b\nb: %json\n{} "c" %json x'
    assert without_schemas("g", lark) == 'start: "a"  b\nb:  "c" %json x'


def test_the_calls_of_many_tools_are_no_long_pattern() -> None:
    parameters = {"properties": {f"parameter_{i}": {"type": "string"} for i in range(5)}}
    tools = [{"function": {"name": f"function_{i}", "parameters": parameters}} for i in range(128)]
    found = tool_constraint(HERMES, read_tools(tools, "required"), None, thinking=False, control_ids={})
    assert found is not None
    assert found.grammar is not None
    check_lark("g", without_schemas("g", found.grammar))
