"""gen(dtype=…): the constraint that makes the model write such a value, and the value of what it wrote.

Behind a number the model may write one more character, whatever it likes: without it a number in a sentence could only
end by the end of the whole text, which a model hardly ever chooses. That character is not kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from octavo.errors import RequestFailedError
from octavo.params import StructuredOutputs

DTYPES: tuple[type, ...] = (int, float, bool, str)

_NUMBER = {int: r"[-+]?[0-9]{1,18}", float: r"[-+]?[0-9]{1,18}(\.[0-9]{1,18})?"}
_REGEX = {
    int: rf" ?{_NUMBER[int]}[^0-9]?",
    float: rf" ?{_NUMBER[float]}[^0-9]?",
    bool: r" ?(True|False)",
    str: r' ?"([^"\\\x00-\x1f]|\\["\\/bfnrt])*"',
}
_SHOWN = {
    int: re.compile(f" ?{_NUMBER[int]}"),
    float: re.compile(f" ?{_NUMBER[float]}"),
    bool: re.compile(" ?(True|False)"),
    str: re.compile(r' ?"(?:[^"\\]|\\.)*"'),
}
_READ: dict[type, Callable[[str], Any]] = {int: int, float: float, bool: lambda text: text == "True", str: json.loads}


def constraint(
    regex: str | None, json_schema: dict[str, Any] | str | None, dtype: type | None, structured: Any
) -> StructuredOutputs | None:
    """The one that is given. Raises InvalidParameterError."""
    if dtype is not None:
        return StructuredOutputs(regex=_REGEX[dtype])
    if regex is not None:
        return StructuredOutputs(regex=regex)
    if json_schema is not None:
        return StructuredOutputs(json=json_schema)
    return StructuredOutputs.of(structured)


def value_of(dtype: type, text: str) -> tuple[Any, str]:
    """The value, and the part of the text that says it. Raises RequestFailedError when the text ended too early."""
    found = _SHOWN[dtype].match(text)
    if found is None:
        shown = text if len(text) <= 60 else text[:60] + "…"
        raise RequestFailedError(f"{shown!r} is no {dtype.__name__}: the output ended too early; raise max_tokens")
    return _READ[dtype](found[0].strip()), found[0]
