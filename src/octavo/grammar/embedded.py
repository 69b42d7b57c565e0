"""JSON schemas inside a Lark grammar, as llguidance's `%json {…}` has them: checked like any other schema."""

from __future__ import annotations

import json
import re

from octavo.errors import InvalidParameterError
from octavo.grammar.json_schema import checked_schema

_BEGINS = re.compile(r"%json\s*(?=\{)")
_OPTIONS = "x-guidance"  # llguidance's own, which no schema has


def without_schemas(field: str, lark: str) -> str:
    """The grammar with nothing where its schemas were: what they force has bounds of its own.

    Raises InvalidParameterError with the path of what cannot be enforced. What is no JSON is left to the compiler.
    """
    pieces, at = [], 0
    decoder = json.JSONDecoder()
    for found in _BEGINS.finditer(lark):
        if found.start() < at:
            continue
        try:
            schema, end = decoder.raw_decode(lark, found.end())
        except (ValueError, RecursionError):
            continue
        schema.pop(_OPTIONS, None)
        try:
            checked_schema(json.dumps(schema))
        except InvalidParameterError as error:
            place = error.field.removeprefix("structured.json")
            raise InvalidParameterError(field + place, error.value, error.allowed) from None
        pieces.append(lark[at : found.start()])
        at = end
    return "".join([*pieces, lark[at:]])
