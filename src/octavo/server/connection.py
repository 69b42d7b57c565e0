"""One connection: uvicorn's HTTP/1.1 protocol with bounds on sizes and times, checked before more is parsed.

End of input from the client is taken as its leaving, also when only its sending side is closed: the two cannot be told
apart until an answer is written, and what nobody waits for must not run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from octavo import limits
from octavo.server.errors import ApiError, json_bytes, openai_body

_REASONS = {
    400: b"Bad Request",
    408: b"Request Timeout",
    414: b"URI Too Long",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


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
        self._in_head = False
        self._head_bytes = 0  # of a head that is not complete yet
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
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        if self._reading is None and not self._in_body:
            self._await_head()
        super().data_received(data)
        if self._in_head and self._refusal is None:
            self._head_bytes += len(data)
            if self._head_bytes > limits.MAX_HEADER_BYTES + limits.MAX_URL_BYTES:
                self._refuse(ApiError(431, "the header is too long"))

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
        if self._head_bytes or self._in_head or self._in_body:
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
        self._head_bytes = 0
        self._start_reading_timer(self._bounds.body_seconds)
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
        self._stop_reading_timer()
        super().on_message_complete()

    # Refusals

    def _stop_parsing(self, error: ApiError) -> None:
        self._refusal = error
        raise _RefusedError

    def send_400_response(self, msg: str) -> None:
        """Called when parsing failed, also by `_stop_parsing`."""
        self._refuse(self._refusal or ApiError(400, "this is not a valid HTTP request"))

    def _refuse(self, error: ApiError) -> None:
        """Answers what is no request; if an answer is under way, only ends: more text would be read as part of it."""
        self._refusal = error
        self._stop_reading_timer()
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # what it would still answer has no place any more
            self.cycle.message_event.set()
        body = json_bytes(openai_body(error))
        self.transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (error.status, _REASONS[error.status], len(body), body)
        )
        self.transport.close()


def connection_class(bounds: ConnectionBounds, cut_off: Callable[[], None]) -> type[asyncio.Protocol]:
    """What uvicorn calls for each connection."""
    made: Callable[..., Connection] = partial(Connection, bounds, cut_off)
    return cast("type[asyncio.Protocol]", made)
