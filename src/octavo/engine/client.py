"""The API process's side of the engine: starts it, supervises it, and hands each request its tokens."""

from __future__ import annotations

import asyncio
import enum
import logging
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import count
from typing import Any

import msgspec

from octavo.engine import ipc
from octavo.engine.ipc import Done, EngineInfo, EngineOptions, Failure, Update
from octavo.engine.replay import CrashLog, Entry, Replay
from octavo.engine.stats import EngineStats
from octavo.engine.stream import RequestStream
from octavo.engine.supervisor import SHORTAGES, Death, EngineProcess
from octavo.engine.watchdog import Watchdog
from octavo.errors import (
    CapacityError,
    DeadlineError,
    EngineClosedError,
    EngineUnavailableError,
    FrameError,
    InvalidParameterError,
    OctavoError,
    RequestFailedError,
)
from octavo.params import SamplingParams
from octavo.tokenizer import Tokenizer

log = logging.getLogger("octavo")

_PING = ipc.Call(0, "ping")
_LONGEST_PAUSE = 5.0  # seconds between tries to start an engine process
_OVERDUE = "the request was still in the queue at its queue deadline"


class EngineState(enum.Enum):
    """LOADING: the first time. RESTARTING: until all that was on board has been tried again. DOWN: for good."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    DOWN = "down"
    CLOSED = "closed"


class EngineClient:
    """One engine process and its requests. Belongs to the event loop that called `start`.

    stall_seconds: an engine that owes a step and is silent so long, and as long again as the step's rows may take, is
    killed. keep_alive: seconds between PAUSE items of streams that can't run. module: what is run as the engine.
    logs: level and format of what the engine process logs.
    """

    def __init__(
        self,
        options: EngineOptions,
        *,
        stall_seconds: float = 10.0,
        keep_alive: float = 5.0,
        module: str = "octavo.engine.process",
        environment: Mapping[str, str] | None = None,
        logs: tuple[str, str] = ("info", "plain"),
    ) -> None:
        self.options = options
        self.state = EngineState.LOADING
        self.reason = "the model is being loaded"
        self.info: EngineInfo | None = None
        self.progress = 0  # steps done, over restarts
        self.restarts = 0
        self.stats = EngineStats()
        self._keep_alive = keep_alive
        self._module = module
        self._environment = environment
        self._logs = logs
        self._tokenizer: Tokenizer | None = None
        self._failure: OctavoError | None = None  # why the model could not be loaded
        self._engine: EngineProcess | None = None
        self._away_since: float | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._settled = asyncio.Event()  # READY, DOWN or CLOSED
        self._numbers = count(1)
        self._replay = Replay()
        self._crashes = CrashLog()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._watchdog = Watchdog(stall_seconds, time.monotonic())

    # Life

    async def start(self) -> None:
        """Starts the engine process and returns at once; see wait_ready."""
        self._tasks = [asyncio.create_task(self._supervise()), asyncio.create_task(self._watch())]

    async def wait_ready(self) -> EngineInfo:
        """Waits until requests run. Raises why the model can't be loaded, or EngineUnavailableError when down."""
        while True:
            await self._settled.wait()
            if self.state is EngineState.READY and self.info is not None:
                return self.info
            if self.state in (EngineState.DOWN, EngineState.CLOSED):
                raise self._failure or self._unavailable()

    @property
    def tokenizer(self) -> Tokenizer:
        """In this process, for prompts and templates; there once the engine has been ready."""
        if self._tokenizer is None:
            raise self._unavailable()
        return self._tokenizer

    @property
    def engine_pid(self) -> int | None:
        return None if self._engine is None else self._engine.pid

    @property
    def silent_seconds(self) -> float:
        """How long nothing has come from the engine that should have."""
        return self._watchdog.silent

    async def close(self) -> None:
        """Ends the engine process; whoever reads a stream gets EngineClosedError. More than once is fine."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._go(EngineState.CLOSED, "the server is closed")
        self._fail_all(EngineClosedError("the server is shutting down"))
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.stop()

    # Requests

    def validate(self, prompt_token_ids: list[int], params: SamplingParams) -> SamplingParams:
        """Checks a request with the engine's own validator, on any thread; returns the parameters with a seed set.

        Raises InvalidParameterError, CapacityError, or EngineUnavailableError before the engine was ready once.
        """
        from octavo.sampling import resolve

        info, tokenizer = self.info, self.tokenizer
        if info is None:
            raise self._unavailable()
        length = len(prompt_token_ids)
        if params.truncate_prompt_tokens is not None:
            length = min(length, params.truncate_prompt_tokens)
        if length == 0:
            raise InvalidParameterError("prompt", prompt_token_ids, "at least one token")
        for token_id in prompt_token_ids:
            if type(token_id) is not int or not 0 <= token_id < info.vocab_size:
                raise InvalidParameterError("prompt_token_ids", token_id, f"token ids from 0 to {info.vocab_size - 1}")
        resolved = resolve(
            params,
            prompt_len=length,
            vocab_size=info.vocab_size,
            context_len=info.max_model_len,
            eos_ids=frozenset(info.eos_token_ids),
            encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        )
        return replace(params, seed=resolved.seed)

    def submit(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        deadline: float | None = None,
        first_token_deadline: float | None = None,
        queue_deadline: float | None = None,
    ) -> RequestStream:
        """Queues a request. Never blocks or raises: errors come out of the stream. Deadlines: time.monotonic()."""
        loop = asyncio.get_running_loop()
        stream = RequestStream(request_id, loop, lambda: self._cancel(entry))
        if params.seed is None:  # set before the first submission: a replay must draw the same
            params = replace(params, seed=secrets.randbits(63))
        now = time.monotonic()
        emitted: list[list[int]] = [[] for _ in range(params.n)]
        entry = Entry(next(self._numbers), prompt_token_ids, params, stream, now, now, emitted=emitted)
        if self.state in (EngineState.DOWN, EngineState.CLOSED):
            stream.end(self._unavailable())
            return stream
        if deadline is not None:
            stream.timers.append(loop.call_later(max(0.0, deadline - now), self._too_late, entry, "the answer"))
        if first_token_deadline is not None:
            late = max(0.0, first_token_deadline - now)
            stream.timers.append(loop.call_later(late, self._too_late, entry, "the first token"))
        if queue_deadline is not None:
            stream.timers.append(loop.call_later(max(0.0, queue_deadline - now), self._overdue, entry))
        self._submit(self._replay.take(entry))
        return stream

    async def call(self, name: str) -> Any:
        """ "flush_cache" (blocks freed) or "stats" (Engine.stats). Raises EngineUnavailableError."""
        engine = self._engine
        if self.state is not EngineState.READY or engine is None:
            raise self._unavailable()
        number = next(self._numbers)
        self._calls[number] = reply = asyncio.get_running_loop().create_future()
        try:
            engine.send(ipc.Call(number, name))
            return await reply
        finally:
            self._calls.pop(number, None)

    def _submit(self, entries: Iterable[Entry]) -> None:
        engine = self._engine
        assert engine is not None or not entries
        for entry in entries:
            assert engine is not None
            self._watchdog.first_tokens_due.add(entry.number)
            try:
                engine.send(ipc.Submit(entry.number, entry.prompt_token_ids, entry.params, entry.emitted))
            except FrameError:
                self._end(entry, CapacityError("the request is too large"))
            except (TypeError, ValueError, OverflowError):
                self._end(entry, InvalidParameterError("prompt_token_ids", "the list", "token ids only"))

    def _cancel(self, entry: Entry) -> None:
        """The stream has ended; the engine must know."""
        self._close_timers(entry)
        self._watchdog.first_tokens_due.discard(entry.number)
        if self._replay.forget(entry) and self._engine is not None:
            self._engine.send(ipc.Cancel(entry.number))

    def _too_late(self, entry: Entry, what: str) -> None:
        if what != "the first token" or entry.first_token is None:
            entry.stream.cancel(DeadlineError(f"{what} was not there by the request's deadline"))

    def _overdue(self, entry: Entry) -> None:
        """Only the engine knows whether a request without a token is still in the queue."""
        if entry.first_token is not None:
            return
        if self._replay.is_aboard(entry) and self._engine is not None:
            entry.overdue = True
            self._engine.send(ipc.Cancel(entry.number, queued=True))
        else:
            entry.stream.cancel(DeadlineError(_OVERDUE))

    def _end(self, entry: Entry, outcome: Done | OctavoError) -> None:
        """The request is over, and not in the engine any more."""
        self._close_timers(entry)
        self._watchdog.first_tokens_due.discard(entry.number)
        self._replay.forget(entry)
        if entry.stream.open:
            entry.stream.end(outcome)
        self._submit(self._replay.left_engine(entry.number))

    @staticmethod
    def _close_timers(entry: Entry) -> None:
        for timer in entry.stream.timers:
            timer.cancel()
        entry.stream.timers.clear()

    def _fail_all(self, error: OctavoError) -> None:
        for entry in list(self._replay.entries.values()):
            entry.stream.end(error)
            self._cancel(entry)
        self._fail_calls(error)

    def _fail_calls(self, error: OctavoError) -> None:
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(error)

    # What the engine says

    def _on_message(self, engine: EngineProcess, message: ipc.FromEngine) -> None:
        if engine is not self._engine:
            return
        self._watchdog.heard(time.monotonic())
        match message:
            case ipc.Step(counters, updates):
                self.progress += self.stats.absorb(counters)
                for update in updates:
                    self._on_update(update)
            case ipc.Reply(number, value, failure):
                reply = self._calls.get(number)
                if reply is not None and not reply.done():
                    if failure is None:
                        reply.set_result(value)
                    else:
                        reply.set_exception(failure.error())
            case ipc.Hello(info) if not engine.hello.done():
                engine.hello.set_result(info)
            case ipc.LoadFailed(failure) if not engine.hello.done():
                engine.hello.set_result(failure.error())

    def _on_update(self, update: Update) -> None:
        entry = self._replay.entries.get(update.number)
        if entry is None:  # cancelled a moment ago
            if update.end is not None:
                self._submit(self._replay.left_engine(update.number))
            return
        if update.started is not None:
            entry.overdue = False
        if update.tokens:
            self._on_tokens(entry, update)
        match update.end:
            case Done() as done:
                self._end(entry, self._complete(entry, done))
            case Failure() as failure:
                self._end(entry, failure.error())
            case ipc.Cancelled() if entry.overdue:
                self._end(entry, DeadlineError(_OVERDUE))
            case ipc.Cancelled():
                self._submit(self._replay.left_engine(entry.number))

    def _on_tokens(self, entry: Entry, update: Update) -> None:
        now = self._watchdog.last_frame
        tokens = entry.accept(update.tokens)
        if entry.first_token is None:
            entry.first_token = now
            entry.stream.started = update.started
        entry.last_item = now
        self.stats.generated_tokens += len(tokens)
        self._crashes.made_token()
        self._watchdog.first_tokens_due.discard(entry.number)
        if not self._replay.settled:
            withdraw, entries = self._replay.made_token(entry)
            if withdraw and self._engine is not None:
                self._engine.send(ipc.Cancel(entry.number))
            self._submit(entries)
            self._tell_ready()
        if tokens:
            entry.stream.push(tokens)

    def _complete(self, entry: Entry, done: Done) -> Done:
        """Moments and counts over all engines the request has seen."""
        started = entry.stream.started
        if started is None or entry.first_token is None:
            return done
        moments = ipc.Moments(entry.arrival, started.first_scheduled, entry.first_token, self._watchdog.last_frame)
        return msgspec.structs.replace(done, cached_tokens=started.cached_tokens, timings=moments)

    # Supervision

    def _go(self, state: EngineState, reason: str) -> None:
        self.state, self.reason = state, reason
        if state in (EngineState.READY, EngineState.DOWN, EngineState.CLOSED):
            self._settled.set()
        else:
            self._settled.clear()

    def _unavailable(self) -> OctavoError:
        if self.state is EngineState.CLOSED:
            return EngineClosedError("the engine is closed")
        return EngineUnavailableError(self.reason or "the engine is not ready")

    def _tell_ready(self) -> None:
        if self._replay.settled and self.state in (EngineState.LOADING, EngineState.RESTARTING):
            self._go(EngineState.READY, "")
            if self._away_since is not None:
                away, going_on = time.monotonic() - self._away_since, len(self._replay.entries)
                log.info("the engine is back after %.1f s; requests that go on: %d", away, going_on)
                self._away_since = None

    async def _supervise(self) -> None:
        try:
            while self.state is not EngineState.DOWN:
                death = await self._live()
                if death is not None:
                    self._on_death(death)
        except Exception:
            log.critical("the engine is not supervised any more", exc_info=True)
            self._go(EngineState.DOWN, "an internal error of the supervisor")
            engine, self._engine = self._engine, None
            self._fail_all(self._unavailable())
            if engine is not None:
                await engine.stop()

    async def _live(self) -> Death | None:
        """One life of an engine; how it ended. None: it can't be loaded, which trying again does not change."""
        options = self.options
        if self.info is not None:  # what fitted once must fit again: memory that others took meanwhile changes nothing
            memory = self.info.num_blocks * self.info.block_bytes
            options = msgspec.structs.replace(options, kv_memory=memory, max_model_len=self.info.max_model_len)
        self._watchdog.engine_started()
        try:
            self._engine = engine = await self._start_process()
        except OSError as error:
            await asyncio.sleep(self._watchdog.tick)
            return Death(f"no engine process could be started: {error.strerror}", False)
        await engine.connect(options)
        told = await engine.hello
        if isinstance(told, EngineInfo):
            await self._bring_up(told)
            return await engine.wait()
        death = await engine.wait()
        if told is None:
            return death
        if self.info is None:
            self._failure = told
            self._go(EngineState.DOWN, "the model can't be loaded")
            self._fail_all(told)
            return None
        log.error("the model can't be loaded again: %s", told)
        return Death("the engine could not load the model again", False)  # clients may read it: no paths

    async def _start_process(self) -> EngineProcess:
        """Waits for what the system is short of: that is no fault of the engine's. Raises OSError for what else is."""
        pause = self._watchdog.tick
        while True:
            try:
                return EngineProcess(self._module, self._environment, self._on_message, self._logs)
            except OSError as error:
                if error.errno not in SHORTAGES:
                    raise
                self.reason = f"no engine process can be started: {error.strerror}"
                log.error("%s; it is tried again", self.reason)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _bring_up(self, info: EngineInfo) -> None:
        before, self.info = self.info, info
        if before is not None and before.fingerprint != info.fingerprint:
            log.error("the engine's arithmetic or model has changed: nothing is replayed")
            message = (
                f"the engine came back as {info.fingerprint}, not as {before.fingerprint}, and would go on otherwise"
            )
            self._fail_all(RequestFailedError(message))
        if before is None or before.fingerprint != info.fingerprint:
            self._tokenizer = await asyncio.to_thread(_load_tokenizer, info.path)
        self._submit(self._replay.engine_up())
        self._tell_ready()

    def _on_death(self, death: Death) -> None:
        self.restarts += 1
        self.stats.engine_ended()
        self._engine = None
        self._watchdog.engine_started()
        error = EngineUnavailableError(f"{death.reason} and is being restarted")
        self._fail_calls(error)
        for entry in self._replay.engine_died(own_fault=death.own_fault):
            log.error("request %s ended the engine, running alone; it is given up", entry.stream.request_id)
            self._end(entry, RequestFailedError("the engine failed twice while it ran this request"))
        for entry in [entry for entry in self._replay.entries.values() if entry.overdue]:
            entry.stream.cancel(DeadlineError(_OVERDUE))  # it was asked, and is back in the queue
        if self._crashes.crashed(time.monotonic()):
            self._go(EngineState.DOWN, f"{death.reason}, for the fourth time within a minute without a token made")
            log.critical("%s; it stays down", self.reason)
            self._fail_all(self._unavailable())
            return
        log.error("%s; it is started again; requests that wait: %d", death.reason, len(self._replay.entries))
        self._away_since = self._away_since or time.monotonic()
        self._go(EngineState.RESTARTING, f"{death.reason} and is being restarted")

    async def _watch(self) -> None:
        watchdog = self._watchdog
        while True:
            await asyncio.sleep(min(watchdog.tick, self._keep_alive / 2))
            now = time.monotonic()
            self._keep_streams_alive(now)
            engine = self._engine
            if engine is None or engine.ended.done():
                continue
            owes = not engine.hello.done() or self.stats.running > 0 or self.stats.waiting > 0 or bool(self._calls)
            if watchdog.look(now, owes=owes):
                engine.send(_PING)
            if watchdog.silent > watchdog.limit(self.info, self.stats):
                await self._kill_stalled(engine)

    async def _kill_stalled(self, engine: EngineProcess) -> None:
        stopped = engine.is_stopped()
        if not stopped and engine.hello.done():
            engine.ask_where()
            await asyncio.sleep(self._watchdog.tick)
        engine.kill(Death(f"the engine did nothing for {self._watchdog.silent:.1f} s", own_fault=not stopped))

    def _keep_streams_alive(self, now: float) -> None:
        if self.state is EngineState.READY:
            return
        for entry in list(self._replay.entries.values()):
            if now - entry.last_item >= self._keep_alive:
                entry.last_item = now
                entry.stream.pause()


def _load_tokenizer(path: str) -> Tokenizer:
    from octavo.weights.checkpoint import load_checkpoint

    checkpoint = load_checkpoint(path)
    return Tokenizer.from_assets(checkpoint.tokenizer, checkpoint.config.vocab_size)
