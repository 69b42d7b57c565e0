"""Traces: a span for each request, nothing when off, and never a request that waits for a collector."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from octavo import limits
from octavo.errors import ConfigError
from octavo.params import SamplingParams
from octavo.server.config import load_config
from octavo.server.state import RequestRecord
from octavo.server.tracing import Tracer, open_tracer
from tests.support.full_server import full_server
from tests.support.llms import environment
from tests.support.tiny_llm import write_tiny_llm

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Takes spans over HTTP; `open`: cleared, it holds its answers back."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        self.paths: set[str] = set()
        self.open = threading.Event()
        self.open.set()

    def take(self, path: str, body: bytes) -> None:
        self.open.wait(30)
        self.paths.add(path)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.services |= {
                each.value.string_value for each in resource.resource.attributes if each.key == "service.name"
            }
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.take(self.path, self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield found, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        found.open.set()
        server.shutdown()
        thread.join()
        server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def test_each_request_is_a_span_that_continues_the_trace_of_its_client(tmp_path: Path) -> None:
    with collecting() as (collector, url), full_server(write_tiny_llm(tmp_path), otlp_traces_endpoint=url) as full:
        before = time.time_ns()
        traced = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        body = {"model": "tiny", "prompt": "hi", "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "seed": 3}
        assert full.ask("/v1/completions", {**body, "ignore_eos": True, "n": 2}, **traced).status == 200
        assert full.ask("/v1/completions", {**body, "stream": True}).status == 200
        assert full.ask("/v1/completions", {**body, "top_p": 7}, **traced).status == 400
        unsampled = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        assert full.ask("/v1/completions", body, **unsampled).status == 200
        assert (
            full.ask("/generate", {"inputs": "hi", "parameters": {"max_new_tokens": 2}}, traceparent="??").status == 200
        )
        assert full.ask("/tokenize", {"prompt": "hi"}).status == 200
        assert full.ask("/v1/models").status == 200
        full.wait_until(lambda: len(full.records) == 6)
        assert full.server.tracer is not None
        full.server.tracer.close()
    spans = sorted(collector.spans, key=lambda span: span.start_time_unix_nano)
    assert (collector.paths, collector.services) == ({"/v1/traces"}, {"octavo"})
    assert [span.name for span in spans] == ["llm_request"] * 4
    first, stream, refused, tgi = spans
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (TRACE, PARENT)
    assert stream.parent_span_id == tgi.parent_span_id == b""
    assert before <= first.start_time_unix_nano < first.end_time_unix_nano <= time.time_ns()
    said = attributes(first)
    expected = {
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 3,
        "gen_ai.request.n": 2,
        "gen_ai.usage.prompt_tokens": 2,
        "gen_ai.usage.completion_tokens": 8,
        "gen_ai.operation.name": "text_completion",
        "http.response.status_code": 200,
    }
    assert {name: said[name] for name in expected} == expected
    assert said["gen_ai.request.id"].startswith("cmpl-")
    assert 0 <= said["gen_ai.latency.time_in_queue"] <= said["gen_ai.latency.time_to_first_token"]
    assert said["gen_ai.latency.time_to_first_token"] <= said["gen_ai.latency.e2e"]
    assert attributes(stream)["octavo.stream"] is True
    assert (refused.status.code, attributes(refused)["error.type"]) == (2, "invalid_value")
    assert attributes(refused)["http.response.status_code"] == 400
    assert attributes(tgi)["gen_ai.usage.completion_tokens"] == 2


@pytest.mark.parametrize("listens", [False, True])
def test_requests_do_not_notice_that_no_collector_answers(listens: bool, tmp_path: Path) -> None:
    with collecting() as (collector, url):
        collector.open.clear()
        url = url if listens else "http://127.0.0.1:9"
        with full_server(write_tiny_llm(tmp_path), otlp_traces_endpoint=url) as full:
            assert [full.complete().status for _ in range(20)] == [200] * 20
            assert full.server.tracer is not None
            start = time.monotonic()
            full.server.tracer.close()
            assert time.monotonic() - start < 10
            assert full.complete().status == 200


def test_spans_that_nobody_takes_are_bounded() -> None:
    with collecting() as (collector, url):
        collector.open.clear()
        tracer = open_tracer(url + "/some/path", "tiny")
        for i in range(2 * limits.MAX_QUEUED_SPANS):
            params = SamplingParams(seed=i)
            tracer.observe(RequestRecord({"headers": []}, "/v1/completions", params=params, status=200))
        collector.open.set()
        tracer.close()
    assert collector.paths == {"/some/path"}
    seeds = {attributes(span)["gen_ai.request.seed"] for span in collector.spans}
    assert limits.MAX_QUEUED_SPANS <= len(seeds) <= limits.MAX_QUEUED_SPANS + 1024  # what waits, and what is being sent
    assert max(seeds) == 2 * limits.MAX_QUEUED_SPANS - 1


def test_a_failure_to_trace_is_no_failure_of_the_request() -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracer = Tracer(exporter, "tiny")
    tracer.observe(RequestRecord({}, "/v1/completions"))  # a scope without headers
    tracer.observe(RequestRecord({"headers": [(b"traceparent", b"\xff\x00")]}, "/v1/completions"))
    tracer.close()
    assert len(exporter.get_finished_spans()) == 1


def test_without_the_setting_nothing_of_opentelemetry_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.support.full_server import full_server\n"
        f"with full_server(Path({str(write_tiny_llm(tmp_path))!r})) as full: assert full.complete().status == 200\n"
        "assert full.server.tracer is None\n"
        "assert not [name for name in sys.modules if name.startswith(('opentelemetry', 'requests'))]"
    )
    result = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_without_the_extra_the_setting_is_refused_with_what_to_install() -> None:
    code = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from octavo.cli.main import main\n"
        "sys.argv = ['octavo', 'serve', '--port', '0', '--otlp-traces-endpoint', 'http://127.0.0.1:4318']; main()"
    )
    result = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "--otlp-traces-endpoint http://127.0.0.1:4318" in result.stderr
    assert "pip install 'octavo[otel]'" in result.stderr


@pytest.mark.parametrize("url", ["localhost:4318", "grpc://x:4317", "http://", "http://x y", "", "http://me:s3cret@x"])
def test_an_endpoint_that_is_no_http_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint") as error:
        load_config({"otlp_traces_endpoint": url})
    assert "s3cret" not in str(error.value)
