"""The whole server as `octavo serve` puts it together, on a port of this machine, served from a thread."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.engine.client import EngineClient
from octavo.server.app import Server, build
from octavo.server.config import ServerConfig
from octavo.server.lifecycle import http_listener
from octavo.server.state import RequestRecord
from tests.support.clients import open_client

MODEL = "tiny"
KEY = "first-key"
JSON = {"content-type": "application/json"}


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class FullServer:
    port: int
    ops_port: int
    server: Server
    engine: EngineClient
    loop: asyncio.AbstractEventLoop
    uvicorn: Any
    records: list[RequestRecord] = field(default_factory=list)

    def run(self, function: Callable[[], Any]) -> Any:
        """Runs a coroutine function on the server's loop."""
        return asyncio.run_coroutine_threadsafe(function(), self.loop).result(20)

    def ask(self, path: str, body: Any = None, method: str | None = None, ops: bool = False, **headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.ops_port if ops else self.port, timeout=30)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method or ("GET" if body is None else "POST"), path, data, {**JSON, **sent})
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def complete(self, prompt: str = "hi", *, key: str | None = None, **options: Any) -> Answer:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        body = {"model": MODEL, "prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": 4, **options}
        return self.ask("/v1/completions", body, **headers)

    def raw(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def wait_until(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it did not come to that"
            time.sleep(0.005)

    def metrics(self) -> dict[str, float]:
        """By name and labels as they are written."""
        lines = self.ask("/metrics", ops=True).body.decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def completion_request(**options: Any) -> bytes:
    body = json.dumps({"model": MODEL, "prompt": "hi", "temperature": 0, "ignore_eos": True, **options}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def read_answer(connection: socket.socket) -> Answer:
    """One answer; the connection stays open."""
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())


def read_all(connection: socket.socket) -> bytes:
    """Until the server ends the connection."""
    data = b""
    try:
        while chunk := connection.recv(65536):
            data += chunk
    except ConnectionResetError:
        pass
    return data


@contextmanager
def full_server(folder: Path, *, faults: dict[str, Any] | None = None, **settings: Any) -> Iterator[FullServer]:
    """`settings`: of ServerConfig."""
    config = ServerConfig(model=str(folder), served_model_name=[MODEL], keep_alive_interval=0.1, **settings)
    ready = threading.Event()
    made: dict[str, Any] = {}
    thread = threading.Thread(target=lambda: asyncio.run(_main(folder, faults, config, ready, made)))
    thread.start()
    try:
        assert ready.wait(30)
        if "error" in made:
            raise made["error"]
        yield made["full"]
    finally:
        if "stop" in made:
            made["full"].loop.call_soon_threadsafe(made["stop"].set)
        thread.join()
    if "error" in made:
        raise made["error"]


async def _main(
    folder: Path, faults: dict[str, Any] | None, config: ServerConfig, ready: threading.Event, made: dict[str, Any]
) -> None:
    try:
        async with open_client(folder, faults=faults, max_num_seqs=config.max_num_seqs) as engine:
            server = build(config, engine)
            records: list[RequestRecord] = []
            observe = server.state.observe
            server.state.observe = lambda record: (records.append(record), observe(record))[1]
            sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
            listeners = [http_listener(config, app) for app in (server.app, server.ops_app)]
            serving = [asyncio.create_task(each.serve([it])) for each, it in zip(listeners, sockets)]
            while not all(each.started for each in listeners):
                await asyncio.sleep(0.01)
            made["stop"] = asyncio.Event()
            ports = [each.getsockname()[1] for each in sockets]
            loop = asyncio.get_running_loop()
            made["full"] = FullServer(*ports, server, engine, loop, listeners[0], records)
            ready.set()
            await made["stop"].wait()
            for each in listeners:
                each.should_exit = True
            await asyncio.gather(*serving)
            server.state.close()
    except BaseException as error:
        made["error"] = error
    finally:
        ready.set()
