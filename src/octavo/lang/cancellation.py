"""How a program is ended from outside."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

from octavo.errors import ProgramCancelledError


class Cancellation:
    """Tells what runs that it should end. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[int, Callable[[], None]] = {}
        self.cancelled = False

    def cancel(self) -> None:
        with self._lock:
            self.cancelled = True
            calls = list(self._calls.values())
        for call in calls:
            call()

    def check(self) -> None:
        if self.cancelled:
            raise ProgramCancelledError("the program was ended while it ran")

    @contextmanager
    def calls(self, function: Callable[[], None]) -> Generator[None, None, None]:
        """Within, a cancellation calls `function`, on any thread; at once if there was one."""
        key = id(function)
        with self._lock:
            self._calls[key] = function
            cancelled = self.cancelled
        try:
            if cancelled:
                function()
            yield
        finally:
            with self._lock:
                del self._calls[key]
