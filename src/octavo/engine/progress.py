"""The progress bar of LLM.generate: on standard error, only on a terminal."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class Progress:
    """Counts finished prompts and output tokens; shows nothing unless `enabled` and standard error is a terminal."""

    def __init__(self, total: int, *, enabled: bool) -> None:
        self._bar: Any = None
        if enabled and sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            self._bar = progress.Progress(
                progress.TextColumn("Prompts"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeElapsedColumn(),
                progress.TextColumn("{task.fields[rate]}"),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task("prompts", total=total, rate="")

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def shown(self) -> bool:
        return self._bar is not None

    @property
    def interval(self) -> float | None:
        """Seconds between two looks at the tokens that make a lively bar; None: no need to look."""
        return 0.25 if self.shown else None

    def tokens(self, so_far: int) -> None:
        """Output tokens of all prompts."""
        if self._bar is not None:
            elapsed = self._bar.tasks[0].elapsed or 0.0
            if elapsed > 0:
                self._bar.update(self._task, rate=f"{so_far / elapsed:.0f} tokens/s")

    def finished(self, prompts: int = 1) -> None:
        if self._bar is not None:
            self._bar.advance(self._task, prompts)
