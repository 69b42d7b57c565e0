"""Reads JSON that arrives piece by piece, and knows at each character whether it can still be JSON."""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import NamedTuple

from octavo.limits import MAX_JSON_DEPTH

WHITESPACE = " \t\n\r"
_PLAIN = re.compile(r'[^"\\]*')
_BLANK = re.compile(r"[ \t\n\r]*")
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
_DIGITS = "0123456789"

# RFC 8259's number as an automaton: in each state, which characters lead where. A number may end in those of _WHOLE.
_NUMBER: dict[str, dict[str, str]] = {
    "start": {"-": "minus", "0": "zero", **dict.fromkeys("123456789", "integer")},
    "minus": {"0": "zero", **dict.fromkeys("123456789", "integer")},
    "zero": {".": "point", "e": "e", "E": "e"},
    "integer": {".": "point", "e": "e", "E": "e", **dict.fromkeys(_DIGITS, "integer")},
    "point": dict.fromkeys(_DIGITS, "fraction"),
    "fraction": {"e": "e", "E": "e", **dict.fromkeys(_DIGITS, "fraction")},
    "e": {"+": "sign", "-": "sign", **dict.fromkeys(_DIGITS, "exponent")},
    "sign": dict.fromkeys(_DIGITS, "exponent"),
    "exponent": dict.fromkeys(_DIGITS, "exponent"),
}
_WHOLE = frozenset({"zero", "integer", "fraction", "exponent"})


class _At(Enum):
    VALUE = auto()
    FIRST_ITEM = auto()  # a value, or the end of an empty array
    FIRST_KEY = auto()  # a key, or the end of an empty object
    KEY = auto()
    COLON = auto()
    NEXT = auto()  # a comma, or the end of the array or object
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    NUMBER = auto()
    LITERAL = auto()
    DONE = auto()
    FAILED = auto()


class _Open(NamedTuple):
    closes: str
    is_object: bool


_OBJECT, _ARRAY = _Open("}", True), _Open("]", False)


class JsonScanner:
    """One JSON value (RFC 8259; inside strings control characters pass too, as models write them).

    `done`: the value is complete. `failed`: no text can make one of it. The result is the same however it is cut.
    """

    __slots__ = ("_at", "_is_key", "_left", "_number", "_open", "_rest")

    def __init__(self) -> None:
        self._at = _At.VALUE
        self._open: list[_Open] = []
        self._is_key = False
        self._left = 0  # hexadecimal digits of an escape
        self._number = ""
        self._rest = ""  # of a literal

    @property
    def done(self) -> bool:
        return self._at is _At.DONE

    @property
    def failed(self) -> bool:
        return self._at is _At.FAILED

    def scan(self, text: str, start: int, end: int) -> int:
        """Reads text[start:end]; returns where it stopped: at `end`, behind the value, or at what cannot be in it."""
        while start < end:
            if self._at is _At.STRING:
                found = _PLAIN.match(text, start, end)
                assert found is not None
                start = found.end()
                if start < end:
                    self._at = _At.ESCAPE if text[start] == "\\" else self._behind_string()
                    start += 1
            elif self._at is _At.DONE or self._at is _At.FAILED:
                break
            elif self._take(text[start]):
                start += 1
        return start

    def _take(self, char: str) -> bool:
        """Whether the character was read; it stays where it is if it only ends a number or cannot be there."""
        at = self._at
        if at is _At.ESCAPE:
            self._left = 4
            self._at = _At.HEX if char == "u" else _At.STRING if char in '"\\/bfnrt' else _At.FAILED
        elif at is _At.HEX:
            self._left -= 1
            self._at = _At.FAILED if char not in "0123456789abcdefABCDEF" else _At.HEX if self._left else _At.STRING
        elif at is _At.NUMBER:
            following = _NUMBER[self._number].get(char)
            if following is None:
                self._at = self._behind_value() if self._number in _WHOLE else _At.FAILED
                return False
            self._number = following
        elif at is _At.LITERAL:
            if char != self._rest[0]:
                self._at = _At.FAILED
                return False
            self._rest = self._rest[1:]
            if not self._rest:
                self._at = self._behind_value()
        elif char not in WHITESPACE:
            self._at = self._structure(at, char)
        return self._at is not _At.FAILED

    def _structure(self, at: _At, char: str) -> _At:
        if at is _At.COLON:
            return _At.VALUE if char == ":" else _At.FAILED
        if at is _At.KEY or at is _At.FIRST_KEY:
            if char == '"':
                self._is_key = True
                return _At.STRING
            return self._close() if at is _At.FIRST_KEY and char == "}" else _At.FAILED
        if at is _At.NEXT:
            innermost = self._open[-1]
            if char == ",":
                return _At.KEY if innermost.is_object else _At.VALUE
            return self._close() if char == innermost.closes else _At.FAILED
        if at is _At.FIRST_ITEM and char == "]":
            return self._close()
        return self._value(char)

    def _value(self, char: str) -> _At:
        if char == '"':
            self._is_key = False
            return _At.STRING
        if char in "{[":
            if len(self._open) == MAX_JSON_DEPTH:
                return _At.FAILED
            self._open.append(_OBJECT if char == "{" else _ARRAY)
            return _At.FIRST_KEY if char == "{" else _At.FIRST_ITEM
        if char in _LITERALS:
            self._rest = _LITERALS[char]
            return _At.LITERAL
        self._number = _NUMBER["start"].get(char, "")
        return _At.NUMBER if self._number else _At.FAILED

    def _close(self) -> _At:
        self._open.pop()
        return self._behind_value()

    def _behind_string(self) -> _At:
        return _At.COLON if self._is_key else self._behind_value()

    def _behind_value(self) -> _At:
        return _At.NEXT if self._open else _At.DONE


def skip_blank(text: str, start: int, end: int) -> int:
    found = _BLANK.match(text, start, end)
    assert found is not None
    return found.end()
