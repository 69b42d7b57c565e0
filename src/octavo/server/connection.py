"""One connection: uvicorn's HTTP/1.1 protocol with bounds on sizes and times, checked before more is parsed.

End of input from the client is taken as its leaving, also when only its sending side is closed: the two cannot be told
apart until an answer is written, and what nobody waits for must not run. What a client sends before it has its answer
is held back and parsed afterwards: nothing of it may end, delay or get into the answer that is under way.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from octavo import limits
from octavo.server.errors import ApiError, json_bytes, openai_body
from octavo.server.exchange import Message, Receive, Send
from octavo.server.state import Scope

_REASONS = {
    400: b"Bad Request",
    408: b"Request Timeout",
    414: b"URI Too Long",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


_UPGRADE = re.compile(rb"\nupgrade:", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """Seconds; body_bytes: the longest body that a route takes."""

    header_seconds: float
    body_seconds: float
    slow_client_seconds: float
    body_bytes: int
    connections: int


class _RefusedError(Exception):
    """Ends the parsing; what is answered is in `_refusal`."""


class Connection(HttpToolsProtocol):
    def __init__(self, bounds: ConnectionBounds, cut_off: Callable[[], None], **given: Any) -> None:
        super().__init__(**given)
        self._bounds = bounds
        self._cut_off = cut_off  # told when a slow reader is
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None  # the last request that was handed to the application
        self._held = bytearray()  # what came behind it
        self._in_head = False
        self._head_bytes = 0  # of a head that is not complete yet; not what came with the end of another request
        self._saw_end = False  # of a request, in what was last read
        self._body_bytes = 0
        self._refusal: ApiError | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=limits.MAX_WRITE_BUFFER_BYTES)
        if len(self.connections) > self._bounds.connections:
            self._refuse(ApiError(503, "too many connections"))
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_reading_timer()
        self._stop_writing_timer()
        self._end_requests()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        self._end_requests()  # now: the connection itself lives on until its last answer is written out

    def _end_requests(self) -> None:
        """Nobody waits for them any more."""
        waiting = [cycle for cycle, _ in self.pipeline]
        for cycle in waiting if self._running is None else [self._running, *waiting]:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        self._held.clear()

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        if self._answering and not self._running_in_body:
            self._hold(data)
            return
        if not self._in_head and not self._in_body and not data.strip(b"\r\n"):
            return  # old clients send empty lines behind a body
        if self._reading is None and not self._in_body:
            self._await_head()
        self._saw_end = False
        super().data_received(data if self._in_body else _without_upgrade(data))
        if self.pipeline:
            self.flow.resume_reading()  # to see the client leave
        if self._in_head and not self._saw_end and self._refusal is None:
            self._head_bytes += len(data)
            if self._head_bytes > limits.MAX_HEADER_BYTES + limits.MAX_URL_BYTES:
                self._refuse(ApiError(431, "the header is too long"))

    def _hold(self, data: bytes) -> None:
        self._held += data
        if len(self._held) > limits.MAX_PIPELINED_BYTES:
            self._refuse(ApiError(400, "too much was sent before the first request was answered"))

    # Requests

    @property
    def _answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    @property
    def _running_in_body(self) -> bool:
        return self._running is self.cycle and self._in_body

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if cycle.more_body:
            self._start_reading_timer(self._bounds.body_seconds)
        super()._start_asgi_task(cycle, partial(_answer, cycle, app))

    def on_response_complete(self) -> None:
        super().on_response_complete()  # may start the next request
        if self.transport.is_closing():
            return
        if self._refusal is not None and not self._answering:
            self._tell_refusal()
            return
        if self._in_head and not self._answering:
            self._await_head()
        held, self._held = bytes(self._held), bytearray()
        if held:
            self.data_received(held)

    # Timers

    @property
    def _in_body(self) -> bool:
        return self.cycle is not None and self.cycle.more_body

    def _await_head(self) -> None:
        self._start_reading_timer(self._bounds.header_seconds)

    def _start_reading_timer(self, seconds: float) -> None:
        self._stop_reading_timer()
        self._reading = self.loop.call_later(seconds, self._too_slow)

    def _stop_reading_timer(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _too_slow(self) -> None:
        self._reading = None
        if self._in_head or self._in_body:
            self._refuse(ApiError(408, "the request did not arrive in time"))
        else:  # it has said nothing at all
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._writing is None:
            self._writing = self.loop.call_later(self._bounds.slow_client_seconds, self._abort_slow_reader)

    def resume_writing(self) -> None:
        self._stop_writing_timer()
        super().resume_writing()

    def _stop_writing_timer(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _abort_slow_reader(self) -> None:
        self._writing = None
        self._cut_off()
        self.transport.abort()

    # What the parser says

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > limits.MAX_URL_BYTES:
            self._stop_parsing(ApiError(414, "the URL is too long"))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > limits.MAX_HEADERS:
            self._stop_parsing(ApiError(431, f"there are more than {limits.MAX_HEADERS} headers"))

    def on_headers_complete(self) -> None:
        if sum(len(name) + len(value) for name, value in self.headers) > limits.MAX_HEADER_BYTES:
            self._stop_parsing(ApiError(431, f"the headers are longer than {limits.MAX_HEADER_BYTES} bytes"))
        if sum(name == b"host" for name, _ in self.headers) > 1:
            self._stop_parsing(ApiError(400, "there is more than one header host"))
        if len(self.pipeline) >= limits.MAX_PIPELINED_REQUESTS:
            self._stop_parsing(ApiError(400, "too many requests were sent before the first was answered"))
        self._in_head = False
        self._stop_reading_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if (
            self._body_bytes > self._bounds.body_bytes + limits.MAX_DISCARDED_BYTES
        ):  # it was answered long ago, and goes on
            self.transport.abort()
            return
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._saw_end = True
        self._stop_reading_timer()
        super().on_message_complete()
        self.cycle.more_body = False  # also of one that was answered before it was complete

    # Refusals

    def _stop_parsing(self, error: ApiError) -> None:
        self._refusal = error
        raise _RefusedError

    def send_400_response(self, msg: str) -> None:
        """Called when parsing failed, also by `_stop_parsing`."""
        self._refuse(self._refusal or ApiError(400, "this is not a valid HTTP request"))

    def _refuse(self, error: ApiError) -> None:
        """Answers what is no request, in its turn, and ends the connection."""
        self._refusal = error
        self._held.clear()
        self._stop_reading_timer()
        if self._answering and not self._running_in_body:
            if self._in_body:
                self.pipeline.popleft()  # the newest one, which is not complete
            return  # on_response_complete goes on
        if self._in_body and self.cycle.response_complete:
            self.transport.close()
        elif self._in_body and self.cycle.response_started:  # more text would be read as part of the answer
            self.transport.abort()
        else:
            self._end_requests()  # what they would still answer has no place any more
            self._tell_refusal()

    def _tell_refusal(self) -> None:
        assert self._refusal is not None
        body = json_bytes(openai_body(self._refusal))
        status = self._refusal.status
        self.transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (status, _REASONS[status], len(body), body)
        )
        self.transport.close()


def _without_upgrade(data: bytes) -> bytes:
    """The same number of bytes, in whose head no upgrade is asked for.

    Some clients offer HTTP/2 so with every request (Java's do), and the parser takes what follows such a head for
    another protocol, not for the body. A server may always go on as if nothing had been offered.
    """
    head, end, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"\nignored:", head) + end + rest


async def _answer(cycle: RequestResponseCycle, app: Any, scope: Scope, receive: Receive, send: Send) -> None:
    try:
        await app(scope, receive, _close_delimited(cycle) if scope["http_version"] in ("0.9", "1.0") else send)
    except asyncio.CancelledError:  # the server ends, and has waited for this one as long as it does
        cycle.disconnected = True
        cycle.transport.abort()


def _close_delimited(cycle: RequestResponseCycle) -> Send:
    """Clients before HTTP/1.1 know no chunks: what has no content-length ends with the connection."""
    cycle.chunked_encoding = cycle.keep_alive = False

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))  # else it must match a header
        await cycle.send(cast(Any, message))

    return send


def connection_class(bounds: ConnectionBounds, cut_off: Callable[[], None]) -> type[asyncio.Protocol]:
    """What uvicorn calls for each connection."""
    made: Callable[..., Connection] = partial(Connection, bounds, cut_off)
    return cast("type[asyncio.Protocol]", made)
