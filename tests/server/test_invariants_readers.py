"""Readers of streams: fast, slow, stalled, gone; none costs more than its bound, none is cut off unduly."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.client import EngineClient, EngineState
from octavo.engine.ipc import EngineOptions, Token
from octavo.engine.stream import RequestStream
from octavo.errors import EngineClosedError, SlowReaderError
from octavo.limits import MAX_STREAM_TOKENS
from octavo.params import SamplingParams
from octavo.server.generation import _merged
from tests.support.clients import assert_idle, hear, open_client
from tests.support.llms import environment
from tests.support.tiny_llm import write_tiny_llm

ENDLESS = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llm(tmp_path_factory.mktemp("tiny"))


def stream() -> RequestStream:
    return RequestStream("x", asyncio.get_running_loop(), lambda: None)


def burst(one: RequestStream, count: int) -> None:
    for position in range(count):
        one.push([Token(0, position, 5, "a")])


async def read(one: RequestStream, seconds: float = 0.0) -> int:
    found = 0
    async for tokens in one:
        found += len(tokens)
        if seconds:
            await asyncio.sleep(seconds)
    return found


@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize("waits", [True, False])
def test_i22_a_burst_after_a_stall_of_this_process_cuts_no_reader_off(readers: int, waits: bool) -> None:
    """Frames come before any task runs; those of several streams go through one queue, an item a turn."""

    async def main() -> None:
        streams = [stream() for _ in range(readers)]
        count = 3 * MAX_STREAM_TOKENS

        async def both() -> int:
            return sum([len(tokens) async for _, tokens in _merged(streams)])

        task = asyncio.create_task(read(streams[0]) if readers == 1 else both())
        if waits:
            await asyncio.sleep(0)
        for one in streams:
            burst(one, count)
        time.sleep(0.3)  # and the process stalls again, for longer than any grace
        for one in streams:
            one.end(None)
        assert await task == readers * count

    asyncio.run(main())


def test_i22_a_stall_of_this_process_under_a_running_engine_ends_no_stream(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.engine.stream.MAX_STREAM_TOKENS", 10)

    async def main() -> None:
        async with open_client(folder) as client:
            tasks = [asyncio.create_task(hear(client.submit("x", [5, 6, i], ENDLESS))) for i in range(3)]
            for _ in range(4):
                await asyncio.sleep(0.01)
                time.sleep(0.2)
            for heard in await asyncio.gather(*tasks):
                assert heard.error is None
                assert len(heard.tokens) == 200

    asyncio.run(main())


@pytest.mark.parametrize("seconds", [0.01, 60.0])
def test_i22_who_reads_too_slowly_or_not_at_all_is_cut_off_and_holds_nothing(seconds: float) -> None:
    async def main() -> None:
        one = stream()
        reader = asyncio.create_task(read(one, seconds))
        most = 0
        for _ in range(200):
            if one.open:
                burst(one, 100)
            most = max(most, one._unread)
            await asyncio.sleep(0.005)
        assert not one.open
        assert (one._unread, len(one._items)) == (0, 0)
        assert most < MAX_STREAM_TOKENS + 100 * 100  # what came while it was being looked at
        if seconds < 1:
            with pytest.raises(SlowReaderError):
                await reader
        reader.cancel()

    asyncio.run(main())


def test_i22_a_stalled_reader_is_cut_off_and_others_go_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.engine.stream.MAX_STREAM_TOKENS", 50)

    async def main() -> None:
        async with open_client(folder, faults={"step_seconds": 0.01}) as client:
            stalled = client.submit("stalled", [5, 6], ENDLESS)
            reading = await hear(client.submit("reading", [5, 7], ENDLESS))
            assert len(reading.tokens) == 200
            assert len(stalled._items) == 0
            assert isinstance((await hear(stalled)).error, SlowReaderError)
            await assert_idle(client)

    asyncio.run(main())


def left_of(client: EngineClient) -> tuple[int, ...]:
    replay = client._replay
    sizes = (replay.entries, replay._aboard, replay._waiting, replay._suspects, client._calls)
    return (*map(len, sizes), len(client._watchdog.first_tokens_due))


def test_i8_nothing_of_a_request_is_kept_once_it_is_over(folder: Path) -> None:
    """However it ended, and without waiting for the garbage collector."""
    far = time.monotonic() + 1000
    deadlines = {"deadline": far, "first_token_deadline": far, "queue_deadline": far}

    async def main() -> None:
        async with open_client(folder, faults={"step_seconds": 0.005}) as client:
            bad: Any = [object()]
            cases: list[tuple[list[int], SamplingParams]] = [
                ([5, 6], SamplingParams(max_tokens=3)),
                ([5, 6], SamplingParams(max_tokens=3, n=3)),
                ([], SamplingParams()),  # refused by the engine
                (bad, SamplingParams()),  # not even a message
                ([5] * 256, SamplingParams()),  # can never fit
            ]
            held: list[weakref.ref[Any]] = []
            gc.collect()
            gc.disable()
            try:
                for ids, params in cases:
                    one = client.submit("x", ids, params, **deadlines)
                    if one.open:
                        held.append(weakref.ref(one._on_cancel))  # it knows the entry
                    await hear(one)
                    assert one.timers == []
                for wanted in (0, 1):  # left by its reader
                    one = client.submit("x", [5], ENDLESS, **deadlines)
                    held.append(weakref.ref(one._on_cancel))
                    for _ in range(wanted):
                        await anext(one)
                    one.cancel()
                    assert one.timers == []
                await assert_idle(client)
                assert [reference() for reference in held] == [None] * len(held)
            finally:
                gc.enable()
            end = time.monotonic() + 5  # the engine's last word on who left is on its way
            while left_of(client) != (0,) * 6 and time.monotonic() < end:
                await asyncio.sleep(0.01)
            assert left_of(client) == (0,) * 6

    asyncio.run(main())


def test_i8_requests_of_a_closed_or_fallen_engine_leave_nothing(folder: Path) -> None:
    async def main() -> None:
        client = EngineClient(EngineOptions(model=str(folder), kv_memory="2MB"), environment=environment())
        await client.start()
        early = client.submit("early", [5], ENDLESS, deadline=time.monotonic() + 100)
        cancelled = client.submit("cancelled", [5], ENDLESS, queue_deadline=time.monotonic() + 100)
        cancelled.cancel()
        await client.close()
        late = client.submit("late", [5], ENDLESS, deadline=time.monotonic() + 100)
        late.cancel()
        client._go(EngineState.DOWN, "planted")
        down = client.submit("down", [5], ENDLESS, first_token_deadline=time.monotonic() + 100)
        for one in (early, cancelled, late, down):
            assert one.timers == []
            assert not one.open
        assert isinstance((await hear(early)).error, EngineClosedError)
        assert left_of(client) == (0,) * 6

    asyncio.run(main())
