"""JSON from files that are not trusted: bounded in size; no duplicate keys, NaN, endless integers, lone surrogates."""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

from octavo import limits
from octavo.errors import ModelFileError


def read_bytes(path: Path, most: int = limits.MAX_JSON_BYTES) -> bytes:
    """The whole regular file, refused when it has more than `most` bytes."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise ModelFileError(path, "is not a regular file")
            if info.st_size > most:
                raise ModelFileError(path, f"has {info.st_size} bytes, at most {most} are allowed")
            return file.read(info.st_size)  # read(most) would allocate `most` bytes first
    except (OSError, ValueError) as error:
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(path, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None


def parse_object(path: Path, raw: bytes, what: str = "") -> dict[str, Any]:
    """`raw` must be one JSON object. `what` names the part of the file in messages, e.g. "the header"."""
    subject = f"{what} " if what else ""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    raise ModelFileError(path, f"{subject}has the key {key!r:.80} twice")
                seen.add(key)
        return result

    def integer(text: str) -> int:
        if len(text) > 20:
            raise ModelFileError(path, f"{subject}has an integer of {len(text)} digits")
        return int(text)

    def real(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise ModelFileError(path, f"{subject}has the number {text[:40]}, which is not finite")
        return value

    def constant(text: str) -> NoReturn:
        raise ModelFileError(path, f"{subject}has the value {text}, which is not JSON")

    try:
        value = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=unique,
            parse_int=integer,
            parse_float=real,
            parse_constant=constant,
        )
    except UnicodeDecodeError:
        raise ModelFileError(path, f"{subject}is not valid UTF-8") from None
    except RecursionError:
        raise ModelFileError(path, f"{subject}is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ModelFileError(path, f"{subject}is not valid JSON: {error.msg} at character {error.pos}") from None
    if not isinstance(value, dict):
        raise ModelFileError(path, f"{subject}is not a JSON object")
    if b"\\ud" in raw or b"\\uD" in raw:
        # Half a surrogate pair is no text: it would fail wherever a string is encoded, far from here.
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise ModelFileError(path, f"{subject}has a string that is not valid Unicode") from None
    return value


def read_object(path: Path, most: int = limits.MAX_CONFIG_BYTES) -> dict[str, Any]:
    return parse_object(path, read_bytes(path, most))


def read_object_if_present(path: Path, most: int = limits.MAX_CONFIG_BYTES) -> dict[str, Any]:
    """{} when there is no such file."""
    return read_object(path, most) if path.exists() else {}
