"""`octavo serve` as a process of its own. Run as a module it serves with the faulty engine of FAULTS."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support import faulty_engine
from tests.support.clients import FAULTY, is_running
from tests.support.full_server import Answer
from tests.support.llms import environment


@dataclass
class Served:
    process: subprocess.Popen[str]
    log: list[str] = field(default_factory=list)
    port: int = 0

    def wait_ready(self, seconds: float = 20.0) -> None:
        self.wait_for(r"is ready at http://[\d.]+:(\d+)|is ready at unix", seconds)

    def wait_for(self, pattern: str, seconds: float = 20.0) -> None:
        """A line of the log."""
        end = time.monotonic() + seconds
        while True:
            if found := re.search(pattern, "\n".join(self.log)):
                self.port = int(found[1]) if found.groups() and found[1] else self.port
                return
            assert self.process.poll() is None, "\n".join(self.log)
            assert time.monotonic() < end, "\n".join(self.log)
            time.sleep(0.01)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)

    def ask(self, path: str, body: Any = None) -> Answer:
        connection = self.connect()
        data = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, data, {"content-type": "application/json"})
        answer = connection.getresponse()
        found = Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        connection.close()
        return found

    def stream(self, **options: Any) -> Iterator[bytes]:
        """The lines of a streamed completion; the request is sent at once."""
        body = {"model": "tiny", "prompt": "hi", "ignore_eos": True, "temperature": 0, "stream": True, **options}
        connection = self.connect()
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200
        return iter(answer.readline, b"")

    def children(self) -> list[int]:
        """Processes it has started: its engine."""
        found = []
        for entry in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(entry.read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == self.process.pid:
                found.append(int(entry.parent.name))
        return found

    def end(self, number: int = signal.SIGTERM, seconds: float = 20.0) -> int:
        self.process.send_signal(number)
        return self.process.wait(seconds)


@contextmanager
def served(
    folder: Path,
    *flags: str,
    faults: dict[str, Any] | None = None,
    ready: bool = True,
    limited_to: int | tuple[int, int] | None = None,
) -> Iterator[Served]:
    """Nothing may be left of it at the end, engine included. limited_to: open files, soft and hard."""
    module = "octavo" if faults is None else "tests.support.served"
    variables = {**environment(), faulty_engine.VARIABLE: json.dumps(faults)}
    flags = flags if "--port" in flags or "--uds" in flags else ("--port", "0", *flags)
    common = ("--served-model-name", "tiny", "--kv-memory", "2MB", "--threads", "1")
    soft, hard = limited_to if isinstance(limited_to, tuple) else (limited_to, limited_to)
    limit = [] if limited_to is None else ["prlimit", f"--nofile={soft}:{hard}"]
    process = subprocess.Popen(
        [*limit, sys.executable, "-m", module, "serve", str(folder), *common, *flags],
        stderr=subprocess.PIPE,
        text=True,
        env=variables,
    )
    found = Served(process)
    reader = threading.Thread(target=lambda: found.log.extend(line.rstrip("\n") for line in process.stderr or ()))
    reader.start()
    children: list[int] = []
    try:
        if ready:
            found.wait_ready()
        children = found.children()
        yield found
    finally:
        children += found.children()
        if process.poll() is None:
            process.kill()
        process.wait()
        end = time.monotonic() + 10
        while any(map(is_running, children)) and time.monotonic() < end:
            time.sleep(0.02)
        left = [pid for pid in children if is_running(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        reader.join()
        if process.stderr is not None:
            process.stderr.close()
        assert left == []


def main() -> None:
    from functools import partial

    from octavo.cli.main import main as octavo
    from octavo.engine import client

    if recorded := json.loads(os.environ[faulty_engine.VARIABLE]).get("egress"):
        faulty_engine.record_egress(recorded)
    client.EngineClient = partial(client.EngineClient, module=FAULTY)  # type: ignore[misc, assignment]
    octavo()


if __name__ == "__main__":
    main()
