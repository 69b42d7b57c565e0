"""A progress bar on standard error while a model is fetched, only where someone can see it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Progress:
    """`at(bytes so far)`; what lies beyond the total is shown as the total."""

    def __init__(self, show: Callable[[int], None]) -> None:
        self.at = show


def wanted(progress: bool | None) -> bool:
    """None: only on a terminal."""
    return sys.stderr.isatty() if progress is None else progress


def note(text: str, progress: bool | None) -> None:
    """One line for the person who waits."""
    if wanted(progress):
        print(f"octavo: {text}", file=sys.stderr, flush=True)


@contextmanager
def open_progress(title: str, total: int, progress: bool | None) -> Iterator[Progress]:
    if not wanted(progress):
        yield Progress(lambda _: None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(title, total=total)
        yield Progress(lambda done: bars.update(task, completed=min(done, total)))
