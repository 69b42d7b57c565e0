"""What a terminal is shown and a pipe is not."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TextIO


def is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def has_colour(stream: TextIO) -> bool:
    """https://no-color.org: any non-empty NO_COLOR switches colour off."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def dim(text: str, stream: TextIO) -> str:
    return f"\x1b[2m{text}\x1b[0m" if has_colour(stream) else text


def warn(message: str) -> None:
    print(f"octavo: {message}", file=sys.stderr)


def size(count: int) -> str:
    """Bytes as a person reads them: 98.4 MB (decimal, as file managers and hubs show)."""
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns, two spaces apart: read by people and by awk alike."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


_CONTROL = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def show(text: str) -> None:
    """Writes a piece of an answer. A terminal gets no control characters from it: they could rewrite the screen."""
    sys.stdout.write(text.translate(_CONTROL) if is_terminal(sys.stdout) else text)
    sys.stdout.flush()
