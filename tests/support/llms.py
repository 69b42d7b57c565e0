"""`LLM`s over the tiny model."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from octavo import LLM, SamplingParams
from octavo.outputs import RequestOutput

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "hi"}]


def open_llm(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **{"threads": 1, "kv_memory": "2MB", **options})


def assert_idle(llm: LLM) -> None:
    stats = llm.stats()
    assert (stats["requests"], stats["running"], stats["waiting"], stats["blocks_used"]) == (0, 0, 0, 0)


def slow_down(llm: LLM, seconds: float = 0.02) -> None:
    step = llm._executor.step

    def slow(batch: Any, sampling: Any) -> Any:
        time.sleep(seconds)
        return step(batch, sampling)

    llm._executor.step = slow  # type: ignore[method-assign]


def texts(outputs: list[RequestOutput]) -> list[list[str]]:
    return [[completion.text for completion in output.outputs] for output in outputs]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
