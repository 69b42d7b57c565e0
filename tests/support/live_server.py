"""The HTTP surfaces over a real engine, on a port of this machine, served from a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.engine.client import EngineClient
from octavo.server.state import RequestRecord, ServerState
from tests.support.clients import open_client

MODEL = "tiny"


@dataclass
class LiveServer:
    """`records`: of the requests that are over. `call`: runs a coroutine function on the server's loop."""

    url: str
    state: ServerState
    records: list[RequestRecord]
    loop: asyncio.AbstractEventLoop

    def call(self, function: Callable[[EngineClient], Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(function(self.state.engine), self.loop).result(20)


@contextmanager
def serve(folder: Path, *, faults: dict[str, Any] | None = None, **options: Any) -> Iterator[LiveServer]:
    """`options`: of ServerState."""
    ready = threading.Event()
    made: dict[str, Any] = {}
    thread = threading.Thread(target=lambda: asyncio.run(_main(folder, faults, options, ready, made)))
    thread.start()
    try:
        assert ready.wait(30)
        if "error" in made:
            raise made["error"]
        yield made["live"]
    finally:
        if "server" in made:
            made["server"].should_exit = True
        thread.join()
    if "error" in made:
        raise made["error"]


async def _main(
    folder: Path, faults: dict[str, Any] | None, options: dict[str, Any], ready: threading.Event, made: dict[str, Any]
) -> None:
    import uvicorn

    try:
        async with open_client(folder, faults=faults) as client:
            records: list[RequestRecord] = []
            state = ServerState(client, [MODEL], **{"observe": records.append, "keep_alive": 0.1, **options})
            server = uvicorn.Server(
                uvicorn.Config(app(state), port=0, log_level="error", http="httptools", lifespan="off")
            )
            made["server"] = server
            serving = asyncio.create_task(server.serve())
            while not server.started:
                await asyncio.sleep(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            made["live"] = LiveServer(f"http://127.0.0.1:{port}", state, records, asyncio.get_running_loop())
            ready.set()
            await serving
            state.close()
    except BaseException as error:
        made["error"] = error
    finally:
        ready.set()


def app(state: ServerState) -> Any:
    from starlette.applications import Starlette

    from octavo.server import openai_routes, openapi, score_routes, tgi_routes, tokenize_routes
    from octavo.server.errors import fallback_handlers

    surfaces = (openai_routes, score_routes, tgi_routes, tokenize_routes, openapi)
    routes = [route for surface in surfaces for route in surface.routes(state)]
    return Starlette(routes=routes, exception_handlers=fallback_handlers())
