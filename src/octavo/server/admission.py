"""Who gets in: bounds on what waits, in requests and in tokens, and the deadlines of what is let in.

A request passes the door before its body is read, has a place in the queue from when its body is there, and is admitted
when its tokens are known. It waits until its first token. Beyond a bound it is refused at once, with the time after
which there should be room. Who is still sending holds no place, so that nobody is kept out by slow senders: of bodies
that arrive only the bytes are bounded.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from octavo import limits
from octavo.errors import DrainingError, InvalidParameterError, OverloadedError
from octavo.server.exchange import Endpoint, Exchange, Message, Receive, Send
from octavo.server.state import Admitted, RequestCost, Scope, ServerState

ENTRY = "octavo.entry"  # scope key
_WINDOW_SECONDS = 60.0  # over which the queue's speed is measured
_UNKNOWN_SECONDS = 5  # to wait when it is not known


@dataclass(frozen=True, slots=True)
class Timeouts:
    """The server's own, in seconds: the defaults, and the most a request may ask for. None: none."""

    queue: float | None = None
    first_token: float | None = None
    request: float | None = None


@dataclass(slots=True, eq=False)
class Entry:
    """A request inside the door.

    arriving: its body is not complete, of which `bytes` are there; then waiting: it has no token yet. tokens: of its
    prompts, once admitted.
    """

    arrival: float
    arriving: bool = True
    bytes: int = 0
    tokens: int = 0
    waiting: bool = False


class Admission:
    """Counts what is inside. Not thread-safe: belongs to the event loop."""

    def __init__(
        self,
        *,
        max_queued_requests: int,
        max_queued_tokens: int,
        max_concurrent_requests: int | None = None,
        timeouts: Timeouts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.draining = False
        self.drain_seconds = 1
        self.queued_requests = 0
        self.queued_tokens = 0
        self.inside = 0
        self.arriving = 0  # of those inside
        self.arriving_bytes = 0
        self.refused = {"queue_requests": 0, "queue_tokens": 0, "concurrency": 0, "arriving": 0, "draining": 0}
        self._max_requests = max_queued_requests
        self._max_tokens = max_queued_tokens
        self._max_inside = max_concurrent_requests
        self._timeouts = timeouts or Timeouts()
        self._clock = clock
        self._left: deque[tuple[float, int]] = deque(maxlen=1024)  # when a request got its first token, prompt tokens

    def enter(self) -> Entry:
        """Through the door. Raises DrainingError or OverloadedError; what it returns must `leave`."""
        if self.draining:
            self.refused["draining"] += 1
            raise DrainingError(self.drain_seconds)
        self._find_place()
        self.inside += 1
        self.arriving += 1
        return Entry(self._clock())

    def receive(self, entry: Entry, size: int) -> None:
        """So many bytes more of its body have come, and it is not complete. Raises OverloadedError."""
        entry.bytes += size
        self.arriving_bytes += size
        if entry.bytes > limits.SHORT_BODY_BYTES and self.arriving_bytes > limits.MAX_ARRIVING_BYTES:
            raise self._full("arriving", "too many long bodies are arriving", _UNKNOWN_SECONDS)

    def arrived(self, entry: Entry) -> None:
        """Its body is complete: it takes its place in the queue. Raises OverloadedError."""
        self._find_place()
        self._end_arrival(entry)
        entry.waiting = True
        self.queued_requests += 1

    def charge(self, entry: Entry, tokens: int) -> None:
        """Adds the request's tokens to the queue. One that finds no tokens waiting is taken, however long."""
        excess = self.queued_tokens + tokens - self._max_tokens
        if excess > 0 and self.queued_tokens > 0:
            message = f"{self.queued_tokens} prompt tokens are waiting; with this request's {tokens} the queue is full"
            raise self._full("queue_tokens", message, self._seconds_for(excess, by_tokens=True))
        entry.tokens = tokens
        self.queued_tokens += tokens

    def first_token(self, entry: Entry) -> None:
        if entry.waiting:
            self._leave_queue(entry)
            self._left.append((self._clock(), entry.tokens))

    def leave(self, entry: Entry) -> None:
        if entry.arriving:
            self._end_arrival(entry)
        if entry.waiting:
            self._leave_queue(entry)
        self.inside -= 1

    def deadlines(self, entry: Entry, scope: Scope, cost: RequestCost) -> Admitted:
        """From what the body asks for, else a header, within the server's own."""
        first = self._seconds(scope, "first_token_timeout", cost.first_token_timeout, self._timeouts.first_token)
        whole = self._seconds(scope, "request_timeout", cost.request_timeout, self._timeouts.request)
        queue = self._seconds(scope, "queue_timeout", cost.queue_timeout, self._timeouts.queue)
        return Admitted(
            deadline=None if whole is None else entry.arrival + whole,
            first_token_deadline=None if first is None else entry.arrival + first,
            queue_deadline=None if queue is None else entry.arrival + queue,
            first_token=lambda: self.first_token(entry),
        )

    @staticmethod
    def _seconds(scope: Scope, name: str, asked: float | None, most: float | None) -> float | None:
        if asked is None:
            header = b"x-octavo-" + name.replace("_", "-").encode()
            text = next((value for key, value in scope["headers"] if key == header), None)
            if text is not None:
                asked = _number(header.decode(), text)
        if asked is None or most is None:
            return most if asked is None else asked
        return min(asked, most)

    def _find_place(self) -> None:
        running = self.inside - self.arriving
        if self._max_inside is not None and running >= self._max_inside:
            message = f"the server runs {running} requests, as many as it takes at once"
            raise self._full("concurrency", message, self._seconds_for(1, by_tokens=False))
        if self.queued_requests >= self._max_requests:
            message = f"{self.queued_requests} requests are waiting, as many as the queue holds"
            raise self._full("queue_requests", message, self._seconds_for(1, by_tokens=False))

    def _end_arrival(self, entry: Entry) -> None:
        entry.arriving = False
        self.arriving -= 1
        self.arriving_bytes -= entry.bytes

    def _leave_queue(self, entry: Entry) -> None:
        entry.waiting = False
        self.queued_requests -= 1
        self.queued_tokens -= entry.tokens

    def _full(self, reason: str, message: str, seconds: int) -> OverloadedError:
        self.refused[reason] += 1
        return OverloadedError(f"{message}; try again in {seconds} s", seconds)

    def _seconds_for(self, amount: int, *, by_tokens: bool) -> int:
        """How long the queue takes to give up so many tokens or requests, at the speed of the last minute."""
        now = self._clock()
        while self._left and now - self._left[0][0] > _WINDOW_SECONDS:
            self._left.popleft()
        if not self._left:
            return _UNKNOWN_SECONDS
        passed = max(now - self._left[0][0], 1.0)
        done = sum(tokens for _, tokens in self._left) if by_tokens else len(self._left)
        return min(limits.MAX_RETRY_AFTER_SECONDS, max(1, math.ceil(amount * passed / max(1, done))))


def _number(header: str, text: bytes) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= limits.MAX_TIMEOUT_SECONDS:
        allowed = f"seconds, more than 0 and at most {limits.MAX_TIMEOUT_SECONDS}"
        raise InvalidParameterError(header, text.decode("latin-1"), allowed)
    return seconds


class Admit:
    """ServerState.admission: an asynchronous context around a request's life in the engine."""

    __slots__ = ("_admission", "_cost", "_scope")

    def __init__(self, admission: Admission, scope: Scope, cost: RequestCost) -> None:
        self._admission = admission
        self._scope = scope
        self._cost = cost

    async def __aenter__(self) -> Admitted:
        entry: Entry = self._scope[ENTRY]
        self._admission.charge(entry, self._cost.prompt_tokens)
        return self._admission.deadlines(entry, self._scope, self._cost)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class Door:
    """Around a route that takes work: refuses before the body is read, or where it is complete."""

    def __init__(self, endpoint: Endpoint, state: ServerState, admission: Admission) -> None:
        self._endpoint = endpoint
        self._state = state
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            entry = self._admission.enter()
        except (OverloadedError, DrainingError) as error:
            exchange = Exchange(scope, receive, send, self._endpoint.surface)
            await exchange.fail(error)
            self._state.observe(exchange.record)
            return
        scope[ENTRY] = entry

        async def counted() -> Message:
            message = await receive()
            if entry.arriving and message["type"] == "http.request":
                if message.get("more_body", False):
                    self._admission.receive(entry, len(message.get("body", b"")))
                else:
                    self._admission.arrived(entry)
            return message

        try:
            await self._endpoint(scope, counted, send)
        finally:
            self._admission.leave(entry)
