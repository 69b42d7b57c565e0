"""Puts the server together: routes of both surfaces and of operations, the guard around them, the ops listener."""

from __future__ import annotations

import logging
import re
import secrets
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from octavo import limits
from octavo.server.admission import Admission, Admit, Door, Timeouts
from octavo.server.auth import Guard, Keys, salt_of
from octavo.server.exchange import Endpoint, Message, Receive, Send
from octavo.server.metrics import Metrics
from octavo.server.ops import Ops
from octavo.server.state import RequestRecord, Scope, ServerState
from octavo.server.tracing import Tracer, open_tracer

if TYPE_CHECKING:
    from starlette.routing import Route
    from starlette.types import ASGIApp

    from octavo.engine.client import EngineClient
    from octavo.server.config import ServerConfig

log = logging.getLogger("octavo")
requests_log = logging.getLogger("octavo.requests")

REQUEST_ID = "octavo.request_id"  # scope key


@dataclass(slots=True)
class Server:
    """app: the main listener's, with `routes`. ops_app: the ops listener's, without keys."""

    app: ASGIApp
    ops_app: ASGIApp
    routes: list[Route]
    state: ServerState
    admission: Admission
    metrics: Metrics
    ops: Ops
    tracer: Tracer | None


def build(config: ServerConfig, engine: EngineClient) -> Server:
    """Raises ConfigError for a key file that cannot be used, and for traces without what sends them."""
    from starlette.applications import Starlette

    from octavo.server import openai_routes, openapi, score_routes, tgi_routes, tokenize_routes
    from octavo.server.errors import fallback_handlers

    keys = Keys(config.api_key, config.api_key_file)
    admission = Admission(
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        max_concurrent_requests=config.max_concurrent_requests,
        timeouts=Timeouts(config.queue_timeout, config.first_token_timeout, config.request_timeout),
    )
    metrics = Metrics(engine, admission, config.model_names[0])
    tracer = None
    if config.otlp_traces_endpoint is not None:
        tracer = open_tracer(config.otlp_traces_endpoint, config.model_names[0])
    state = ServerState(
        engine,
        config.model_names,
        tool_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
        auto_tool_choice=config.enable_auto_tool_choice,
        max_input_tokens=config.max_input_tokens,
        max_body_bytes=config.max_body_bytes,
        keep_alive=config.keep_alive_interval,
        max_concurrent_requests=config.max_concurrent_requests or config.max_num_seqs + config.max_queued_requests,
        admission=lambda scope, cost: Admit(admission, scope, cost),
        observe=partial(_observe, metrics, tracer, config.log_requests),
        salt=(lambda scope, asked: asked) if config.share_prefix_cache else salt_of,
    )
    ops = Ops(engine, admission, metrics, config.stall_timeout / 2)
    state.problem = ops.problem
    surfaces = (openai_routes, score_routes, tgi_routes, tokenize_routes, openapi)
    surface_routes = [route for surface in surfaces for route in surface.routes(state)]
    for route in surface_routes:
        if isinstance(route.app, Endpoint):
            route.app = Door(route.app, state, admission)
    ops_routes = ops.routes()
    own_routes = [ops.livez, ops.readyz, ops.metrics]
    for route in (*ops_routes, *surface_routes, *own_routes):
        _match_to_the_end(route)
    public = [route for route in ops_routes if route.path == "/livez"]
    handlers = fallback_handlers()
    main = Starlette(routes=[*ops_routes, *surface_routes], exception_handlers=handlers)
    main.router.redirect_slashes = False
    app: ASGIApp = Guard(main, keys, public)
    if config.cors_origin:
        app = _with_cors(app, config.cors_origin)
    own = Starlette(routes=own_routes, exception_handlers=handlers)
    own.router.redirect_slashes = False
    return Server(RequestIds(app), own, [*ops_routes, *surface_routes], state, admission, metrics, ops, tracer)


def _match_to_the_end(route: Route) -> None:
    """Starlette's patterns end with $, which a line break may follow."""
    assert route.path_regex.pattern.endswith("$")
    route.path_regex = re.compile(route.path_regex.pattern[:-1] + r"\Z")


def _with_cors(app: ASGIApp, origins: list[str]) -> ASGIApp:
    """Outermost: a browser's preflight has no key, and learns nothing but that its origin may ask."""
    from starlette.middleware.cors import CORSMiddleware

    return CORSMiddleware(
        app, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["authorization", "content-type"]
    )


class RequestIds:
    """Gives each request an id, which the answer has as x-request-id. A client's own is a label in the log, no more."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        sent = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        label = sent if 0 < len(sent) <= limits.MAX_REQUEST_ID_CHARS and _is_token(sent) else b""
        scope[REQUEST_ID] = request_id = label or b"req-" + secrets.token_hex(12).encode()

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id)]}
            await send(message)

        await self._app(scope, receive, with_id)


def _is_token(text: bytes) -> bool:
    return text.translate(None, b"-_.:").isalnum()


def _observe(metrics: Metrics, tracer: Tracer | None, logs: bool, record: RequestRecord) -> None:
    metrics.observe(record)
    if tracer is not None:
        tracer.observe(record)
    if logs:
        requests_log.info("%s", record.route, extra={"octavo": facts_of(record)})


def facts_of(record: RequestRecord) -> dict[str, object]:
    """What a log line says of a request: nothing of its content."""
    now = time.monotonic()
    return {
        "request_id": record.scope.get(REQUEST_ID, b"").decode("latin-1"),
        "key": record.scope.get("octavo.tenant"),
        "route": record.route,
        "status": record.status,
        "error": record.error_code,
        "stream": record.stream,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.completion_tokens,
        "seconds": round((record.finished or now) - record.arrival, 4),
        "first_token_seconds": None if record.first_token is None else round(record.first_token - record.arrival, 4),
        "finish": ",".join(record.finish_reasons),
        "disconnected": record.disconnected,
    }
