"""How the server's log looks, of both its processes: plain lines, or a JSON object a line, on standard error."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

_ASKED_FOR = "octavo.requests"  # the logger of a line a request
_MOST_ALIKE = 20  # lines of one template
_ALIKE_SECONDS = 60.0
_MOST_TEMPLATES = 1024


def say(text: str) -> None:
    """Writes a line to standard error. One that can't be written (a full disk, a reader who left) is lost, no more."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode("utf-8", "backslashreplace") + b"\n")  # sys.stderr would keep what it can't write


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            say(self.format(record))
        except Exception:
            self.handleError(record)


class _Json(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = {"process": process} if process else {}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "logger": record.name,
            **self._process,
            "message": record.getMessage(),
            **getattr(record, "octavo", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = getattr(record, "octavo", {})
        shown = "".join(f" {name}={value}" for name, value in facts.items() if value not in (None, "", False))
        return super().format(record) + shown


class FewAlike(logging.Filter):
    """Lets so many lines of one template pass in a minute, and the next one tell how many did not.

    Whoever can reach the port can have lines logged: they must fill no disk.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}  # since when, how many

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == _ASKED_FOR:
            return True
        now = self._clock()
        key = record.name, str(record.msg)
        since, count = self._seen.get(key, (now, 0))
        if now - since > _ALIKE_SECONDS:
            if count > _MOST_ALIKE:
                record.octavo = {**getattr(record, "octavo", {}), "more_not_logged": count - _MOST_ALIKE}
            since, count = now, 0
        if key not in self._seen and len(self._seen) >= _MOST_TEMPLATES:
            self._seen.clear()
        self._seen[key] = since, count + 1
        return count < _MOST_ALIKE


def set_up_logging(level: str, form: str, process: str = "") -> None:
    """`process`: shown in each line."""
    handler = _Lines()
    shown = f"{process}: " if process else ""
    handler.setFormatter(_Json(process) if form == "json" else _Plain(f"%(asctime)s %(levelname)s {shown}%(message)s"))
    handler.addFilter(FewAlike())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("octavo").setLevel(level.upper())


def log_uncaught() -> None:
    """Has what ends this process unforeseen logged as everything else is."""

    def uncaught(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        logging.getLogger("octavo").critical("it ends, which it should not", exc_info=(kind, error, trace))

    sys.excepthook = uncaught
