"""A worker process as the one who asks it sees it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.peers.setup import ROOT


class WorkerError(RuntimeError):
    """What the worker said, or that it ended."""


class Worker:
    """`about`: what its engine said of itself. `ready_seconds`: from the start of the process until it said so.

    idle_share: the most CPU it took while it should sleep, as a share of that time.
    """

    def __init__(self, python: Path, module: str, settings: dict[str, Any], log: Path) -> None:
        self.module = module
        self.idle_share = 0.0
        self._log = log
        begin = time.perf_counter()
        with log.open("a") as errors:
            self._process = subprocess.Popen(
                [str(python), "-m", f"benchmarks.peers.workers.{module}"],
                cwd=ROOT,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.about = self._ask(settings)
        self._slept_since = time.perf_counter()
        self.ready_seconds = self._slept_since - begin

    def run(self, op: str, prompts: list[list[int]], lengths: list[int], options: dict[str, Any]) -> dict[str, Any]:
        """The answer to `op`, which has given every request its number of tokens."""
        slept = time.perf_counter() - self._slept_since
        answer = self._ask({"op": op, "prompts": prompts, "lengths": lengths, "options": options})
        self._slept_since = time.perf_counter()
        if slept > 1:
            self.idle_share = max(self.idle_share, answer["idle_cpu_seconds"] / slept)
        counts = [len(output) for output in answer["outputs"]]
        if counts != lengths:
            raise WorkerError(f"{self.module} generated {counts} tokens, asked for {lengths}")
        return answer

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
        except BrokenPipeError:
            pass  # its last words follow
        line = stdout.readline()
        if not line:
            raise WorkerError(f"{self.module} ended with status {self._process.wait()}; see {self._log.name}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{self.module}: {answer['error']}")
        return answer

    def close(self) -> None:
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
