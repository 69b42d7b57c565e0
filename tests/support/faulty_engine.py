"""An engine process with planted faults, run in place of octavo.engine.process; FAULTS holds them as JSON.

step_seconds: each step takes that much longer. poison: a step that reads these token ids in a row ends the process by
`how`: "segv", "exit", "raise", "kill", "hang" or "stop". doomed: a file; while it is there any step ends the process.
other: a file; while it is there the arithmetic has another name. babble: a file; while it is there each step sends
random frames, with the file's text as the seed. egress: a file for what record_egress sees.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from octavo.engine import ipc, process
from octavo.engine.ipc import EngineOptions
from octavo.engine.opening import OpenedEngine

VARIABLE = "OCTAVO_TEST_FAULTS"


_EGRESS = ("socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname")


def record_egress(path: str) -> None:
    """Writes down whenever this process looks a name up or connects to something."""

    def look(event: str, arguments: Any) -> None:
        if event in _EGRESS or event.startswith(("http.", "urllib.", "ftplib.")):
            write(f"{event} {arguments[1:]!r}")

    def write(line: str) -> None:
        os.write(file, f"{line}\n".encode())

    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    write("recording")
    sys.addaudithook(look)


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


def _babble(seed: str) -> None:
    """Steps with damaged bytes, then bytes that are nothing, into the socket of this process."""
    source = random.Random(seed)
    connection = socket.socket(fileno=os.dup(int(sys.argv[sys.argv.index("--fd") + 1])))
    token = ipc.Token(0, 0, 5, "a")
    step = ipc.encode(ipc.Step(ipc.Counters(), [ipc.Update(1_000_000, [token])]))[4:]
    with connection, suppress(OSError):
        for _ in range(200):
            body = bytearray(step if source.random() < 0.5 else source.randbytes(source.randrange(1, 60)))
            body[source.randrange(len(body))] = source.randrange(256)
            connection.sendall(len(body).to_bytes(4, "big") + body)
        connection.sendall(source.randbytes(1000))


def open_faulty(options: EngineOptions) -> OpenedEngine:
    faults = json.loads(os.environ[VARIABLE])
    opened = process.open_by_options(options)
    executor: Any = opened.executor
    step = executor.step

    def faulty_step(batch: Any, sampling: Any) -> Any:
        time.sleep(faults.get("step_seconds", 0))
        if "doomed" in faults and Path(faults["doomed"]).exists():
            os._exit(4)
        if "babble" in faults and Path(faults["babble"]).exists():
            _babble(Path(faults["babble"]).read_text())
        if "poison" in faults and str(faults["poison"])[1:-1] in str(list(batch.token_ids)):
            _fail(faults["how"])
        return step(batch, sampling)

    executor.step = faulty_step
    if "other" in faults and Path(faults["other"]).exists():
        type(executor).arithmetic = property(lambda self: "octavo-other-1")
    return opened


if __name__ == "__main__":
    sys.argv[0] = "faulty_engine"
    if recorded := json.loads(os.environ[VARIABLE]).get("egress"):
        record_egress(recorded)
    process.main(open_faulty)
