"""What one rendering of a chat template may cost, in fuel that does not depend on the machine.

A template comes with a model file, so it is someone else's program. Three things keep it small: every block of
statements pays for the syntax nodes in it when it is entered; every operation pays for the size of its operands before
it runs; and one that could blow a small operand up (repetition, padding, replacing) pays for its result too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from octavo.limits import MAX_TEMPLATE_OUTPUT_CHARS, MAX_TEMPLATE_STEPS

# Jinja's context maps names to values; no template can spell this one.
METER_KEY = "octavo meter"

_CHARS_A_STEP = 128  # what string code gets through in the time of one interpreted step
_MAX_INTEGER_BITS = 4096
_MAX_FIELD_WIDTH = 1000
_WIDE_FIELD = re.compile(r"\d{4,}|\*")
_CONTAINERS: tuple[Any, ...] = (list, tuple, set, frozenset, type({}.keys()), type({}.values()), type({}.items()))


class TemplateLimitError(Exception):
    """A chat template asked for more than it may."""


class Meter:
    def __init__(self) -> None:
        self.steps_left = MAX_TEMPLATE_STEPS
        self.chars_left = MAX_TEMPLATE_OUTPUT_CHARS

    def spend(self, steps: int) -> None:
        self.steps_left -= steps
        if self.steps_left < 0:
            raise TemplateLimitError(f"it takes more than {MAX_TEMPLATE_STEPS} steps")

    def write(self, chars: int) -> None:
        self.chars_left -= chars
        if self.chars_left < 0:
            raise TemplateLimitError(f"it writes more than {MAX_TEMPLATE_OUTPUT_CHARS} characters")

    def enter(self, steps: int, chars: int) -> None:
        """A block of statements begins: `steps` syntax nodes, `chars` characters of template text."""
        self.spend(steps)
        self.write(chars)

    def make(self, chars: int) -> None:
        """Room for a string of that length."""
        if chars > MAX_TEMPLATE_OUTPUT_CHARS:
            raise TemplateLimitError(f"it builds a string of more than {MAX_TEMPLATE_OUTPUT_CHARS} characters")
        self.spend(chars // _CHARS_A_STEP)

    def weigh(self, value: Any) -> int:
        """Pays for looking at all of `value`, however often a part occurs in it; about its length when printed."""
        if isinstance(value, str):
            size = len(value)
            if size >= _CHARS_A_STEP:
                self.spend(size // _CHARS_A_STEP)
            return size
        if value is None or isinstance(value, (bool, int, float)):
            return 5 if value is None or isinstance(value, bool) else self._digits(value)
        printed = 0
        stack = [value]
        while stack:
            part = stack.pop()
            if isinstance(part, str):
                self.spend(1 + len(part) // _CHARS_A_STEP)
                printed += len(part) + 4
            elif isinstance(part, _CONTAINERS):
                self.spend(1 + len(part))
                stack.extend(part)
                printed += 2
            elif isinstance(part, Mapping):
                self.spend(1 + 2 * len(part))
                stack.extend(part.keys())
                stack.extend(part.values())
                printed += 2
            elif isinstance(part, range):
                self.spend(1 + len(part))
                printed += 32
            else:
                self.spend(1)
                printed += self._digits(part) if isinstance(part, (int, float)) else 64
        return printed

    def weigh_top(self, value: Any) -> None:
        """Pays for copying `value` without what it refers to."""
        if isinstance(value, str):
            self.spend(len(value) // _CHARS_A_STEP)
        elif isinstance(value, (list, tuple)):
            self.spend(len(value) // 8)

    def classify(self, value: Any) -> None:
        """Pays for looking up what kind of character each one is."""
        if isinstance(value, str):
            self.spend(len(value) // 32)

    def search(self, text: str, needle: str, backwards: bool = False) -> None:
        """Pays for the worst case of finding `needle`: Python's search is linear only for long needles, forwards."""
        reach = len(needle) if backwards else min(len(needle), 100)
        self.spend(len(text) * max(reach, 1) // _CHARS_A_STEP)

    def integer(self, bits: int) -> None:
        if bits > _MAX_INTEGER_BITS:
            raise TemplateLimitError(f"it computes an integer of more than {_MAX_INTEGER_BITS} bits")

    def width(self, spec: str) -> None:
        """Refuses a wide field in a format specification."""
        if _WIDE_FIELD.search(spec):
            raise TemplateLimitError(f"it formats a field wider than {_MAX_FIELD_WIDTH}")

    def percent_format(self, text: str, arguments: Any) -> None:
        """Pays for `text % arguments`."""
        fields = text.count("%")
        self.width(text)
        size = self.weigh(arguments)
        self.make(len(text) + fields * _MAX_FIELD_WIDTH + size * (fields if isinstance(arguments, Mapping) else 1))

    def ticking(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for item in iterator:
            self.spend(1)
            yield item

    def _digits(self, number: int | float) -> int:
        if not isinstance(number, int):
            return 25
        if number.bit_length() > 256:
            self.spend(number.bit_length() // 64)
        return number.bit_length() // 3 + 2
