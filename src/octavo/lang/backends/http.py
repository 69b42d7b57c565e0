"""JSON over HTTP to a server that generates: bounded, cancellable, patient with "overloaded"."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from octavo import limits
from octavo.errors import BackendError, InvalidParameterError
from octavo.lang.cancellation import Cancellation

_OVERLOADED = (429, 503)


class HttpClient:
    """url: of the server, with a path prefix if it has one. timeout: seconds without a byte from the server.

    A connection a request: it can be ended from outside without harm to others.
    """

    def __init__(self, url: str, api_key: str | None, timeout: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidParameterError("url", url, "such as http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._prefix = parts.path.rstrip("/")
        self._timeout = timeout
        self._headers = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"

    def post(self, path: str, body: Any, cancellation: Cancellation | None = None) -> Any:
        """The answer's JSON. Raises BackendError."""
        data = b"".join(self._exchange(path, body, cancellation or Cancellation(), _whole))
        return self._decoded(path, data)

    def stream(self, path: str, body: Any, cancellation: Cancellation) -> Generator[Any, None, None]:
        """The events of a stream as JSON. Raises BackendError, also for an error told within the stream."""
        for line in self._exchange(path, body, cancellation, _lines):
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = self._decoded(path, data)
            if isinstance(event, dict) and event.get("error"):
                raise BackendError(f"{self.url}{path} ended the stream: {_told(event)}")
            yield event
        raise BackendError(f"{self.url}{path} ended the stream before its end")

    def _decoded(self, path: str, data: bytes) -> Any:
        try:
            return json.loads(data)
        except ValueError as error:
            raise BackendError(f"{self.url}{path} answered what is not JSON: {error}") from None

    def _exchange(self, path: str, body: Any, cancellation: Cancellation, read: Any) -> Generator[bytes, None, None]:
        data = json.dumps(body).encode()
        for attempt in range(1, limits.BACKEND_TRIES + 1):
            cancellation.check()
            connection = self._connection()
            try:
                connection.connect()
                ends = connection.sock
                with cancellation.calls(lambda ends=ends: _hang_up(ends)):  # type: ignore[misc]
                    connection.request("POST", self._prefix + path, data, self._headers)
                    answer = connection.getresponse()
                    if answer.status == 200:
                        yield from read(answer)
                        cancellation.check()
                        return
                    refusal = answer.read(limits.MAX_BACKEND_ANSWER_BYTES)
            except (OSError, http.client.HTTPException) as error:
                cancellation.check()
                raise BackendError(f"{self.url}{path} cannot be reached or broke off: {error!r}") from error
            finally:
                connection.close()
            if answer.status not in _OVERLOADED or attempt == limits.BACKEND_TRIES:
                raise BackendError(f"{self.url}{path} answered {answer.status}: {_told_by(refusal)}")
            _pause(answer.headers.get("retry-after"), attempt, cancellation)

    def _connection(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=self._timeout)


@contextmanager
def expecting(shape: str) -> Generator[None, None, None]:
    """Around what reads an answer: one that is not of this shape is a BackendError."""
    try:
        yield
    except (LookupError, TypeError, AttributeError) as error:
        raise BackendError(f"the server answered in another shape than {shape}: {error!r}") from error


def _whole(answer: http.client.HTTPResponse) -> Generator[bytes, None, None]:
    data = answer.read(limits.MAX_BACKEND_ANSWER_BYTES + 1)
    if len(data) > limits.MAX_BACKEND_ANSWER_BYTES:
        raise BackendError(f"the answer is longer than the {limits.MAX_BACKEND_ANSWER_BYTES} bytes allowed")
    yield data


def _lines(answer: http.client.HTTPResponse) -> Generator[bytes, None, None]:
    read = 0
    while line := answer.readline(limits.MAX_BACKEND_ANSWER_BYTES):
        read += len(line)
        if read > limits.MAX_BACKEND_ANSWER_BYTES:
            raise BackendError(f"the stream is longer than the {limits.MAX_BACKEND_ANSWER_BYTES} bytes allowed")
        yield line


def _hang_up(connection: socket.socket) -> None:
    """Wakes a thread that reads from it."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it is closed already


def _pause(retry_after: str | None, attempt: int, cancellation: Cancellation) -> None:
    try:
        seconds = float(retry_after or 2 ** (attempt - 1))
    except ValueError:  # a date
        seconds = float(2 ** (attempt - 1))
    ended = threading.Event()
    with cancellation.calls(ended.set):
        ended.wait(min(max(seconds, 0.1), limits.MAX_BACKEND_PAUSE_SECONDS))


def _told_by(data: bytes) -> str:
    try:
        return _told(json.loads(data))
    except ValueError:
        return data[:300].decode("utf-8", "replace") or "nothing"


def _told(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message if message is not None else body)[:1000]
