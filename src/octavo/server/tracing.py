"""OpenTelemetry traces of requests, sent as OTLP over HTTP. An extra: `pip install octavo[otel]`.

A span is made when its request is over, from the moments its record holds: while a request runs, traces cost nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from octavo import limits
from octavo.errors import ConfigError
from octavo.server.state import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger("octavo")

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
    "/generate_stream": "text_completion",
    "/": "text_completion",
}
_CLOSE_SECONDS = 2.0


def open_tracer(endpoint: str, model_name: str) -> Tracer:
    """Raises ConfigError where the extra is not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider as TracerProvider
    except ImportError:
        allowed = "given only where OpenTelemetry is installed: pip install 'octavo[otel]'"
        raise ConfigError(f"--otlp-traces-endpoint {endpoint}", allowed) from None
    has_path = endpoint.partition("://")[2].rstrip("/").count("/") > 0
    return Tracer(OTLPSpanExporter(endpoint if has_path else endpoint.rstrip("/") + "/v1/traces"), model_name)


class Tracer:
    """A span `llm_request` for each request to a route that generates; it continues the request's `traceparent`.

    Spans wait in a bounded queue for a thread that sends them; when no collector takes them, the oldest are dropped.
    What OpenTelemetry's own variables set (OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, headers, …) holds.
    """

    def __init__(self, exporter: SpanExporter, model_name: str) -> None:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        from octavo import __version__

        resource = Resource({"service.name": "octavo"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=limits.MAX_QUEUED_SPANS))
        self._tracer = self._provider.get_tracer("octavo", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name

    def observe(self, record: RequestRecord) -> None:
        """Never raises: a request must not fail for its trace."""
        if record.route not in _OPERATIONS:
            return
        try:
            self._span(record)
        except Exception:
            log.exception("a request could not be traced")

    def _span(self, record: RequestRecord) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode

        now = time.monotonic()
        epoch = time.time() - now
        sent = {name.decode("latin-1"): value.decode("latin-1") for name, value in record.scope["headers"]}
        end = record.finished or now
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(sent),
            kind=SpanKind.SERVER,
            attributes=self._attributes(record, end),
            start_time=int((epoch + record.arrival) * 1e9),
        )
        if record.error_code is not None:
            span.set_attribute("error.type", record.error_code)
            span.set_status(Status(StatusCode.ERROR, record.error_code))
        span.end(int((epoch + end) * 1e9))

    def _attributes(self, record: RequestRecord, end: float) -> dict[str, Any]:
        """Names of OpenTelemetry's conventions for generative AI, and vLLM's where those have none; seconds."""
        params = record.params
        found: dict[str, Any] = {
            "gen_ai.operation.name": _OPERATIONS[record.route],
            "gen_ai.provider.name": "octavo",
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.model": self._model_name,
            "gen_ai.request.id": record.request_id or None,
            "gen_ai.request.max_tokens": params and params.max_tokens,
            "gen_ai.request.temperature": params and params.temperature,
            "gen_ai.request.top_p": params and params.top_p,
            "gen_ai.request.seed": params and params.seed,
            "gen_ai.request.n": params and params.n,
            "gen_ai.response.finish_reasons": list(record.finish_reasons) or None,
            "gen_ai.usage.num_sequences": record.sequences,
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.completion_tokens,
            "gen_ai.usage.prompt_tokens": record.prompt_tokens,
            "gen_ai.usage.completion_tokens": record.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
            "gen_ai.latency.time_in_queue": record.first_scheduled
            and max(0.0, record.first_scheduled - record.arrival),
            "gen_ai.latency.time_to_first_token": record.first_token and record.first_token - record.arrival,
            "gen_ai.latency.e2e": end - record.arrival,
            "http.route": record.route,
            "http.response.status_code": record.status or None,
            "octavo.stream": record.stream,
            "octavo.disconnected": record.disconnected,
        }
        return {name: value for name, value in found.items() if value is not None}

    def close(self) -> None:
        """Sends what waits, but nobody waits longer than two seconds for a collector."""
        closing = threading.Thread(target=self._provider.shutdown, name="octavo-traces-end", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)
