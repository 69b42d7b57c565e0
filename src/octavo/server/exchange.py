"""One HTTP exchange on bare ASGI: the body within its bounds, the answer, and an end as soon as the client is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from octavo.server.errors import ApiError, api_error, json_bytes, openai_body, tgi_body, tgi_status
from octavo.server.state import RequestRecord, Scope, ServerState

log = logging.getLogger("octavo")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

OPENAI, TGI = "openai", "tgi"
IGNORED_HEADER = "x-octavo-ignored-fields"
_SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class ClientGoneError(Exception):
    """The client closed the connection before it had sent its request."""


class Exchange:
    """`surface`: whose shapes errors have. `headers`: sent with the answer, whatever it is."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, surface: str) -> None:
        self.scope = scope
        self.surface = surface
        self.headers: dict[str, str] = {}
        self.started = False  # the status is sent
        self.streams = False  # as events
        self.record = RequestRecord(scope, scope.get("path", ""))
        self._receive = receive
        self._send = send

    async def body(self, most: int) -> bytes:
        """The whole request body. Raises ApiError for one that is too long or no JSON by its own account."""
        headers = {name: value for name, value in self.scope["headers"]}
        self._check_type(headers)
        too_long = ApiError(413, f"the body is longer than the {most} bytes allowed")
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > most:
            raise too_long
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > most:
                raise too_long
            chunks.append(chunk)
            if not message.get("more_body", False):
                return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    @staticmethod
    def _check_type(headers: dict[bytes, bytes]) -> None:
        """Only what a web page cannot send to another site without asking: a page must not use a local server."""
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind != b"application/json" and not kind.endswith(b"+json") and (kind or b"origin" in headers):
            raise ApiError(415, "the body must be JSON, with the header content-type: application/json")
        if headers.get(b"content-encoding", b"identity").strip().lower() not in (b"", b"identity"):
            raise ApiError(415, "the body must be sent without content-encoding")

    async def disconnected(self) -> None:
        """Returns when the client is gone (or has been answered)."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def start(self, status: int, headers: dict[str, str]) -> None:
        self.started = True
        self.record.status = status
        pairs = [
            (name.encode("latin-1"), value.encode("latin-1", "replace"))
            for name, value in {**self.headers, **headers}.items()
        ]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def start_events(self) -> None:
        self.streams = True
        await self.start(200, _SSE_HEADERS)

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def answer(self, body: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        await self.answer_json(json_bytes(body), status, headers)

    async def answer_json(self, data: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        fixed = {"content-type": "application/json", "content-length": str(len(data))}
        await self.start(status, {**fixed, **(headers or {})})
        await self.finish(data)

    async def fail(self, error: Exception) -> None:
        """Tells the client; in a stream by an event, and then no mark of a regular end follows."""
        told = api_error(error)
        if told.status >= 500 and not isinstance(error, ApiError):
            log.error("%s: %s", self.record.route, error, exc_info=error if told.code == "internal_error" else None)
        self.record.error_code = told.code
        tgi = self.surface == TGI
        body = tgi_body(told) if tgi else openai_body(told)
        if self.streams:
            self.record.status = told.status
            await self.finish(b"data: " + json_bytes(body) + b"\n\n")
        elif not self.started:
            await self.answer(body, tgi_status(told) if tgi else told.status, told.headers)


Handler = Callable[[ServerState, Exchange, bytes], Awaitable[None]]


class Endpoint:
    """A POST route as an ASGI application: reads the body, runs `handler`, and ends it when the client goes away."""

    def __init__(self, state: ServerState, handler: Handler, surface: str) -> None:
        self._state = state
        self._handler = handler
        self.surface = surface

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self.surface)
        record = exchange.record
        try:
            try:
                body = await exchange.body(self._state.max_body_bytes)
                if not await self._until_gone(exchange, self._handler(self._state, exchange, body)):
                    record.disconnected = True
            except ClientGoneError:
                record.disconnected = True
            except Exception as error:
                await exchange.fail(error)
        finally:
            self._state.observe(record)

    @staticmethod
    async def _until_gone(exchange: Exchange, handling: Awaitable[None]) -> bool:
        """Whether the handler came to its end. Its error is raised; that the client is gone cancels it."""
        work = asyncio.ensure_future(handling)
        gone = asyncio.ensure_future(exchange.disconnected())
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return False
            work.result()
            return True
        finally:
            gone.cancel()
            work.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
