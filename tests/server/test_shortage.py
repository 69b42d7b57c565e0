"""When the system has no descriptor, memory or process to give, the engine waits for one; nothing is given up."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.client import EngineClient, EngineState
from octavo.params import SamplingParams
from tests.support.clients import hear, open_client
from tests.support.tiny_llm import write_tiny_llm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llm(tmp_path_factory.mktemp("tiny"))


class Shortage:
    """Starting an engine fails so many times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, where: str, number: int) -> None:
        self.left = 0
        self.failures = 0
        owner, name = {"socketpair": (socket, "socketpair"), "process": (subprocess, "Popen")}[where]
        real = getattr(owner, name)

        def scarce(*given: Any, **options: Any) -> Any:
            if self.left > 0:
                self.left -= 1
                self.failures += 1
                raise OSError(number, os.strerror(number))
            return real(*given, **options)

        monkeypatch.setattr(owner, name, scarce)


async def until(client: EngineClient, state: EngineState) -> None:
    end = time.monotonic() + 20
    while client.state is not state:
        assert time.monotonic() < end, client.reason
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("where", "number"),
    [("socketpair", errno.EMFILE), ("socketpair", errno.ENFILE), ("process", errno.ENOMEM), ("process", errno.EAGAIN)],
)
def test_an_engine_that_cannot_be_started_for_want_of_something_is_no_crash(
    folder: Path, monkeypatch: pytest.MonkeyPatch, where: str, number: int
) -> None:
    shortage = Shortage(monkeypatch, where, number)

    async def run() -> None:
        async with open_client(folder, stall_seconds=0.4) as client:
            stream = client.submit("r", [3, 4, 5], SamplingParams(max_tokens=300, ignore_eos=True))
            shortage.left = 4
            assert client.engine_pid is not None
            os.kill(client.engine_pid, signal.SIGKILL)
            heard = await hear(stream)
            assert heard.error is None
            assert (shortage.failures, client.restarts) == (4, 1)
            await until(client, EngineState.READY)

    asyncio.run(run())


def test_why_no_engine_can_be_started_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shortage = Shortage(monkeypatch, "process", errno.EMFILE)

    async def run() -> None:
        async with open_client(folder, stall_seconds=0.4) as client:
            shortage.left = 1_000_000
            assert client.engine_pid is not None
            os.kill(client.engine_pid, signal.SIGKILL)
            await until(client, EngineState.RESTARTING)
            while not shortage.failures:
                await asyncio.sleep(0.01)
            assert "no engine process can be started: Too many open files" in client.reason
            before = len(os.listdir("/proc/self/fd"))
            await asyncio.sleep(0.5)
            assert len(os.listdir("/proc/self/fd")) == before
            shortage.left = 0
            await until(client, EngineState.READY)

    asyncio.run(run())


def test_what_will_not_change_by_itself_is_still_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shortage = Shortage(monkeypatch, "process", errno.ENOENT)

    async def run() -> None:
        async with open_client(folder, stall_seconds=0.4) as client:
            shortage.left = 1_000_000
            assert client.engine_pid is not None
            os.kill(client.engine_pid, signal.SIGKILL)
            await until(client, EngineState.DOWN)
            assert shortage.failures == 3

    asyncio.run(run())
