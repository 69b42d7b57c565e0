"""Runs an Engine on a thread of its own, so that any thread may submit, cancel and ask."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from octavo.engine.core import Engine
from octavo.errors import EngineClosedError

T = TypeVar("T")


class EngineLoop:
    """Steps while there is work; between steps it runs what other threads ask of the engine, in order."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._calls: deque[tuple[Callable[[Engine], Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[Engine], T]) -> T:
        """Runs function(engine) on the engine's thread between two steps, and returns what it returns."""
        if os.getpid() != self._pid:
            raise EngineClosedError("an engine can't be used after fork(): make a new one in the child process")
        future: Future[T] = Future()
        with self._wake:
            if self._closing:
                raise EngineClosedError("the engine is closed")
            self._calls.append((function, future))
            self._wake.notify()
        return future.result()

    def close(self) -> None:
        """Stops after the step at hand; requests still running are ended as aborted."""
        if os.getpid() != self._pid:
            return
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._calls or self._closing or self._engine.has_work()):
                    self._wake.wait()
                calls, self._calls = self._calls, deque()
                closing = self._closing
            for function, future in calls:
                try:
                    future.set_result(function(self._engine))
                except BaseException as error:
                    future.set_exception(error)
            if closing:
                self._engine.cancel_all()
                return
            self._engine.step()
