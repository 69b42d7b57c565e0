"""Runs an Engine on a thread of its own, so that any thread may submit, cancel and ask."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from octavo.engine.core import Engine
from octavo.errors import EngineClosedError

log = logging.getLogger("octavo")

T = TypeVar("T")
Call = tuple[Callable[[Engine], Any], "Future[Any]"]


class EngineLoop:
    """Steps while there is work; between steps it runs what other threads ask of the engine, in order.

    It owns the engine: when it ends, by `stop` or by an error of the engine itself, every request that still runs gets
    an EngineClosedError, the executor is closed, and each call raises EngineClosedError. Nothing waits for ever.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # A SimpleQueue may be put to while the garbage collector runs inside another put, on the same thread.
        self._calls: SimpleQueue[Call] = SimpleQueue()
        self._stopping = False
        self._ended: str | None = None  # why no call is run any more
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        _alive.add(self)
        self._thread.start()

    def check_process(self) -> None:
        """Raises EngineClosedError in a forked child: it has none of the engine's threads."""
        if os.getpid() != self._pid:
            raise EngineClosedError("an engine can't be used after fork(): make a new one in the child process")

    def check(self) -> None:
        """Raises EngineClosedError if the engine has ended or belongs to the parent process."""
        self.check_process()
        if self._ended is not None:
            raise EngineClosedError(self._ended)

    def call(self, function: Callable[[Engine], T]) -> T:
        """Runs function(engine) on the engine's thread between two steps, and returns what it returns."""
        self.check()
        if threading.current_thread() is self._thread:
            raise RuntimeError("the engine's own thread can't wait for itself")
        reply: Future[T] = Future()
        self._put((function, reply))
        try:
            return reply.result()
        finally:
            del function, reply  # an error in the reply refers to this frame: no cycle that keeps the caller alive

    def post(self, function: Callable[[Engine], Any]) -> None:
        """Like call, but waits for nothing and never fails: for clean-up, also by the garbage collector on any thread.

        Calls made after it see its effect.
        """
        if os.getpid() == self._pid:
            self._put((function, Future()))

    def stop(self) -> None:
        """Has the engine end after the step at hand; does not wait."""
        self._stopping = True
        self.post(lambda engine: None)  # wakes it

    def close(self) -> None:
        """Stops, and waits for the end (except on the engine's own thread, and in a forked child, which has none)."""
        self.stop()
        if os.getpid() == self._pid and threading.current_thread() is not self._thread:
            self._thread.join()

    def _put(self, call: Call) -> None:
        self._calls.put(call)
        if self._ended is not None:  # perhaps the thread left before it saw this call
            self._refuse_calls()

    def _refuse_calls(self) -> None:
        while True:
            try:
                _, reply = self._calls.get_nowait()
            except Empty:
                return
            reply.set_exception(EngineClosedError(self._ended or ""))

    def _run(self) -> None:
        ended = "the engine is closed"
        try:
            stepped = False
            while not self._stopping:
                if not stepped or not self._calls.empty():
                    self._serve_calls(wait=not self._engine.has_work())
                stepped = self._engine.step()
        except BaseException as error:
            log.critical("the engine stopped", exc_info=True)
            ended = f"the engine stopped after an internal error ({type(error).__name__}: {error}); make a new one"
        self._ended = ended
        self._refuse_calls()
        self._engine.close(EngineClosedError(ended))

    def _serve_calls(self, *, wait: bool) -> None:
        """Runs the calls that are there now; with `wait`, at least one. Keeps nothing of a caller alive."""
        for _ in range(max(self._calls.qsize(), int(wait))):
            function, reply = self._calls.get()
            try:
                reply.set_result(function(self._engine))
            except BaseException as error:
                reply.set_exception(error)


_alive: weakref.WeakSet[EngineLoop] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that is still in native code while the interpreter goes down could crash it."""
    for loop in list(_alive):
        loop.close()
