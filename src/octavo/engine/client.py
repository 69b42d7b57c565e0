"""The API process's side of the engine: starts it, supervises it, and hands each request its tokens."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from octavo.engine.ipc import EngineInfo, EngineOptions
from octavo.engine.stream import RequestStream
from octavo.params import SamplingParams
from octavo.tokenizer import Tokenizer


class EngineState(enum.Enum):
    """LOADING: the first time. RESTARTING: until all that was on board has been tried again. DOWN: for good."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    DOWN = "down"
    CLOSED = "closed"


class EngineClient:
    """One engine process and its requests. Belongs to the event loop that called `start`."""

    def __init__(
        self,
        options: EngineOptions,
        *,
        stall_seconds: float = 10.0,
        keep_alive: float = 5.0,
        module: str = "octavo.engine.process",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.options = options
        self.state = EngineState.LOADING
        self.reason = "the model is being loaded"
        self.info: EngineInfo | None = None
        self.progress = 0  # steps done, over restarts
        self.restarts = 0

    async def start(self) -> None:
        """Starts the engine process and returns at once; see wait_ready."""
        raise NotImplementedError

    async def wait_ready(self) -> EngineInfo:
        """Waits until requests run. Raises why the model can't be loaded, or EngineUnavailableError when down."""
        raise NotImplementedError

    @property
    def tokenizer(self) -> Tokenizer:
        """In this process, for prompts and templates; there once the engine has been ready."""
        raise NotImplementedError

    @property
    def silent_seconds(self) -> float:
        """How long nothing has come from the engine that should have."""
        raise NotImplementedError

    def validate(self, prompt_token_ids: list[int], params: SamplingParams) -> SamplingParams:
        """Checks a request with the engine's own validator, on any thread; returns the parameters with a seed set.

        Raises InvalidParameterError, CapacityError, or EngineUnavailableError before the engine was ready once.
        """
        raise NotImplementedError

    def submit(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        deadline: float | None = None,
        first_token_deadline: float | None = None,
    ) -> RequestStream:
        """Queues a request. Never blocks or raises: errors come out of the stream. Deadlines: time.monotonic()."""
        raise NotImplementedError

    async def call(self, name: str) -> Any:
        """ "flush_cache" (blocks freed) or "stats" (Engine.stats). Raises EngineUnavailableError."""
        raise NotImplementedError

    async def close(self) -> None:
        """Ends the engine process; whoever reads a stream gets EngineClosedError. More than once is fine."""
        raise NotImplementedError
