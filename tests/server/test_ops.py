"""Probes tell the truth, and metrics go on when the engine is killed."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo import __version__
from octavo.engine.client import EngineClient, EngineState
from octavo.engine.ipc import EngineOptions
from octavo.engine.stats import EngineStats
from octavo.server.admission import Admission
from octavo.server.metrics import Histogram, Metrics
from octavo.server.ops import Ops
from octavo.server.state import RequestRecord
from tests.support.full_server import FullServer, full_server
from tests.support.llms import environment
from tests.support.tiny_llm import write_tiny_llm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llm(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def full(folder: Path) -> Iterator[FullServer]:
    with full_server(folder) as server:
        yield server


class Scene:
    """Ops over an engine that is what it is told to be."""

    def __init__(self) -> None:
        self.engine: Any = SimpleNamespace(
            state=EngineState.READY,
            reason="",
            silent_seconds=0.0,
            progress=7,
            restarts=1,
            info=None,
            stats=EngineStats(),
        )
        self.admission = Admission(max_queued_requests=4, max_queued_tokens=100)
        self.metrics = Metrics(self.engine, self.admission, "m")
        self.ops = Ops(self.engine, self.admission, self.metrics, hung_seconds=5.0)


# --- probes ---


def test_i25_readiness_is_progress_not_a_flag() -> None:
    scene = Scene()
    assert scene.ops.problem() is None
    scene.engine.silent_seconds = 5.1  # the state still says READY
    assert scene.ops.problem() == ("hung", "the engine has made no progress for 5.1 s")
    scene.engine.silent_seconds = 0.0
    assert scene.ops.problem() is None


@pytest.mark.parametrize("state", [state for state in EngineState if state is not EngineState.READY])
def test_readiness_names_the_state_and_its_reason(state: EngineState) -> None:
    scene = Scene()
    scene.engine.state, scene.engine.reason = state, "the why of it"
    assert scene.ops.problem() == (state.value, "the why of it")
    scene.admission.draining = True
    assert scene.ops.problem() == ("draining", "the server is shutting down")


def test_every_probe_says_the_same_when_the_server_hangs_or_drains(full: FullServer, monkeypatch: Any) -> None:
    probes = ("/readyz", "/health", "/")
    for path in probes:
        assert full.ask(path).status == 200
    admission = full.server.admission
    for owner, name, value in ((type(full.engine), "silent_seconds", 1e6), (admission, "draining", True)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            for path in probes:
                answer = full.ask(path)
                assert answer.status == 503, (path, name)
                if path != "/readyz":
                    assert (answer.json["error"], answer.json["error_type"]) == ("unhealthy", "healthcheck")
    for path in probes:
        assert full.ask(path).status == 200


ODD = ("%0a", "%0A", "%0d%0a", "%00", "%20", "/", "//", "/.", ";", "%2f", "%3f", "%23", "%09", "%7f", "%c3%a9")


def test_a_path_is_a_routes_only_if_it_is_it_to_the_last_character(full: FullServer) -> None:
    paths = {route.path for route in full.server.routes}
    assert len(paths) > 12
    for path in sorted(path for path in paths if "{" not in path):
        for odd in (*(path + end for end in ODD), "/" + path, "/%0a" + path[1:], "/." + path, path.upper()):
            if odd.strip("/") == "" or odd in paths or odd.startswith(("/v1/models/", "/v1/models%2f")):
                continue
            method = "GET" if path in ("/livez", "/readyz", "/metrics") else "POST"
            assert full.ask(odd, {} if method == "POST" else None, method=method).status == 404, odd
    for path in ("/livez", "/readyz", "/metrics"):
        for end in ODD:
            assert full.ask(path + end, ops=True).status == 404, end


@pytest.mark.parametrize("again", [False, True])
def test_why_a_model_cannot_be_loaded_is_not_told_to_clients(folder: Path, tmp_path: Path, again: bool) -> None:
    copy = tmp_path / "secret-place"
    shutil.copytree(folder, copy)
    client = EngineClient(EngineOptions(model=str(copy), threads=1, kv_memory="2MB"), environment=environment())

    async def reasons() -> list[str]:
        if not again:
            (copy / "config.json").unlink()
        await client.start()
        seen = set()
        try:
            if again:
                await client.wait_ready()
                (copy / "config.json").unlink()
                os.kill(client.engine_pid or 0, signal.SIGKILL)
            while client.state is not EngineState.DOWN:
                seen.add(client.reason)
                await asyncio.sleep(0.005)
            return [*seen, client.reason]
        finally:
            await client.close()

    found = asyncio.run(reasons())
    assert len(found) > 1
    assert any("load" in reason for reason in found)
    assert not [reason for reason in found if "secret-place" in reason or "/" in reason]


def test_probes_of_a_server_that_is_well(full: FullServer) -> None:
    full.complete()
    for ops in (False, True):
        answer = full.ask("/readyz", ops=ops)
        assert (answer.status, answer.json["status"]) == (200, "ready")
        assert answer.json["progress"] >= 4
        assert full.ask("/livez", ops=ops).json == {"status": "alive"}
    assert full.ask("/health").status == 200
    assert full.ask("/version").json == {"version": __version__}
    assert full.ask("/readyz", method="HEAD").body == b""
    assert full.ask("/readyz", method="POST").status == 405


def test_i24_a_killed_engine_is_told_by_the_probes_and_its_requests_go_on(folder: Path) -> None:
    with full_server(folder, faults={"step_seconds": 0.01}) as full, ThreadPoolExecutor(1) as pool:
        undisturbed = full.complete(max_tokens=100, seed=5)
        before = full.metrics()
        running = pool.submit(full.complete, max_tokens=100, seed=5)
        full.wait_until(lambda: full.engine.stats.running == 1)
        assert full.engine.engine_pid is not None
        os.kill(full.engine.engine_pid, signal.SIGKILL)
        full.wait_until(lambda: full.ask("/readyz", ops=True).status == 503, 1.0)
        told = full.ask("/readyz").json
        assert told["status"] == "restarting"
        assert "restarted" in told["reason"]
        assert full.ask("/health").json["error_type"] == "healthcheck"
        assert full.ask("/livez").status == 200
        assert running.result().json["choices"] == undisturbed.json["choices"]
        full.wait_until(lambda: full.ask("/readyz").status == 200)
        after = full.metrics()
        counters = [name for name in before if "_total" in name or "_count" in name or "_bucket" in name]
        assert len(counters) > 50
        assert [name for name in counters if after[name] < before[name]] == []
        assert after["octavo_engine_restarts_total"] == before["octavo_engine_restarts_total"] + 1
        assert after["octavo_generation_tokens_total"] == before["octavo_generation_tokens_total"] + 100
        assert after['octavo_engine_state{state="ready"}'] == 1


# --- metrics ---


def test_i15_counted_tokens_are_those_of_the_answers(full: FullServer) -> None:
    before = full.metrics()
    answers = [full.complete("a longer prompt", max_tokens=7, n=2, temperature=1.0), full.complete("b", max_tokens=3)]
    usages = [answer.json["usage"] for answer in answers]
    after = full.metrics()

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown("octavo_generation_tokens_total") == sum(usage["completion_tokens"] for usage in usages) == 17
    assert grown("octavo_prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
    assert grown("octavo_time_to_first_token_seconds_count") == 2
    assert grown("octavo_e2e_request_latency_seconds_count") == 2
    assert grown("octavo_request_generation_tokens_sum") == 17
    assert grown('octavo_request_success_total{finished_reason="length"}') == 3
    assert grown('octavo_http_requests_total{route="/v1/completions",status="200"}') == 2


def test_metrics_are_in_prometheus_format_and_named_alike(full: FullServer) -> None:
    text = full.ask("/metrics").body.decode()
    families = {family.name for family in text_string_to_metric_families(text)}
    assert all(name.startswith("octavo_") for name in families)
    wanted = """time_to_first_token_seconds inter_token_latency_seconds e2e_request_latency_seconds
        request_queue_time_seconds prompt_tokens prompt_tokens_cached generation_tokens num_requests_running
        num_requests_waiting kv_cache_usage_perc kv_cache_waste_perc kv_blocks num_preemptions step_seconds
        jump_forward_tokens engine_restarts engine_steps request_success admission_rejections http_requests"""
    assert {f"octavo_{name}" for name in wanted.split()} <= families


def test_i8_labels_are_no_place_for_what_clients_choose(full: FullServer) -> None:
    full.complete()
    before = set(full.metrics())
    for i in range(20):
        full.ask(f"/nowhere/{i}")
        full.ask(f"/v1/models/{i}")
        full.ask("/v1/completions", {"model": f"m{i}", "prompt": "x"}, x_request_id=f"id-{i}")
    assert len(set(full.metrics()) - before) <= 1  # the status 404 of /v1/completions


def test_blocks_add_up_in_the_metrics(full: FullServer) -> None:
    full.complete()
    metrics = full.metrics()
    blocks = [metrics[f'octavo_kv_blocks{{state="{state}"}}'] for state in ("free", "cached", "used")]
    assert full.engine.info is not None
    assert sum(blocks) == full.engine.info.num_blocks


def test_a_histogram_counts_values_where_prometheus_would() -> None:
    histogram = Histogram("h", "", (1.0, 2.0))
    histogram.observe([0.5, 1.0, 1.5, 2.5])
    samples = {(sample.name, sample.labels.get("le")): sample.value for sample in histogram.metric().samples}
    assert samples["h_bucket", "1.0"] == 2
    assert samples["h_bucket", "2.0"] == 3
    assert samples["h_bucket", "+Inf"] == samples["h_count", None] == 4
    assert samples["h_sum", None] == 5.5


def test_a_request_that_never_ran_counts_as_an_answer_only() -> None:
    scene = Scene()
    scene.metrics.observe(RequestRecord({}, "/v1/completions", status=400))
    text = scene.metrics.text().decode()
    assert 'octavo_http_requests_total{route="/v1/completions",status="400"} 1.0' in text
    assert "octavo_time_to_first_token_seconds_count 0.0" in text


# --- request ids ---


def test_every_answer_has_a_request_id_a_client_may_choose_its_own(full: FullServer) -> None:
    first, second = full.complete().headers["x-request-id"], full.ask("/nowhere").headers["x-request-id"]
    assert first != second
    assert full.ask("/livez", x_request_id="my-id.7").headers["x-request-id"] == "my-id.7"
    for bad in ("a b", "x" * 200, "é", "<script>"):
        assert full.ask("/livez", x_request_id=bad).headers["x-request-id"].startswith("req-")
