"""Prepares requests that have a grammar on threads of their own, so that no step waits for a compiler."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue

from octavo.engine.request import Request
from octavo.limits import GRAMMAR_THREADS

Prepared = tuple[int, "Request | Exception"]


class Preparing:
    """Used from one thread, which waits on `fileno` for what is ready."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(GRAMMAR_THREADS, thread_name_prefix="octavo-grammar")
        self._ready: SimpleQueue[Prepared] = SimpleQueue()
        self._numbers: set[int] = set()
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)

    def fileno(self) -> int:
        """Readable when something is ready."""
        return self._read_end

    def __len__(self) -> int:
        return len(self._numbers)

    def start(self, number: int, prepare: Callable[[], Request]) -> None:
        self._numbers.add(number)
        self._threads.submit(self._prepare, number, prepare)

    def _prepare(self, number: int, prepare: Callable[[], Request]) -> None:
        try:
            prepared: Request | Exception = prepare()
        except Exception as error:
            prepared = error
        self._ready.put((number, prepared))
        with suppress(BlockingIOError):  # it is readable already
            os.write(self._write_end, b"1")

    def cancel(self, number: int) -> bool:
        """Whether the request was being prepared; it will not come any more."""
        if number not in self._numbers:
            return False
        self._numbers.discard(number)
        return True

    def ready(self) -> Iterator[Prepared]:
        with suppress(BlockingIOError):
            os.read(self._read_end, 4096)
        while True:
            try:
                number, prepared = self._ready.get_nowait()
            except Empty:
                return
            if number in self._numbers:
                self._numbers.discard(number)
                yield number, prepared
