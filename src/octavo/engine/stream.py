"""A request as its reader sees it: lists of tokens as they come, then the end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from octavo.engine.ipc import Done, Started, Token
from octavo.errors import OctavoError, SlowReaderError
from octavo.limits import MAX_STREAM_TOKENS

_LOOKS = 5  # at a reader that is behind, before it is cut off
_LOOK_SECONDS = 0.05
PAUSE: list[Token] = []  # yielded about every keep-alive interval while the request cannot run


class RequestStream:
    """Iterate it: each item is all that one step brought, a list of Tokens; an empty one (PAUSE) says "still here".

    After the last item `done` is set; a failure is raised instead, once what came before it has been read. For one
    reader, on the event loop of the client. Whoever stops reading early must call `cancel`.
    """

    __slots__ = (
        *("request_id", "done", "started", "timers"),
        *("_behind", "_error", "_items", "_loop", "_on_cancel", "_open", "_unread", "_waiter"),
    )

    def __init__(self, request_id: str, loop: asyncio.AbstractEventLoop, on_cancel: Callable[[], None]) -> None:
        self.request_id = request_id
        self.done: Done | None = None
        self.started: Started | None = None  # with the first token: cached prompt tokens, when it was scheduled
        self.timers: list[asyncio.TimerHandle] = []  # the client's
        self._loop = loop
        self._on_cancel = on_cancel
        self._items: deque[list[Token]] = deque()
        self._unread = 0  # tokens
        self._behind: asyncio.TimerHandle | None = None  # the next look at it
        self._waiter: asyncio.Future[None] | None = None
        self._open = True
        self._error: OctavoError | None = None

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> list[Token]:
        while not self._items:
            if not self._open:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        tokens = self._items.popleft()
        self._unread -= len(tokens)
        return tokens

    def cancel(self, error: OctavoError | None = None) -> None:
        """Ends the request at once; its blocks are free within a step. Its reader, if any, gets `error` or the end."""
        if self._open:
            self._items.clear()
            self._unread = 0
            on_cancel = self._on_cancel
            self.end(error)
            on_cancel()

    # For the client

    @property
    def open(self) -> bool:
        return self._open

    def push(self, tokens: list[Token]) -> None:
        """A reader that stays too far behind is cut off, and its request with it."""
        self._unread += len(tokens)
        self._items.append(tokens)
        self._wake()
        if self._unread > MAX_STREAM_TOKENS and self._behind is None:
            self._behind = self._loop.call_later(_LOOK_SECONDS, self._look, _LOOKS - 1)

    def _look(self, more: int) -> None:
        """After a stall of this process, tokens come before their reader can run: only turns of the loop since then
        count. Meanwhile no more comes than the engine makes and the socket holds."""
        self._behind = None
        if not self._open or self._unread <= MAX_STREAM_TOKENS:
            return
        if more:
            self._behind = self._loop.call_later(_LOOK_SECONDS, self._look, more - 1)
        else:
            self.cancel(SlowReaderError(f"more than {MAX_STREAM_TOKENS} tokens were waiting to be read"))

    def pause(self) -> None:
        if self._open and not self._items:
            self.push(PAUSE)

    def end(self, outcome: Done | OctavoError | None) -> None:
        if isinstance(outcome, Done):
            self.done = outcome
        else:
            self._error = outcome
        self._open = False
        self._on_cancel = _nothing  # which holds what the client knew of the request
        if self._behind is not None:
            self._behind.cancel()
            self._behind = None
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _nothing() -> None:
    pass
