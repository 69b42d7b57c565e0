"""The engine fails: clocks of requests go on, innocence is regained, and nothing it could say ends the API process."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine import ipc
from octavo.engine.client import EngineClient, EngineState
from octavo.engine.replay import Entry, Replay
from octavo.errors import DeadlineError, EngineUnavailableError, FrameError
from octavo.params import SamplingParams
from tests.support.clients import hear, hit, open_client, until
from tests.support.tiny_llm import write_tiny_llm

ENDLESS = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True, seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llm(tmp_path_factory.mktemp("tiny"))


# Clocks


@pytest.mark.parametrize("which", ["queue_deadline", "first_token_deadline", "deadline"])
def test_a_deadline_passes_while_the_engine_is_away(folder: Path, which: str) -> None:
    async def main() -> None:
        async with open_client(folder) as client:
            hit(client, signal.SIGKILL)
            await until(lambda: client.state is EngineState.RESTARTING)
            begin = time.monotonic()
            deadlines: dict[str, float] = {which: begin + 0.05}
            heard = await hear(client.submit("x", [5], ENDLESS, **deadlines))
            assert isinstance(heard.error, DeadlineError)
            assert client.state is EngineState.RESTARTING
            await client.wait_ready()

    asyncio.run(main())


@pytest.mark.parametrize("which", ["queue_deadline", "first_token_deadline", "deadline"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_deadline_of_a_queued_request_goes_on_over_a_death_of_the_engine(
    folder: Path, which: str, number: int
) -> None:
    """Also when it passes just then: the engine was asked whether the request is still queued, and never answered."""

    async def main() -> None:
        async with open_client(folder, faults={"step_seconds": 0.02}, max_num_seqs=1, stall_seconds=0.8) as client:
            runs = client.submit("runs", [5], ENDLESS, queue_deadline=time.monotonic() + 5)
            assert await anext(runs)
            deadlines: dict[str, float] = {which: time.monotonic() + 0.3}
            queued = asyncio.create_task(hear(client.submit("queued", [6], ENDLESS, **deadlines)))
            await asyncio.sleep(0.05)
            hit(client, number)
            heard = await queued
            assert isinstance(heard.error, DeadlineError)
            assert heard.tokens == []
            assert len((await hear(runs)).tokens) == 199
            assert client.restarts == 1

    asyncio.run(main())


def test_who_has_left_the_queue_in_time_is_not_ended_by_a_death_of_the_engine(folder: Path) -> None:
    """Its first token takes long, and its queue deadline passes meanwhile."""

    async def main() -> None:
        async with open_client(folder, faults={"step_seconds": 0.4}) as client:
            params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
            running = asyncio.create_task(hear(client.submit("x", [5] * 100, params)))
            await asyncio.sleep(0.1)
            entry = next(iter(client._replay.entries.values()))
            client._overdue(entry)
            assert entry.overdue
            await until(lambda: not entry.overdue)
            hit(client, signal.SIGKILL)
            heard = await running
            assert heard.error is None
            assert len(heard.tokens) == 2
            assert client.restarts == 1

    asyncio.run(main())


# Suspicion


def entry_of(number: int) -> Entry:
    stream: Any = None
    return Entry(number, [1], SamplingParams(), stream, 0.0, 0.0)


def test_i29_who_has_made_a_token_alone_is_innocent_again() -> None:
    """Deaths that anybody may have caused count in a row only: a long stream outlives any number of kill -9."""
    replay, one = Replay(), entry_of(1)
    replay.engine_up()
    replay.take(one)
    assert replay.engine_died(own_fault=False) == []
    for _ in range(5):
        assert replay.engine_up() == [one]
        assert replay.engine_died(own_fault=False) == []  # alone, the first time
        assert replay.engine_up() == [one]
        assert replay.made_token(one) == (False, [])
        assert replay.engine_died(own_fault=False) == []
    assert replay.engine_up() == [one]
    assert replay.engine_died(own_fault=False) == []
    assert replay.engine_up() == [one]
    assert replay.engine_died(own_fault=False) == [one]


def test_i29_a_withdrawn_request_is_innocent_too() -> None:
    replay, a, b = Replay(), entry_of(1), entry_of(2)
    replay.engine_up()
    replay.take(a)
    replay.take(b)
    assert replay.engine_died(own_fault=False) == []
    assert replay.engine_up() == [a]
    assert replay.engine_died(own_fault=False) == []
    assert replay.engine_up() == [b]
    assert replay.made_token(b) == (True, [])
    assert replay.left_engine(b.number) == [a]
    assert replay.made_token(a) == (False, [b])
    assert a.solo_deaths == b.solo_deaths == 0


# Whatever the engine says


INT = st.one_of(st.integers(-3, 8), st.sampled_from([-(1 << 63), (1 << 63) - 1, 1 << 31]))
NUMBER = st.floats(allow_nan=True, allow_infinity=True)
COUNTERS = st.builds(ipc.Counters, *([INT] * 5), NUMBER, NUMBER, *([INT] * 6))
LOGPROB = st.builds(ipc.TokenLogprob, INT, NUMBER, INT, st.binary(max_size=3))
TOKEN = st.builds(ipc.Token, INT, INT, INT, st.text(max_size=3), st.none() | st.lists(LOGPROB, max_size=2), st.none())
STARTED = st.builds(ipc.Started, INT, NUMBER)
MOMENTS = st.builds(ipc.Moments, NUMBER, NUMBER, NUMBER, NUMBER)
FAILURE = st.builds(ipc.Failure, st.sampled_from(["CapacityError", "Exception", "", "INVALID"]), st.text(max_size=5))
END = st.one_of(st.none(), st.builds(ipc.Done, INT, INT, INT, INT, MOMENTS), FAILURE, st.just(ipc.Cancelled()))
UPDATE = st.builds(ipc.Update, INT, st.lists(TOKEN, max_size=3), st.none() | STARTED, END)
MESSAGE = st.one_of(
    st.builds(ipc.Step, COUNTERS, st.lists(UPDATE, max_size=4)),
    st.builds(ipc.Reply, INT, st.none() | INT | st.text(max_size=3), st.none() | FAILURE),
    st.builds(ipc.LoadFailed, FAILURE),
    st.just(ipc.Loading()),
)


class FakeEngine:
    def __init__(self) -> None:
        self.hello: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.sent: list[ipc.ToEngine] = []

    def send(self, message: ipc.ToEngine) -> None:
        self.sent.append(message)


@settings(max_examples=200, deadline=None)
@given(st.lists(MESSAGE, min_size=1, max_size=12))
def test_i37_whatever_the_engine_says_is_taken_or_refused_by_name(messages: list[ipc.FromEngine]) -> None:
    """A FrameError ends that engine, and its requests are replayed; nothing else may come of it."""

    async def main() -> None:
        client = EngineClient(ipc.EngineOptions())
        engine: Any = FakeEngine()
        client._engine = engine
        client._submit(client._replay.engine_up())
        client._tell_ready()
        streams = [client.submit(str(i), [5], SamplingParams(n=2, temperature=1.0)) for i in range(3)]
        call = asyncio.create_task(client.call("stats"))
        await asyncio.sleep(0)
        for message in messages:
            try:
                client._on_message(engine, ipc.decode_from_engine(ipc.encode(message)[4:]))
            except FrameError:
                break
        assert all(len(ids) <= 40 for e in client._replay.entries.values() for ids in e.emitted)
        client._fail_calls(EngineUnavailableError("over"))
        await asyncio.wait([call])
        call.exception()
        for one in streams:
            one.cancel()
            assert one.timers == []
        assert client._replay.entries == {}
        assert client._calls == {}
        assert not client._watchdog.first_tokens_due

    asyncio.run(main())


def test_i37_a_babbling_engine_is_replaced_and_its_requests_go_on(folder: Path, tmp_path: Path) -> None:
    babble = tmp_path / "babble"

    async def main() -> None:
        problems: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
        async with open_client(folder, faults={"babble": str(babble)}) as client:
            expected = (await hear(client.submit("x", [5, 6], ENDLESS))).answer
            for number in range(3):
                babble.write_text(str(number))
                stream = client.submit("x", [5, 6], ENDLESS)
                await until(lambda n=number: client.restarts == n + 1)
                babble.unlink()
                assert (await hear(stream)).answer == expected
        assert problems == []

    asyncio.run(main())


def test_i37_frames_are_typed_and_capped_in_both_directions() -> None:
    """No field of any message takes what is not of its type; `Any` is nowhere but in the value of a reply."""
    loose = []
    for kind in vars(ipc).values():
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            for info in msgspec.structs.fields(kind):
                if info.type is Any:
                    loose.append(f"{kind.__name__}.{info.name}")
    assert loose == ["Reply.value"]
