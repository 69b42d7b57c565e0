"""Typed, bounded look-ups in a model's configuration, the same for config.json and GGUF metadata."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from octavo.errors import ModelFileError, UnsupportedModelError


class Fields:
    """`values` with typed getters. A missing or null key gives `default`; without a default it is an error."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self.prefix = prefix

    def get(self, key: str) -> Any:
        return self.values.get(self.prefix + key)

    def damaged(self, key: str, allowed: str) -> ModelFileError:
        return ModelFileError(self.path, f"{self.prefix}{key}={shown(self.get(key))} is not allowed: {allowed}")

    def unsupported(self, key: str, why: str = "") -> UnsupportedModelError:
        reason = f": {why}" if why else ""
        return UnsupportedModelError(f"{self.path}: {self.prefix}{key}={shown(self.get(key))} is not supported{reason}")

    def missing(self, key: str) -> NoReturn:
        raise ModelFileError(self.path, f"has no {self.prefix}{key}")

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self.get(key)
        if value is None:
            return self.missing(key) if default is None else default
        if type(value) is not int or not low <= value <= high:
            raise self.damaged(key, f"an integer from {low} to {high}")
        return value

    def real(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number with low < value <= high."""
        value = self.get(key)
        if value is None:
            return self.missing(key) if default is None else default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low < value <= high:
            raise self.damaged(key, f"a number above {low:g}, at most {high:g}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.damaged(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.get(key)
        if value is None:
            return self.missing(key) if default is None else default
        if not isinstance(value, str):
            raise self.damaged(key, "a string")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        value = self.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.damaged(key, "an object")
        return value


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
_SHORT.maxlevel = 2


def shown(value: object) -> str:
    """The value for a message: short, and never spelled out whole first (a file may hold millions of strings)."""
    text = _SHORT.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def is_neutral(value: object, *neutral: object) -> bool:
    """Whether a key with this value changes nothing: null, false, empty, or one of `neutral` (numbers by value)."""
    if value is None or value is False or (isinstance(value, (str, list, dict)) and not value):
        return True
    if isinstance(value, bool):
        return value in [item for item in neutral if isinstance(item, bool)]
    if isinstance(value, (int, float)):
        return math.isfinite(value) and any(
            value == item for item in neutral if isinstance(item, (int, float)) and not isinstance(item, bool)
        )
    return isinstance(value, str) and value in [item for item in neutral if isinstance(item, str)]
