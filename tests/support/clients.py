"""EngineClients over the tiny model, and readers that note everything a stream gave."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.engine.client import EngineClient, EngineState
from octavo.engine.ipc import Done, EngineOptions, Token
from octavo.engine.stream import RequestStream
from octavo.params import SamplingParams
from tests.support import faulty_engine
from tests.support.llms import environment

FAULTY = "tests.support.faulty_engine"


def hit(client: EngineClient, number: int) -> None:
    """A signal to its engine."""
    assert client.engine_pid is not None
    os.kill(client.engine_pid, number)


async def until(condition: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.005)


@asynccontextmanager
async def open_client(
    folder: Path, *, faults: dict[str, Any] | None = None, **tuning: Any
) -> AsyncIterator[EngineClient]:
    """At the end nothing of it may be left: neither process nor block."""
    most = tuning.pop("max_num_seqs", 64)
    options = EngineOptions(model=str(folder), threads=1, kv_memory="2MB", max_num_seqs=most)
    variables = environment()
    if faults is not None:
        variables[faulty_engine.VARIABLE] = json.dumps(faults)
        tuning["module"] = FAULTY
    client = EngineClient(options, environment=variables, **{"stall_seconds": 2.0, "keep_alive": 0.1, **tuning})
    await client.start()
    pids = set()
    try:
        await client.wait_ready()
        pids.add(client.engine_pid)
        yield client
        if client.state is EngineState.READY:
            await assert_idle(client)
    finally:
        pids.add(client.engine_pid)
        await client.close()
        for pid in pids - {None}:
            assert not is_running(pid)


async def assert_idle(client: EngineClient) -> None:
    for _ in range(100):  # cancelled ones leave within a step
        stats = await client.call("stats")
        if stats["requests"] == 0:
            break
        await asyncio.sleep(0.02)
    assert (stats["requests"], stats["running"], stats["waiting"], stats["blocks_used"]) == (0, 0, 0, 0)
    assert stats["blocks_free"] + stats["blocks_cached"] == stats["blocks_total"]
    assert not client._replay.entries


def is_running(pid: int | None) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@dataclass
class Heard:
    """Everything a stream gave. `tokens`: what does not depend on time, to the bit; `gap`: the most seconds between."""

    tokens: list[tuple[Any, ...]] = field(default_factory=list)
    gap: float = 0.0
    pauses: int = 0
    done: Done | None = None
    error: Exception | None = None

    @property
    def answer(self) -> Any:
        """What a restart must not change."""
        if self.error is not None:
            raise self.error
        assert self.done is not None
        counts = (self.done.prompt_tokens, self.done.completion_tokens, self.done.seed)
        return sorted(self.tokens), counts, _plain(self.done.prompt_logprobs)

    @property
    def texts(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for index, _, _, text, *_ in self.tokens:
            found[index] = found.get(index, "") + text
        return found


def _plain(logprobs: Any) -> Any:
    if logprobs is None:
        return None
    return [
        None if entry is None else [(e.token_id, e.logprob.hex(), e.rank, e.text) for e in entry] for entry in logprobs
    ]


async def hear(stream: RequestStream, heard: Heard | None = None) -> Heard:
    heard = Heard() if heard is None else heard
    last: float | None = None
    try:
        async for tokens in stream:
            heard.pauses += not tokens
            if tokens:
                now = time.monotonic()
                heard.gap, last = max(heard.gap, 0.0 if last is None else now - last), now
            heard.tokens += [_noted(token) for token in tokens]
    except Exception as error:
        heard.error = error
    heard.done = stream.done
    return heard


def _noted(token: Token) -> tuple[Any, ...]:
    logprobs = None if token.logprobs is None else _plain([token.logprobs])
    return (
        token.index,
        token.position,
        token.token_id,
        token.text,
        repr(logprobs),
        token.finish_reason,
        token.stop_reason,
    )


Case = tuple[list[int], SamplingParams]


def mixed_cases(streams: int, tokens: int) -> list[Case]:
    """Greedy and sampled; with logprobs, stop strings, several outputs, prompt logprobs, a grammar that forces tokens;
    prompts share prefixes."""
    cases: list[Case] = []
    for i in range(streams):
        prompt = [3 + (i % 3 * 7 + j) % 100 for j in range(8 + i % 5)] + [50 + i]
        kind = i % 6
        extra: dict[str, Any] = [
            {"temperature": 0.0},
            {"temperature": 1.0, "logprobs": 3},
            {"temperature": 0.8, "stop": ["qz", "##"], "repetition_penalty": 1.3, "min_tokens": 4},
            {"temperature": 1.2, "n": 3, "prompt_logprobs": 2, "top_p": 0.9},
            {"temperature": 1.0, "stop": [" a", "e"], "min_tokens": tokens // 2, "logprobs": 0, "bad_words": ["x"]},
            {"temperature": 1.0, "structured": {"regex": "([a-f]{2}--forced--)*"}, "logprobs": [None, 1][i // 6 % 2]},
        ][kind]
        cases.append((prompt, SamplingParams(max_tokens=tokens, seed=1000 + i, ignore_eos=True, **extra)))
    return cases


def submit_all(client: EngineClient, cases: list[Case]) -> list[RequestStream]:
    return [client.submit(f"case-{i}", prompt, params) for i, (prompt, params) in enumerate(cases)]


async def answers(client: EngineClient, cases: list[Case]) -> list[Any]:
    return [heard.answer for heard in await asyncio.gather(*map(hear, submit_all(client, cases)))]


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))
