"""The engine process: `python -m octavo.engine.process --fd N --parent PID`, started by engine.client.

One thread reads requests, steps, and sends one frame a step. The process ends when its socket does, when its parent
does, and on SIGTERM; Ctrl-C is the parent's business.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import msgspec

from octavo.engine import ipc
from octavo.engine.core import Engine
from octavo.engine.ipc import Counters, EngineInfo, EngineOptions, Failure, Step, Token, TokenLogprob, Update
from octavo.engine.opening import OpenedEngine, open_engine
from octavo.engine.preparing import Preparing
from octavo.engine.request import Drawn, Request
from octavo.errors import FrameError, InvalidParameterError, OctavoError, RequestFailedError
from octavo.logs import log_uncaught, set_up_logging
from octavo.outputs import Logprob, RequestOutput, TextDelta
from octavo.tokenizer import Tokenizer

log = logging.getLogger("octavo")

_PR_SET_PDEATHSIG = 1
_HEARTBEAT = 0.5  # seconds between signs of life while the model is loaded
_READ_BYTES = 1 << 18


class Listener:
    """Turns what the engine says of one request into entries of the step's frame."""

    __slots__ = ("_number", "_positions", "_started", "_tokenizer", "_updates", "request")

    def __init__(self, message: ipc.Submit, updates: dict[int, Update], tokenizer: Tokenizer) -> None:
        self._number = message.number
        self._updates = updates
        self._tokenizer = tokenizer
        self._positions = [0] * message.params.n
        for index, ids in enumerate(message.emitted[: message.params.n]):
            self._positions[index] = len(ids)
        self._started = False
        self.request: Request | None = None  # set before it can call

    def __call__(self, said: TextDelta | RequestOutput) -> None:
        update = self._updates.get(self._number)
        if update is None:
            update = self._updates[self._number] = Update(self._number, [])
        if isinstance(said, TextDelta):
            self._add_token(update, said)
        else:
            update.end = self._end(said)

    def _add_token(self, update: Update, delta: TextDelta) -> None:
        index = delta.index
        position = self._positions[index]
        self._positions[index] = position + 1
        logprobs = None if delta.logprobs is None else self._listed(delta.logprobs[0])
        token = Token(index, position, delta.token_ids[0], delta.text, logprobs, delta.finish_reason, delta.stop_reason)
        update.tokens.append(token)
        if not self._started:
            self._started = True
            assert self.request is not None
            update.started = _started(self.request)

    def _end(self, output: RequestOutput) -> ipc.Done | Failure | ipc.Cancelled:
        if output.error is not None:
            return Failure.of(output.error)
        if any(completion.finish_reason == "abort" for completion in output.outputs):
            return ipc.Cancelled()
        times = output.timings
        assert times is not None
        assert output.seed is not None
        now = time.monotonic()
        prompt_logprobs = output.prompt_logprobs
        return ipc.Done(
            prompt_tokens=len(output.prompt_token_ids),
            cached_tokens=output.num_cached_tokens,
            completion_tokens=sum(len(completion.token_ids) for completion in output.outputs),
            seed=output.seed,
            timings=ipc.Moments(times.arrival, times.first_scheduled or now, times.first_token or now, now),
            prompt_logprobs=None
            if prompt_logprobs is None
            else [None if entry is None else self._listed(entry) for entry in prompt_logprobs],
        )

    def _listed(self, logprobs: Mapping[int, Logprob]) -> list[TokenLogprob]:
        token_bytes = self._tokenizer.token_bytes
        return [TokenLogprob(i, entry.logprob, entry.rank or 0, token_bytes(i)) for i, entry in logprobs.items()]


def _started(request: Request) -> ipc.Started:
    cached = request.generations[0].sequence.num_cached
    return ipc.Started(min(cached, len(request.prompt_token_ids)), request.first_scheduled or request.arrival)


class EngineServer:
    """Serves one engine to the one peer of a connected socket, on this thread."""

    def __init__(self, connection: socket.socket, engine: Engine) -> None:
        self._connection = connection
        self._engine = engine
        engine.raises_step_errors = True
        self._frames = ipc.FrameReader()
        self._updates: dict[int, Update] = {}
        self._preparing = Preparing()
        self._submitted: dict[int, ipc.Submit] = {}  # those being prepared
        self._answers = False  # a frame is due even if nothing happened
        self._steps = 0
        self._last_step = (0.0, 0)  # seconds, rows

    def run(self) -> None:
        """Until the peer closes. Raises FrameError for a frame over the cap, and what the engine itself raises."""
        with suppress(BrokenPipeError, ConnectionResetError):  # the peer is gone, or has given this engine up
            self._run()

    def _run(self) -> None:
        engine = self._engine
        while self._receive(wait=not engine.has_work() and not self._updates and not self._answers):
            before, begin = engine.scheduler.counters.computed_tokens, time.perf_counter()
            if engine.step():
                self._steps += 1
                self._last_step = time.perf_counter() - begin, engine.scheduler.counters.computed_tokens - before
                self._answers = True
            if self._updates or self._answers:
                self._send_step()

    def _receive(self, *, wait: bool) -> bool:
        """Handles what has come in; False at the end of the connection."""
        if wait and len(self._preparing):
            select.select([self._connection.fileno(), self._preparing.fileno()], [], [])
            wait = False
        for number, prepared in self._preparing.ready() if len(self._preparing) else ():
            self._add(self._submitted.pop(number), prepared)
        while True:
            try:
                data = self._connection.recv(_READ_BYTES, 0 if wait else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            if not data:
                return False
            for body in self._frames.feed(data):
                try:
                    message = ipc.decode_to_engine(body)
                except FrameError as error:
                    log.warning("a message is ignored: %s", error)
                    continue
                self._handle(message)
            wait = False

    def _handle(self, message: ipc.ToEngine) -> None:
        match message:
            case ipc.Submit():
                self._submit(message)
            case ipc.Cancel(number, queued):
                self._cancel(number, queued)
            case ipc.Call():
                self._call(message)
            case ipc.Open():
                log.error("a second Open is ignored")

    def _cancel(self, number: int, queued: bool) -> None:
        if self._preparing.cancel(number):
            del self._submitted[number]
            self._updates.setdefault(number, Update(number, [])).end = ipc.Cancelled()
            return
        request = self._engine.find(str(number))
        if queued and request is not None and request.first_scheduled is not None:
            self._updates.setdefault(number, Update(number, [])).started = _started(request)
        elif request is not None:
            self._engine.cancel(str(number))
        elif not queued:
            self._updates.setdefault(number, Update(number, [])).end = ipc.Cancelled()

    def _submit(self, message: ipc.Submit) -> None:
        """A request with a grammar is taken in when that is compiled, which no other waits for."""

        def prepare() -> Request:
            listener = Listener(message, self._updates, self._engine.tokenizer)
            request = self._engine.prepare(str(message.number), message.prompt_token_ids, message.params, listener)
            listener.request = request
            return request

        if message.params.structured is not None:
            self._submitted[message.number] = message
            self._preparing.start(message.number, prepare)
            return
        try:
            prepared: Request | Exception = prepare()
        except Exception as error:
            prepared = error
        self._add(message, prepared)

    def _add(self, message: ipc.Submit, prepared: Request | Exception) -> None:
        """Whatever goes wrong here is this request's own error."""
        try:
            if isinstance(prepared, Exception):
                raise prepared
            self._engine.add(prepared, [[Drawn(token_id) for token_id in ids] for ids in message.emitted])
        except Exception as error:
            if not isinstance(error, OctavoError):
                log.exception("request %d could not be taken in", message.number)
            self._updates[message.number] = Update(message.number, [], None, Failure.of(error))

    def _call(self, message: ipc.Call) -> None:
        try:
            match message.name:
                case "ping":
                    self._answers = True
                    return
                case "stats":
                    reply = ipc.Reply(message.number, self._engine.stats())
                case "flush_cache":
                    reply = ipc.Reply(message.number, self._engine.flush_cache())
                case name:
                    raise InvalidParameterError("call", name, "ping, stats or flush_cache")
        except Exception as error:
            reply = ipc.Reply(message.number, None, Failure.of(error))
        self._connection.sendall(ipc.encode(reply))

    def _send_step(self) -> None:
        updates = list(self._updates.values())
        self._updates.clear()  # the listeners share it
        self._answers = False
        counters = self._counters()
        try:
            frames = [ipc.encode(Step(counters, updates))]
        except FrameError:  # several long lists of prompt logprobs at once
            frames = [self._alone(counters, update) for update in updates]
        for frame in frames:
            self._connection.sendall(frame)

    def _alone(self, counters: Counters, update: Update) -> bytes:
        try:
            return ipc.encode(Step(counters, [update]))
        except FrameError as error:
            log.warning("request %d is ended: %s", update.number, error)
            self._engine.cancel(str(update.number))
            self._updates.pop(update.number, None)
            failure = Failure.of(RequestFailedError("its log-probabilities are too large for one message"))
            return ipc.encode(Step(counters, [Update(update.number, [], None, failure)]))

    def _counters(self) -> Counters:
        stats = self._engine.scheduler.stats()
        seconds, rows = self._last_step
        return Counters(
            stats.running,
            stats.waiting,
            stats.blocks_free,
            stats.blocks_cached,
            stats.blocks_used,
            stats.waste_percent,
            seconds,
            rows,
            self._steps,
            stats.computed_tokens,
            stats.prefix_hit_tokens,
            stats.preemptions,
            stats.evictions,
            self._engine.jump_forward_tokens,
        )


def open_by_options(options: EngineOptions) -> OpenedEngine:
    return open_engine(**msgspec.structs.asdict(options))


def describe(opened: OpenedEngine, load_seconds: float) -> EngineInfo:
    """Computes the model's digest, which reads all of its file."""
    facts = opened.info()
    checkpoint = opened.model.checkpoint
    digest = checkpoint.digest
    checkpoint.release_pages()
    formats = "+".join(sorted(opened.executor.weight_formats))
    return EngineInfo(
        **{name: facts[name] for name in EngineInfo.__struct_fields__ if name in facts},
        fingerprint=f"{opened.executor.arithmetic}:{digest[:16]}:{formats}:{opened.executor.kv_dtype}",
        digest=digest,
        eos_token_ids=sorted(opened.model.eos_token_ids),
        recommended_sampling={name: value for name, value in opened.model.recommended_sampling.items()},
        max_num_seqs=opened.engine.config.max_num_seqs,
        max_rows=opened.engine.config.max_rows,
        load_seconds=load_seconds,
        pid=os.getpid(),
    )


@contextmanager
def _heartbeats(connection: socket.socket) -> Iterator[None]:
    """Signs of life while this thread is busy for long; nobody else sends meanwhile."""
    finished = threading.Event()
    frame = ipc.encode(ipc.Loading())

    def beat() -> None:
        while not finished.wait(_HEARTBEAT):
            try:
                connection.sendall(frame)
            except OSError:  # nobody waits for the model any more
                os._exit(0)

    thread = threading.Thread(target=beat, name="octavo-loading", daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()


def _first_message(connection: socket.socket) -> ipc.Open | None:
    """None when the peer is gone already."""
    frames = ipc.FrameReader()
    while data := connection.recv(_READ_BYTES):
        for body in frames.feed(data):
            message = ipc.decode_to_engine(body)
            if not isinstance(message, ipc.Open):
                raise FrameError(f"the first message is {type(message).__name__}, not Open")
            return message
    return None


def _die_with(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before that
        sys.exit(0)


def main(open_model: Callable[[EngineOptions], OpenedEngine] = open_by_options) -> None:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(prog="octavo.engine.process")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", default="plain")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # at once: the engine keeps nothing that must be saved
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the supervisor asks where a stalled step hangs
    _die_with(arguments.parent)
    set_up_logging(arguments.log_level, arguments.log_format, "engine")
    log_uncaught()
    connection = socket.socket(fileno=arguments.fd)
    message = _first_message(connection)
    if message is None:
        return
    try:
        with _heartbeats(connection):
            opened = open_model(message.options)
            opened.engine.grammars.warm()
            info = describe(opened, time.monotonic() - begin)
    except OctavoError as error:
        connection.sendall(ipc.encode(ipc.LoadFailed(Failure.of(error))))
        return
    connection.sendall(ipc.encode(ipc.Hello(info)))
    try:
        EngineServer(connection, opened.engine).run()
    finally:
        opened.executor.close()


if __name__ == "__main__":
    main()
