"""How the server's log looks: plain lines, or a JSON object a line."""

from __future__ import annotations

import logging
import sys
from typing import Any

import msgspec


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "logger": record.name,
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


def set_up_logging(level: str, form: str) -> None:
    """All of it to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Plain("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("octavo").setLevel(level.upper())
