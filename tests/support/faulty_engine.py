"""An engine process with planted faults, run in place of octavo.engine.process; FAULTS holds them as JSON.

step_seconds: each step takes that much longer. poison: a step that reads these token ids in a row ends the process by
`how`: "segv", "exit", "raise", "kill", "hang" or "stop". doomed: a file; while it is there any step ends the process.
other: a file; while it is there the arithmetic has another name.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from octavo.engine import process
from octavo.engine.ipc import EngineOptions
from octavo.engine.opening import OpenedEngine

VARIABLE = "OCTAVO_TEST_FAULTS"


def _fail(how: str) -> None:
    match how:
        case "exit":
            os._exit(3)
        case "raise":
            raise ValueError("planted")
        case "hang":
            while True:
                pass
        case _:
            os.kill(os.getpid(), {"segv": signal.SIGSEGV, "kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])


def open_faulty(options: EngineOptions) -> OpenedEngine:
    faults = json.loads(os.environ[VARIABLE])
    opened = process.open_by_options(options)
    executor: Any = opened.executor
    step = executor.step

    def faulty_step(batch: Any, sampling: Any) -> Any:
        time.sleep(faults.get("step_seconds", 0))
        if "doomed" in faults and Path(faults["doomed"]).exists():
            os._exit(4)
        if "poison" in faults and str(faults["poison"])[1:-1] in str(list(batch.token_ids)):
            _fail(faults["how"])
        return step(batch, sampling)

    executor.step = faulty_step
    if "other" in faults and Path(faults["other"]).exists():
        type(executor).arithmetic = property(lambda self: "octavo-other-1")
    return opened


if __name__ == "__main__":
    sys.argv[0] = "faulty_engine"
    process.main(open_faulty)
