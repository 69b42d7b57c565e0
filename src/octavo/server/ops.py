"""Routes for those who run the server: probes, metrics, version."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from octavo.engine.client import EngineState
from octavo.server.errors import json_bytes
from octavo.server.exchange import Receive, Send
from octavo.server.state import Scope

if TYPE_CHECKING:
    from starlette.routing import Route

    from octavo.engine.client import EngineClient
    from octavo.server.admission import Admission
    from octavo.server.metrics import Metrics

_JSON, _TEXT = b"application/json", b"text/plain; version=0.0.4; charset=utf-8"
Answer = tuple[int, bytes, bytes]  # status, content type, body


class Ops:
    """hung_seconds: an engine that has owed a sign of progress for so long is not ready, whatever its state says."""

    def __init__(self, engine: EngineClient, admission: Admission, metrics: Metrics, hung_seconds: float) -> None:
        self._engine = engine
        self._admission = admission
        self._metrics = metrics
        self._hung_seconds = hung_seconds

    def routes(self) -> list[Route]:
        return [self.livez, self.readyz, self.metrics, _route("/health", self._health), _route("/version", _version)]

    @property
    def livez(self) -> Route:
        """The one route without a key: it says that the process answers, and nothing of what it is."""
        return _route("/livez", lambda: (200, _JSON, b'{"status":"alive"}'))

    @property
    def readyz(self) -> Route:
        return _route("/readyz", self._ready)

    @property
    def metrics(self) -> Route:
        return _route("/metrics", lambda: (200, _TEXT, self._metrics.text()))

    def problem(self) -> tuple[str, str] | None:
        """Why no request should be sent here now: a word and a sentence; None: it is ready."""
        engine = self._engine
        if self._admission.draining:
            return "draining", "the server is shutting down"
        if engine.state is not EngineState.READY:
            return engine.state.value, engine.reason
        if engine.silent_seconds > self._hung_seconds:
            return "hung", f"the engine has made no progress for {engine.silent_seconds:.1f} s"
        return None

    def _ready(self) -> Answer:
        problem = self.problem()
        body: dict[str, Any] = {"status": "ready" if problem is None else problem[0]}
        if problem is not None:
            body["reason"] = problem[1]
        body |= {"progress": self._engine.progress, "restarts": self._engine.restarts}
        return 200 if problem is None else 503, _JSON, json_bytes(body)

    def _health(self) -> Answer:
        """For vLLM's and TGI's probes: only the status counts; the error's shape is TGI's."""
        problem = self.problem()
        if problem is None:
            return 200, _JSON, b'{"status":"ok"}'
        body = {"error": "unhealthy", "error_type": "healthcheck", "reason": problem[0]}
        return 503, _JSON, json_bytes(body)


def _version() -> Answer:
    from octavo import __version__

    return 200, _JSON, json_bytes({"version": __version__})


def _route(path: str, answer: Callable[[], Answer]) -> Route:
    from starlette.routing import Route

    return Route(path, _Get(answer), methods=["GET"])


class _Get:
    def __init__(self, answer: Callable[[], Answer]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, kind, body = self._answer()
        headers = [
            (b"content-type", kind),
            (b"content-length", str(len(body)).encode()),
            (b"cache-control", b"no-store"),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})
