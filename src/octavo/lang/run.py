"""What the states of one run share: backend, sampling defaults, seed, threads for forks, and its end from outside."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from octavo.errors import ProgramCancelledError
from octavo.limits import MAX_FORK_THREADS

if TYPE_CHECKING:
    from octavo.lang.backends.interface import Backend
    from octavo.lang.state import ProgramState

# The state whose program runs in this context: what a program called inside of another one belongs to.
current_state: ContextVar[ProgramState | None] = ContextVar("current_state", default=None)


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


class Crew:
    """Bounded threads for forks, made when they are first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, work: Callable[[], None]) -> None:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(MAX_FORK_THREADS, thread_name_prefix="octavo-fork")
            self._pool.submit(work)

    def close(self) -> None:
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()


class Run:
    """seed: every gen's own is derived from it and from its place in the program, so that a run can be had again
    whatever runs beside it. streams: its states tell their text as it comes."""

    def __init__(
        self,
        backend: Backend,
        defaults: Mapping[str, Any],
        seed: int,
        *,
        streams: bool = False,
        crew: Crew | None = None,
        parent: Run | None = None,
    ) -> None:
        self.backend = backend
        self.defaults = dict(defaults)
        self.seed = seed
        self.streams = streams
        self.cancellation = Cancellation()
        self.forks: dict[ProgramState, None] = {}  # in order, those that have something to do or an error to tell
        self.crew: Crew = crew or (parent.crew if parent is not None else Crew())
        self._owns_crew = crew is None and parent is None

    def close(self) -> None:
        if self._owns_crew:
            self.crew.close()


def derived_seed(seed: int, place: str) -> int:
    """53 bits, which any JSON reader keeps, that depend on nothing else."""
    digest = hashlib.blake2b(f"{seed}:{place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 11
