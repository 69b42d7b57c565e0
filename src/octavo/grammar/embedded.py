"""JSON schemas inside a Lark grammar, as llguidance's `%json {…}` has them: checked like any other schema."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from octavo import limits
from octavo.errors import InvalidParameterError
from octavo.grammar.expansion import lark_pieces
from octavo.grammar.json_schema import checked_schema

# Where JSON may have white space.
SPACES = rf"[\x20\x0A\x0D\x09]{{1,{limits.MAX_JSON_SPACES}}}"
_BEGINS = re.compile(r"%json\s*(?=\{)")
_OPTIONS = "x-guidance"  # llguidance's own, which no schema has
_PATTERNS = (SPACES, r"\x20")


def lark_choice(texts: Sequence[str]) -> str:
    """One of the texts, as an expression of Lark, whose strings are JSON's."""
    return " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def bounded_schemas(field: str, lark: str) -> tuple[str, str]:
    """The grammar with nothing where its schemas were, as what they force has bounds of its own; and as it compiles.

    The latter has the schemas as checked_schema gives them, and white space in their values is bounded. Raises
    InvalidParameterError with the path of what cannot be enforced.
    """
    without, bounded = [], []
    at = begin = 0
    while True:
        begin = next((found.start() for found in lark_pieces(field, lark, begin) if found[0] == "%json"), len(lark))
        without.append(lark[at:begin])
        bounded.append(lark[at:begin])
        if begin == len(lark):
            return "".join(without), "".join(bounded)
        found = _BEGINS.match(lark, begin)
        try:
            schema, at = json.JSONDecoder().raw_decode(lark, found.end() if found else begin)
        except (ValueError, RecursionError):
            raise InvalidParameterError(field, lark[begin : begin + 50], "%json before a schema") from None
        options = _options(field, schema.pop(_OPTIONS, {}))
        try:
            checked = checked_schema(json.dumps(schema))
        except InvalidParameterError as error:
            place = error.field.removeprefix("structured.json")
            raise InvalidParameterError(field + place, error.value, error.allowed) from None
        bounded.append(f"%json {json.dumps({**checked, _OPTIONS: options})}")
        begin = at


def _options(field: str, options: Any) -> dict[str, Any]:
    """`whitespace_flexible`, or one of the two patterns that this package uses: another might be anything."""
    flexible = {"{}": True, '{"whitespace_flexible": true}': True, '{"whitespace_flexible": false}': False}
    found = flexible.get(json.dumps(options))
    if found is False:
        return {"whitespace_flexible": False}
    pattern: Any = SPACES if found else None
    if isinstance(options, dict) and set(options) == {"whitespace_pattern"}:
        pattern = options["whitespace_pattern"]
    if pattern not in _PATTERNS:
        raise InvalidParameterError(f"{field}: {_OPTIONS}", options, "whitespace_flexible: true or false")
    return {"whitespace_pattern": pattern}
