"""What the HTTP surfaces share: the engine, the model's names, threads for text, and hooks for the operator's side."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from octavo import limits
from octavo.errors import EngineUnavailableError

if TYPE_CHECKING:
    from octavo.chat.turn import ChatFormat
    from octavo.engine.client import EngineClient
    from octavo.engine.ipc import EngineInfo
    from octavo.params import SamplingParams
    from octavo.tokenizer import Tokenizer

T = TypeVar("T")
P = ParamSpec("P")
Scope = MutableMapping[str, Any]


@dataclass(frozen=True, slots=True)
class RequestCost:
    """What admission weighs. prompt_tokens: of all prompts; sequences: prompts x n.

    The timeouts are seconds that the body asks for; None: it does not.
    """

    prompt_tokens: int
    sequences: int
    queue_timeout: float | None = None
    first_token_timeout: float | None = None
    request_timeout: float | None = None


@dataclass(slots=True)
class Admitted:
    """A request that may run. Deadlines in time.monotonic(); None: none. `first_token`: call it when one is there."""

    deadline: float | None = None
    first_token_deadline: float | None = None
    queue_deadline: float | None = None
    first_token: Callable[[], None] = lambda: None


@dataclass(slots=True)
class RequestRecord:
    """One request of a surface, for metrics and logs; handed to `state.observe` once it is over. Never any content.

    Moments in time.monotonic(). gaps: seconds between the writes of a request's tokens. finish_reasons: one an output.
    """

    scope: Scope
    route: str
    arrival: float = field(default_factory=time.monotonic)
    request_id: str = ""
    stream: bool = False
    sequences: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    admitted: float | None = None
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    gaps: array[float] = field(default_factory=lambda: array("f"))
    finish_reasons: list[str] = field(default_factory=list)
    status: int = 0
    error_code: str | None = None
    params: SamplingParams | None = None  # of its first prompt, once it is read
    disconnected: bool = False

    def saw_tokens(self, count: int) -> None:
        now = time.monotonic()
        if self.last_token is None:
            self.first_token = now
        else:
            self.gaps.append(now - self.last_token)
        self.last_token = now
        self.completion_tokens += count


Admission = Callable[[Scope, RequestCost], AbstractAsyncContextManager[Admitted]]


@asynccontextmanager
async def _admit_all(scope: Scope, cost: RequestCost) -> AsyncIterator[Admitted]:
    yield Admitted()


def _threads(name: str, count: int) -> Callable[[], ThreadPoolExecutor]:
    return lambda: ThreadPoolExecutor(count, thread_name_prefix=name)


@dataclass
class ServerState:
    """model_names: what clients may call the model; the first is what answers say.

    admission: entered before a request is submitted, left when it is over; raises OverloadedError, DrainingError or
    DeadlineError. observe: gets each request's record. problem: why no request should be sent here now; None: it is
    ready. salt: the cache salt of a request, from who asks and what the body asks for.
    """

    engine: EngineClient
    model_names: list[str]
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    auto_tool_choice: bool = True
    max_input_tokens: int | None = None
    max_body_bytes: int = limits.MAX_BODY_BYTES
    keep_alive: float = 5.0
    max_concurrent_requests: int = limits.MAX_BATCH_SEQUENCES
    admission: Admission = _admit_all
    observe: Callable[[RequestRecord], None] = lambda record: None
    problem: Callable[[], tuple[str, str] | None] = lambda: None
    salt: Callable[[Scope, str | None], str | None] = lambda scope, asked: asked
    short_threads: ThreadPoolExecutor = field(default_factory=_threads("octavo-text", 2))
    long_threads: ThreadPoolExecutor = field(default_factory=_threads("octavo-long-text", 1))
    created: int = field(default_factory=lambda: int(time.time()))
    _longest_token: int = 0
    _chat: ChatFormat | None = None

    @property
    def info(self) -> EngineInfo:
        """Raises EngineUnavailableError until the model is known. Any thread."""
        if self.engine.info is None:
            raise EngineUnavailableError(self.engine.reason)
        return self.engine.info

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises EngineUnavailableError until the model is known. Any thread."""
        if self.engine.info is None:
            raise EngineUnavailableError(self.engine.reason)
        return self.engine.tokenizer

    @property
    def chat(self) -> ChatFormat:
        """How the model writes calls and thoughts. Raises EngineUnavailableError until it is known. Any thread."""
        if self._chat is None:
            from octavo.chat.turn import ChatFormat

            self._chat = ChatFormat(self.tokenizer, self.tool_parser, self.reasoning_parser)
        return self._chat

    @property
    def most_prompt_tokens(self) -> int:
        most = self.info.max_model_len - 1
        return most if self.max_input_tokens is None else min(most, self.max_input_tokens)

    @property
    def longest_token(self) -> int:
        """Bytes of the longest token: a text of more than that times n bytes has more than n tokens."""
        if not self._longest_token:
            tokenizer = self.tokenizer
            self._longest_token = max(1, *(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)))
        return self._longest_token

    async def in_thread(self, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs what grows with a body of `size` bytes (JSON, templates, tokenising) beside the event loop.

        Long bodies wait for each other, short ones never for them.
        """
        threads = self.short_threads if size <= limits.SHORT_BODY_BYTES else self.long_threads
        return await asyncio.get_running_loop().run_in_executor(threads, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """What the threads are at they finish, unless the process ends before; the rest is not begun."""
        self.short_threads.shutdown(wait=False, cancel_futures=True)
        self.long_threads.shutdown(wait=False, cancel_futures=True)
