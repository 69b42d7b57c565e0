"""The engine may die at any moment: streams pause, then go on with the bits they would have had."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import uvloop

from octavo.engine.client import EngineClient, EngineState
from octavo.engine.ipc import EngineOptions
from octavo.errors import (
    DeadlineError,
    EngineClosedError,
    EngineUnavailableError,
    InvalidParameterError,
    ModelNotFoundError,
    RequestFailedError,
)
from octavo.params import SamplingParams
from tests.server import chaos, chaos_server
from tests.support import clients
from tests.support.clients import (
    Heard,
    answers,
    assert_idle,
    hear,
    hit,
    is_running,
    mixed_cases,
    open_client,
    submit_all,
    until,
)
from tests.support.faulty_engine import VARIABLE
from tests.support.llms import environment
from tests.support.tiny_llm import write_tiny_llm

POISON = [128, 129, 130]  # in a row: single ones are drawn now and then
SLOW = {"step_seconds": 0.01}
CASES = mixed_cases(10, 40)
ENDLESS = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llm(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", autouse=True)
def uvloop_has_its_descriptors() -> None:
    """Two for the process, from its first loop on."""
    with closing(uvloop.new_event_loop()) as loop:
        loop.run_until_complete(asyncio.sleep(0))


@pytest.fixture(autouse=True)
def no_descriptor_leaks() -> Iterator[None]:
    before = clients.open_fds()
    yield
    assert clients.open_fds() <= before  # one that was collected late may be gone


# Death and replay


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_i24_streams_get_the_same_tokens_whatever_ends_the_engine(folder: Path, number: int, new_loop: Any) -> None:
    async def main() -> None:
        async with open_client(folder, faults=SLOW, stall_seconds=1.0) as client:
            expected = await answers(client, CASES)
            heard = [Heard() for _ in CASES]
            tasks = [asyncio.create_task(hear(*pair)) for pair in zip(submit_all(client, CASES), heard)]
            for enough in (3, 60, 200):  # tokens that all streams have when the engine is hit
                await until(lambda n=enough: sum(len(one.tokens) for one in heard) >= n)
                hit(client, number)
                await until(lambda: client.state is EngineState.RESTARTING)
                assert client.reason
                await until(lambda: client.state is EngineState.READY)
            await asyncio.gather(*tasks)
            assert [one.answer for one in heard] == expected
            assert client.restarts == 3
            assert client.stats.generated_tokens == 2 * sum(len(one.tokens) for one in heard)
            assert await answers(client, CASES) == expected

    with closing(new_loop()) as loop:
        loop.run_until_complete(main())


def test_a_request_without_a_seed_keeps_the_one_it_was_given_first(folder: Path) -> None:
    async def main() -> None:
        async with open_client(folder, faults=SLOW) as client:
            heard = Heard()
            task = asyncio.create_task(hear(client.submit("x", [5, 6, 7], SamplingParams(max_tokens=40)), heard))
            await until(lambda: len(heard.tokens) > 5)
            hit(client, signal.SIGKILL)
            await task
            assert heard.done is not None
            same = SamplingParams(max_tokens=40, seed=heard.done.seed)
            assert (await hear(client.submit("y", [5, 6, 7], same))).answer == heard.answer
            assert client.restarts == 1

    asyncio.run(main())


def test_streams_are_kept_alive_while_the_engine_is_away(folder: Path) -> None:
    async def main() -> None:
        async with open_client(folder, faults=SLOW, keep_alive=0.05) as client:
            stream = client.submit("x", [5, 6], ENDLESS)
            assert await anext(stream)
            hit(client, signal.SIGKILL)
            heard = await hear(stream)
            assert heard.pauses >= 1
            assert len(heard.tokens) == 199
            assert heard.done is not None
            assert heard.done.completion_tokens == 200

    asyncio.run(main())


def test_i25_an_idle_engine_that_is_stopped_is_found_without_a_request(folder: Path) -> None:
    async def main() -> None:
        async with open_client(folder, stall_seconds=0.5) as client:
            hit(client, signal.SIGSTOP)
            await until(lambda: client.restarts == 1)
            await client.wait_ready()
            assert (await hear(client.submit("x", [5, 6], SamplingParams(max_tokens=4)))).done is not None

    asyncio.run(main())


def test_requests_that_come_while_the_engine_is_away_wait_for_it(folder: Path) -> None:
    async def main() -> None:
        async with open_client(folder) as client:
            expected = await answers(client, CASES)
            hit(client, signal.SIGKILL)
            await until(lambda: client.state is EngineState.RESTARTING)
            assert await answers(client, CASES) == expected

    asyncio.run(main())


# Whose fault it was


@pytest.mark.parametrize("how", ["segv", "exit", "raise", "kill", "hang", "stop"])
def test_i25_i29_a_poison_request_gets_its_error_and_harms_nobody(folder: Path, how: str) -> None:
    async def main() -> None:
        faults = {**SLOW, "poison": POISON, "how": how}
        async with open_client(folder, faults=faults, stall_seconds=0.6) as client:
            cases = CASES[:6]
            expected = await answers(client, cases)
            poison = SamplingParams(max_tokens=9)
            streams = submit_all(client, cases[:3])
            streams.append(client.submit("poison", [7, *POISON, 8], poison))
            streams += submit_all(client, cases[3:])
            heard = await asyncio.gather(*map(hear, streams))
            bad = heard.pop(3)
            assert isinstance(bad.error, RequestFailedError)
            assert bad.tokens == []
            assert [one.answer for one in heard] == expected
            # What nobody can have done but the process itself needs no second proof.
            assert client.restarts == (3 if how in ("kill", "stop") else 2)
            assert client.state is EngineState.READY

    asyncio.run(main())


def test_i28_a_crash_loop_ends_down_with_a_reason_and_wellformed_errors(folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        doomed = tmp_path / "doomed"
        async with open_client(folder, faults={"doomed": str(doomed)}) as client:
            doomed.touch()
            heard = await asyncio.gather(*map(hear, submit_all(client, CASES)))
            assert client.state is EngineState.DOWN
            assert client.restarts == 4
            assert "status 4" in client.reason
            given_up = [one for one in heard if isinstance(one.error, RequestFailedError)]
            assert len(given_up) == 3
            assert all(isinstance(one.error, EngineUnavailableError) for one in heard if one not in given_up)
            with pytest.raises(EngineUnavailableError, match="status 4"):
                await client.wait_ready()
            with pytest.raises(EngineUnavailableError):
                await client.call("stats")
            late = await hear(client.submit("late", [5], SamplingParams()))
            assert isinstance(late.error, EngineUnavailableError)
            assert client._engine is None

    asyncio.run(main())


def test_another_arithmetic_after_a_restart_is_not_mixed_into_answers(folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        other = tmp_path / "other"
        async with open_client(folder, faults={**SLOW, "other": str(other)}) as client:
            stream = client.submit("x", [5, 6], ENDLESS)
            assert await anext(stream)
            other.touch()
            hit(client, signal.SIGKILL)
            heard = await hear(stream)
            assert isinstance(heard.error, RequestFailedError)
            assert "octavo-other-1" in str(heard.error)
            await client.wait_ready()
            assert (await hear(client.submit("y", [5, 6], SamplingParams(max_tokens=3)))).done is not None

    asyncio.run(main())


# One request among others


def test_bad_requests_get_the_validators_words_and_the_rest_go_on(folder: Path) -> None:
    async def main() -> None:
        async with open_client(folder) as client:
            good = asyncio.create_task(answers(client, CASES))
            bad: list[tuple[list[Any], dict[str, Any], str]] = [
                ([], {}, "prompt"),
                ([131], {}, "prompt_token_ids"),
                ([5], {"stop_token_ids": [131]}, "stop_token_ids"),
                ([5], {"prompt_logprobs": 1, "prompt_logprobs_start": 9}, "prompt_logprobs_start"),
                ([object()], {}, "prompt_token_ids"),
                ([1 << 70], {}, "prompt_token_ids"),
            ]
            for ids, params, field in bad:
                heard = await hear(client.submit("bad", ids, SamplingParams(**params)))
                assert isinstance(heard.error, InvalidParameterError)
                assert heard.error.field == field
                with pytest.raises(InvalidParameterError) as refused:
                    client.validate(ids, SamplingParams(**params))
                assert refused.value.field == field
            too_long = await hear(client.submit("long", [5] * 256, SamplingParams()))
            with pytest.raises(type(too_long.error) or Exception, match="not fit"):
                client.validate([5] * 256, SamplingParams())
            assert client.validate([5], SamplingParams()).seed is not None
            await good
            assert client.restarts == 0
            assert await answers(client, CASES) == good.result()

    asyncio.run(main())


def test_i21_cancelling_at_any_moment_frees_everything(folder: Path) -> None:
    async def main() -> None:
        async with open_client(folder, faults=SLOW) as client:
            expected = await answers(client, CASES[:4])
            others = asyncio.create_task(answers(client, CASES[:4]))
            for wanted in (0, 0, 1, 5):
                stream = client.submit("x", [9, 8, 7], ENDLESS)
                for _ in range(wanted):
                    await anext(stream)
                stream.cancel()
                stream.cancel()
                assert (await hear(stream)).error is None
            hit(client, signal.SIGKILL)
            during = client.submit("y", [9, 8, 7], ENDLESS)
            on_board = client.submit("z", [9, 8], ENDLESS)
            during.cancel()
            await asyncio.sleep(0)
            on_board.cancel()
            assert await others == expected
            await assert_idle(client)

    asyncio.run(main())


def test_deadlines_end_a_request_that_is_late_and_no_other(folder: Path) -> None:
    async def main() -> None:
        async with open_client(folder, faults={"step_seconds": 0.05}) as client:
            now = time.monotonic()
            late = client.submit("late", [5], ENDLESS, deadline=now + 0.3)
            first = client.submit("first", [6], ENDLESS, first_token_deadline=now)
            fine = client.submit("fine", [7], SamplingParams(max_tokens=9), first_token_deadline=now + 5)
            heard = await asyncio.gather(hear(late), hear(first), hear(fine))
            assert [type(one.error) for one in heard] == [DeadlineError, DeadlineError, type(None)]
            assert 0 < len(heard[0].tokens) < 200

    asyncio.run(main())


def test_a_queue_deadline_ends_what_is_still_queued_and_nothing_that_runs(folder: Path) -> None:
    async def main() -> None:
        async with open_client(folder, faults=SLOW, max_num_seqs=1) as client:
            soon = time.monotonic() + 0.3
            runs = client.submit("runs", [5], ENDLESS, queue_deadline=soon)
            queued = client.submit("queued", [6], ENDLESS, queue_deadline=soon)
            late = await hear(queued)
            assert isinstance(late.error, DeadlineError)
            assert late.tokens == []
            assert (await hear(runs)).done is not None

    asyncio.run(main())


# Beginnings and ends


def test_a_model_that_is_not_there_is_said_in_the_loaders_words(tmp_path: Path) -> None:
    async def main() -> None:
        options = EngineOptions(model=str(tmp_path / "nothing.gguf"))
        client = EngineClient(options, environment=environment())
        await client.start()
        early = client.submit("early", [5], SamplingParams())
        with pytest.raises(ModelNotFoundError, match="neither a known name"):
            await client.wait_ready()
        assert client.state is EngineState.DOWN
        assert isinstance((await hear(early)).error, ModelNotFoundError)
        assert client.restarts == 0
        await client.close()

    asyncio.run(main())


def test_close_ends_streams_and_the_process_at_any_time(folder: Path) -> None:
    async def main() -> None:
        for moment in ("loading", "stopped", "running"):
            options = EngineOptions(model=str(folder), kv_memory="2MB")
            slowly = {**environment(), VARIABLE: json.dumps(SLOW)}  # else the stream may have ended before
            client = EngineClient(options, environment=slowly, module=clients.FAULTY)
            await client.start()
            await asyncio.sleep(0.05)
            stream = client.submit("x", [5], ENDLESS)
            if moment != "loading":
                assert await anext(stream) is not None
            if moment == "stopped":
                hit(client, signal.SIGSTOP)
            pid = client.engine_pid
            await client.close()
            await client.close()
            assert not is_running(pid)
            assert isinstance((await hear(stream)).error, EngineClosedError)
            with pytest.raises(EngineClosedError):
                await client.wait_ready()

    asyncio.run(main())


PARENT = """
import asyncio, sys
from octavo.engine.client import EngineClient
from octavo.engine.ipc import EngineOptions
from octavo.params import SamplingParams

async def main():
    client = EngineClient(EngineOptions(model=sys.argv[1], kv_memory="2MB"), module=sys.argv[2])
    await client.start()
    await client.wait_ready()
    stream = client.submit("x", [5], SamplingParams(max_tokens=200, ignore_eos=True))
    await anext(stream)
    print(client.engine_pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("busy", [False, True])
def test_i26_the_engine_is_gone_when_its_parent_is_killed(folder: Path, busy: bool) -> None:
    """Idle, and in the middle of a step."""
    variables = {**environment(), VARIABLE: json.dumps({"step_seconds": 0.5 if busy else 0.0})}
    command = [sys.executable, "-c", PARENT, str(folder), clients.FAULTY]
    parent = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
    assert is_running(pid)
    os.kill(pid, signal.SIGINT)  # Ctrl-C is the parent's business
    time.sleep(0.1)
    assert is_running(pid)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 5
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_i26_i27_a_server_that_is_ended_at_any_moment_tells_its_clients_and_leaves_nothing(folder: Path) -> None:
    report = chaos_server.run(folder, terms=2, kills=1, seed=3)
    assert (len(report.drained), len(report.hurried), len(report.orphans)) == (1, 1, 1)


def test_i24_chaos_changes_no_bit_and_leaves_nothing_behind(folder: Path) -> None:
    report = asyncio.run(chaos.run(folder, kills=4, stops=1, poisons=1, seed=2))
    assert (report.rounds, report.streams, report.poisoned) == (6, 96, 1)
