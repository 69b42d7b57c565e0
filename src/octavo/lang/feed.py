"""A program's text as it comes, for those who read it while it is written."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """name: of the variable it belongs to; None for the program's own text."""

    name: str | None
    text: str


class Feed:
    """Pieces in order, kept for readers that come late. Written by one thread, read by any number."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._pieces: list[Piece] = []
        self._ended = False
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []

    def push(self, name: str | None, text: str) -> None:
        if text:
            with self._news:
                self._pieces.append(Piece(name, text))
                self._tell()

    def end(self, error: BaseException | None = None) -> None:
        with self._news:
            self._ended, self._error = True, error
            self._tell()

    def _tell(self) -> None:
        self._news.notify_all()
        for callback in self._callbacks:
            callback()

    def read(self, name: str | None) -> Generator[Piece, None, None]:
        """All pieces, or those of one variable. Raises at the end what ended the program, if that was an error."""
        seen = 0
        while True:
            with self._news:
                while not self._ended and len(self._pieces) == seen:
                    self._news.wait()
                pieces, ended = self._pieces[seen:], self._ended
            seen += len(pieces)
            for piece in pieces:
                if name is None or piece.name == name:
                    yield piece
            if ended:
                break
        if self._error is not None:
            raise self._error

    async def read_async(self, name: str | None) -> AsyncGenerator[Piece, None]:
        """Like read, without a thread that waits."""
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody reads here any more
                loop.call_soon_threadsafe(changed.set)

        with self._news:
            self._callbacks.append(wake)
        seen = 0
        try:
            while True:
                changed.clear()
                with self._news:
                    pieces, ended = self._pieces[seen:], self._ended
                seen += len(pieces)
                for piece in pieces:
                    if name is None or piece.name == name:
                        yield piece
                if ended:
                    break
                if not pieces:
                    await changed.wait()
        finally:
            with self._news:
                self._callbacks.remove(wake)
        if self._error is not None:
            raise self._error
