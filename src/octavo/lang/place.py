"""Where in the user's program something was written, so that an error can name it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType, TracebackType


@dataclass(frozen=True, slots=True)
class Place:
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def caller() -> Place:
    """The innermost line under way that is not Octavo's own."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame):
        frame = frame.f_back
    return Place(frame.f_code.co_filename, frame.f_lineno)


def raised_at(trace: TracebackType | None) -> Place | None:
    """The innermost line of a traceback that is not Octavo's own; None when there is none."""
    found = None
    while trace is not None:
        if not _is_ours(trace.tb_frame):
            found = Place(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return found


def _is_ours(frame: FrameType) -> bool:
    """By module, as generated code such as a dataclass's __init__ has no file."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "octavo"
