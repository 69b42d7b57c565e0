"""Frames between the processes: typed, capped, and harmless when they are not what they should be."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo import errors
from octavo.engine import ipc
from octavo.engine.process import EngineServer
from octavo.engine.replay import CrashLog, Entry, Replay
from octavo.engine.stats import EngineStats
from octavo.engine.watchdog import Watchdog
from octavo.errors import FrameError, InvalidParameterError, OctavoError, RequestFailedError
from octavo.params import SamplingParams
from tests.support.engines import engine_of, load_tiny

TOKEN = ipc.Token(1, 7, 42, "ä", [ipc.TokenLogprob(42, -0.1, 1, b"\xc3")], "stop", "ä")
DONE = ipc.Done(3, 2, 1, (1 << 63) - 1, ipc.Moments(0.1, 0.2, 0.3, 0.4), [None, [ipc.TokenLogprob(1, -9.5, 3, b"x")]])
TO_ENGINE: list[ipc.ToEngine] = [
    ipc.Open(ipc.EngineOptions(model="x", kv_memory="2GiB")),
    ipc.Submit(3, [1, 2], SamplingParams(n=2, seed=-5, stop=["a"], logit_bias={7: -1.5}, priority=-3), [[4], []]),
    ipc.Cancel(4),
    ipc.Call(5, "stats"),
]
FROM_ENGINE: list[ipc.FromEngine] = [
    ipc.Loading(),
    ipc.LoadFailed(ipc.Failure("CapacityError", "too much")),
    ipc.Step(ipc.Counters(1, 2), [ipc.Update(3, [TOKEN], ipc.Started(16, 1.5), DONE), ipc.Update(4, [])]),
    ipc.Step(ipc.Counters(), [ipc.Update(3, [], None, ipc.Cancelled())]),
    ipc.Reply(5, {"a": [1.5, None]}),
]


def bodies(data: bytes, pieces: int = 1) -> list[bytes]:
    reader = ipc.FrameReader()
    size = -(-len(data) // pieces)
    return [bytes(body) for i in range(0, len(data), size) for body in reader.feed(data[i : i + size])]


def test_every_message_comes_out_as_it_went_in_however_it_is_cut() -> None:
    stream = b"".join(map(ipc.encode, TO_ENGINE))
    for pieces in (1, 2, 7, len(stream)):
        assert [ipc.decode_to_engine(body) for body in bodies(stream, pieces)] == TO_ENGINE
    stream = b"".join(map(ipc.encode, FROM_ENGINE))
    for pieces in (1, 3, len(stream)):
        assert [ipc.decode_from_engine(body) for body in bodies(stream, pieces)] == FROM_ENGINE


def test_a_length_over_the_cap_is_refused_before_its_bytes_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "MAX_FRAME_BYTES", 1000)
    assert bodies((1000).to_bytes(4, "big") + b"x" * 1000) == [b"x" * 1000]
    for data in ((1001).to_bytes(4, "big"), b"\xff\xff\xff\xff", (1001).to_bytes(4, "big") + b"x" * 1001):
        with pytest.raises(FrameError, match="longer than the 1000 allowed"):
            bodies(data)
    with pytest.raises(FrameError, match="longer than the 1000 allowed"):
        ipc.encode(ipc.Submit(1, [7] * 1000, SamplingParams(seed=1), []))


@given(st.binary(max_size=200))
def test_i37_random_bytes_are_a_typed_error_or_a_message(body: bytes) -> None:
    for decode in (ipc.decode_to_engine, ipc.decode_from_engine):
        with suppress(FrameError):
            assert isinstance(decode(body), msgspec.Struct)


@pytest.mark.parametrize(
    "message",
    [
        [2, 1, [1], {"n": 0}, []],
        [2, 1, [1], {"temperature": float("nan")}, []],
        [2, 1, ["a"], {}, []],
        [2, "1", [1], {}, []],
        [9, 1],
        [2],
        {"number": 1},
        [4, 1, 2],
    ],
)
def test_a_message_of_the_wrong_shape_is_a_typed_error(message: Any) -> None:
    with pytest.raises(FrameError, match="malformed"):
        ipc.decode_to_engine(msgspec.msgpack.encode(message))


def test_deep_nesting_is_a_typed_error() -> None:
    with pytest.raises(FrameError):
        ipc.decode_from_engine(b"\x93\x05\x01" + b"\x91" * 100_000)


@pytest.mark.parametrize("kind", [k for k in vars(errors).values() if isinstance(k, type)])
def test_an_error_arrives_with_its_type_and_words(kind: type[OctavoError]) -> None:
    error = kind.__new__(kind)
    Exception.__init__(error, "what it says")
    if isinstance(error, InvalidParameterError):
        error = InvalidParameterError("top_k", 1 << 80, "less")
    arrived = ipc.Failure.of(error).error()
    assert (type(arrived), str(arrived)) == (type(error), str(error))
    if isinstance(arrived, InvalidParameterError) and isinstance(error, InvalidParameterError):
        assert (arrived.field, arrived.allowed) == (error.field, error.allowed)


def test_a_foreign_errors_words_do_not_leave_the_engine() -> None:
    arrived = ipc.Failure.of(KeyError("/home/someone")).error()
    assert isinstance(arrived, RequestFailedError)
    assert "someone" not in str(arrived)
    assert isinstance(ipc.Failure("Exception", "x").error(), RequestFailedError)


# The engine's side of the socket, on a thread of this process


class Peer:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._reader = ipc.FrameReader()
        self._messages: list[ipc.FromEngine] = []

    def send(self, *messages: ipc.ToEngine) -> None:
        self.connection.sendall(b"".join(map(ipc.encode, messages)))

    def receive(self) -> ipc.FromEngine:
        while not self._messages:
            data = self.connection.recv(1 << 16)
            assert data, "the engine has closed"
            self._messages += map(ipc.decode_from_engine, self._reader.feed(data))
        return self._messages.pop(0)

    def end_of(self, number: int) -> Any:
        while True:
            message = self.receive()
            for update in message.updates if isinstance(message, ipc.Step) else ():
                if update.number == number and update.end is not None:
                    return update.end


@contextmanager
def served(tmp_path: Path) -> Iterator[Peer]:
    with engine_of(load_tiny(tmp_path)) as engine:
        ours, theirs = socket.socketpair()
        ours.settimeout(20)
        thread = threading.Thread(target=EngineServer(theirs, engine).run)
        thread.start()
        try:
            with theirs:
                yield Peer(ours)
                ours.close()
                thread.join(10)
                assert not thread.is_alive()
        finally:
            ours.close()
            thread.join(10)


def test_i37_random_frames_do_not_stop_the_engine(tmp_path: Path) -> None:
    source = random.Random(5)
    submit = msgspec.msgpack.encode(TO_ENGINE[1])
    bodies = []
    for _ in range(3000):
        body = bytearray(submit if source.random() < 0.2 else source.randbytes(source.randrange(1, 60)))
        body[source.randrange(len(body))] = source.randrange(256)
        bodies.append(len(body).to_bytes(4, "big") + body)
    last = ipc.Submit(99_999_999, [5, 6], SamplingParams(max_tokens=3, seed=1, ignore_eos=True), [])
    bodies.append(ipc.encode(last))
    with served(tmp_path) as peer:
        # While this thread reads: some of these are requests that can be served.
        writer = threading.Thread(target=peer.connection.sendall, args=[b"".join(bodies)])
        writer.start()
        end = peer.end_of(99_999_999)
        writer.join()
        assert isinstance(end, ipc.Done)
        assert end.completion_tokens == 3


def test_one_frame_a_step_carries_every_request(tmp_path: Path) -> None:
    with served(tmp_path) as peer:
        params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
        peer.send(*(ipc.Submit(i, [5, 6, i], params, []) for i in range(8)))
        steps, together = 0, 0
        ended: set[int] = set()
        while len(ended) < 8:
            message = peer.receive()
            assert isinstance(message, ipc.Step)
            steps += 1
            together = max(together, len(message.updates))
            ended |= {update.number for update in message.updates if update.end is not None}
        assert together == 8
        assert steps == message.counters.steps
        assert message.counters.running == message.counters.blocks_used == 0


def test_a_bad_call_and_a_bad_request_get_their_errors(tmp_path: Path) -> None:
    with served(tmp_path) as peer:
        peer.send(ipc.Call(1, "quit"))
        reply = peer.receive()
        assert isinstance(reply, ipc.Reply)
        assert reply.failure is not None
        assert isinstance(reply.failure.error(), InvalidParameterError)
        params = SamplingParams(max_tokens=2, seed=1)
        peer.send(ipc.Submit(2, [5], params, [[6, 7, 8]]), ipc.Submit(3, [5], params, [[1], [2]]))
        assert isinstance(peer.end_of(2), ipc.Failure)
        peer.send(ipc.Cancel(77))
        assert isinstance(peer.end_of(77), ipc.Cancelled)


def test_prompt_logprobs_too_long_for_a_frame_end_their_request_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(tmp_path) as peer:
        monkeypatch.setattr(ipc, "MAX_FRAME_BYTES", 2000)
        params = SamplingParams(max_tokens=2, seed=1, ignore_eos=True)
        long = SamplingParams(max_tokens=2, seed=1, ignore_eos=True, prompt_logprobs=20)
        peer.send(ipc.Submit(1, [5] * 60, long, []), ipc.Submit(2, [5], params, []))
        ends = {}
        while len(ends) < 2:
            message = peer.receive()
            assert isinstance(message, ipc.Step)
            ends |= {update.number: update.end for update in message.updates if update.end is not None}
        assert isinstance(ends[1], ipc.Failure)
        assert isinstance(ends[2], ipc.Done)


# The rules of a replay, without processes


def entry(number: int) -> Entry:
    stream: Any = None
    return Entry(number, [1], SamplingParams(), stream, 0.0, 0.0)


def board(replay: Replay, numbers: range) -> list[Entry]:
    replay.engine_up()
    entries = [entry(number) for number in numbers]
    for one in entries:
        assert replay.take(one) == [one]
    return entries


def test_suspects_run_alone_until_each_has_a_token_then_all_together() -> None:
    replay = Replay()
    a, b, c = board(replay, range(3))
    assert replay.engine_died(own_fault=True) == []
    late = entry(9)
    assert replay.take(late) == []
    assert replay.engine_up() == [a]
    assert replay.made_token(b) == (False, [])
    assert replay.made_token(a) == (True, [])  # withdrawn
    assert replay.made_token(a) == (False, [])
    assert replay.left_engine(a.number) == [b]
    assert replay.forget(b)  # cancelled by its client: the next one waits until it is out
    assert replay.left_engine(b.number) == [c]
    assert not replay.settled
    assert replay.made_token(c) == (False, [a, late])  # the last need not leave
    assert replay.settled


@given(st.lists(st.sampled_from(["up", "died", "killed", "token", "end", "cancel", "new"]), max_size=60), st.randoms())
def test_no_request_is_lost_or_on_board_twice(actions: list[str], source: random.Random) -> None:
    replay, up, aboard, alive, numbers = Replay(), False, set[int](), dict[int, Entry](), iter(range(1000))

    def submitted(entries: list[Entry]) -> None:
        for one in entries:
            assert up
            assert one.number not in aboard
            aboard.add(one.number)
        if not replay.settled:
            assert len(aboard) <= 1

    def leave(number: int) -> None:
        aboard.discard(number)
        submitted(replay.left_engine(number))

    for action in [*actions, "up"]:
        running = [alive[number] for number in sorted(aboard) if number in alive]
        if action == "new":
            one = entry(next(numbers))
            alive[one.number] = one
            submitted(replay.take(one))
        elif action == "up" and not up:
            up = True
            submitted(replay.engine_up())
        elif action in ("died", "killed") and up:
            up = False
            aboard.clear()
            for one in replay.engine_died(own_fault=action == "died"):
                replay.forget(alive.pop(one.number))
        elif action == "cancel" and alive:
            one = alive.pop(source.choice(sorted(alive)))
            if replay.forget(one):
                leave(one.number)
        elif action == "token" and running:
            one = source.choice(running)
            withdraw, entries = replay.made_token(one)
            submitted(entries)
            if withdraw:
                leave(one.number)
        elif action == "end" and running:
            one = source.choice(running)
            replay.forget(alive.pop(one.number))
            leave(one.number)
    for _ in range(2 * len(alive)):
        for number in sorted(aboard):
            withdraw, entries = replay.made_token(alive[number])
            submitted(entries)
            if withdraw:
                leave(number)
    assert replay.settled
    assert aboard == set(alive) == set(replay.entries)


def test_i28_down_after_more_than_three_crashes_in_a_minute_without_a_token() -> None:
    log = CrashLog()
    assert [log.crashed(time) for time in (0, 1, 2, 3)] == [False, False, False, True]
    log = CrashLog()
    assert not any(log.crashed(time) for time in (0, 30, 59, 61, 120, 150))
    log = CrashLog()
    for time in range(10):
        assert not log.crashed(time)
        log.made_token()


def test_totals_outlive_an_engine() -> None:
    stats = EngineStats()
    assert stats.absorb(ipc.Counters(running=2, steps=5, computed_tokens=50)) == 5
    assert stats.absorb(ipc.Counters(running=3, steps=7, computed_tokens=60)) == 2
    stats.engine_ended()
    assert (stats.running, stats.steps, stats.computed_tokens) == (0, 7, 60)
    assert stats.absorb(ipc.Counters(steps=1, computed_tokens=4)) == 1
    assert (stats.steps, stats.computed_tokens) == (8, 64)


def test_tokens_the_reader_has_are_dropped_and_impossible_ones_refused() -> None:
    one = Entry(1, [1], SamplingParams(n=2, temperature=1.0), None, 0.0, 0.0, emitted=[[5], []])  # type: ignore[arg-type]
    tokens = [ipc.Token(0, 0, 5, "a"), ipc.Token(0, 1, 6, "b"), ipc.Token(1, 0, 7, "c")]
    assert [token.text for token in one.accept(tokens)] == ["b", "c"]
    assert one.emitted == [[5, 6], [7]]
    for bad in (ipc.Token(0, 3, 5, ""), ipc.Token(2, 0, 5, ""), ipc.Token(-1, 0, 5, "")):
        with pytest.raises(FrameError):
            one.accept([bad])


# When silence is too long


def info(**facts: Any) -> ipc.EngineInfo:
    texts = dict.fromkeys(("model", "path", "fingerprint", "arithmetic", "digest", "architecture"), "")
    numbers = dict.fromkeys(("context", "max_model_len", "vocab_size", "weight_bytes", "num_blocks", "block_bytes"), 1)
    rest = {"eos_token_ids": [], "recommended_sampling": {}, "weights": {}, "kv_dtype": "", "kv_memory": ""}
    return ipc.EngineInfo(**{**texts, **numbers, **rest, **facts})  # type: ignore[arg-type]


def test_silence_is_measured_by_what_the_step_may_be() -> None:
    watchdog, stats = Watchdog(10.0, 0.0), EngineStats()
    big = info(macs_per_token=7_000_000_000, max_rows=512)
    assert watchdog.limit(None, stats) == 10.0
    watchdog.engine_started()
    assert watchdog.limit(None, stats) == 30.0  # until its libraries are loaded
    watchdog.heard(0.0)
    assert watchdog.limit(None, stats) == 10.0
    stats.absorb(ipc.Counters(running=4, step_rows=4))
    decoding = watchdog.limit(big, stats)
    assert 10 < decoding < 20
    watchdog.first_tokens_due.add(1)  # a prompt may take all rows of a step
    assert watchdog.limit(big, stats) > 500
    watchdog.first_tokens_due.clear()
    stats.absorb(ipc.Counters(running=4, step_rows=4, waiting=1))
    assert watchdog.limit(big, stats) > 500
    stats.absorb(ipc.Counters(running=4, step_rows=300))  # a preempted one computes its prompt again
    assert watchdog.limit(big, stats) > 500


def test_only_time_that_was_owed_and_seen_counts() -> None:
    watchdog = Watchdog(10.0, 0.0)
    assert not watchdog.look(0.25, owes=False)
    assert watchdog.look(1.25, owes=False)  # idle for long enough: a ping
    assert watchdog.silent == 0
    assert not watchdog.look(1.5, owes=False)
    assert watchdog.silent == 0.25  # the answer is owed
    watchdog.heard(1.6)
    assert watchdog.silent == 0
    watchdog.look(1.75, owes=True)
    watchdog.look(1000.0, owes=True)  # this process was suspended, or its loop was blocked
    assert watchdog.silent < 1
    for i in range(40):
        watchdog.look(1000.25 + i / 4, owes=True)
    assert watchdog.silent > 10
