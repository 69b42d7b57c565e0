"""What the states of one run share: backend, sampling defaults, seed, threads for forks, and its end from outside."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from octavo.lang.backends.interface import Backend
from octavo.lang.cancellation import Cancellation
from octavo.limits import MAX_FORK_THREADS


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


class Fork(Protocol):
    def unseen_error(self) -> BaseException | None:
        """Waits for it; what ended it, if nobody has been told."""


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
        self.forks: dict[Fork, None] = {}  # in order, those that have something to do or an error to tell
        self.crew: Crew = crew or (parent.crew if parent is not None else Crew())
        self._owns_crew = crew is None and parent is None

    def close(self) -> None:
        if self._owns_crew:
            self.crew.close()


def derived_seed(seed: int, place: str) -> int:
    """53 bits, which any JSON reader keeps, that depend on nothing else."""
    digest = hashlib.blake2b(f"{seed}:{place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 11
