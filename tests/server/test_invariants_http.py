"""What must hold for every client of the server, whoever else is connected and whatever anybody sends."""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.fields import ROUTES
from tests.server.test_openai_shapes import bombs
from tests.support.full_server import FullServer, completion_request, full_server
from tests.support.served import Served, served
from tests.support.sse import read_openai
from tests.support.tiny_llm import write_tiny_llm

KEY, OTHER = "first-key", "other-key"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llm(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def slow(folder: Path) -> Iterator[FullServer]:
    with full_server(folder, faults={"step_seconds": 0.01}) as full:
        yield full


@pytest.fixture(scope="module")
def two_keys(folder: Path) -> Iterator[FullServer]:
    with full_server(folder, faults={"step_seconds": 0.01}, api_key=[KEY, OTHER]) as full:
        yield full


# I15


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_i15_usage_is_the_recount_of_what_was_sent(slow: FullServer, n: int, stream: bool) -> None:
    ask = {"n": n, "temperature": 1.0, "seed": 3, "max_tokens": 9, "return_token_ids": True, "stream": stream}
    ask |= {"stream_options": {"include_usage": True}} if stream else {}
    tokens_before = slow.engine.stats.generated_tokens
    answer = slow.complete("count me", **ask)
    if stream:
        streamed = read_openai(answer.body, chat=False, choices=n, usage=True)
        usage, ids = streamed.usage, [choice.token_ids for choice in streamed.choices.values()]
    else:
        usage, ids = answer.json["usage"], [choice["token_ids"] for choice in answer.json["choices"]]
    assert usage is not None
    prompt = slow.ask("/tokenize", {"prompt": "count me"}).json["count"]
    counted = sum(map(len, ids))
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, counted)
    assert usage["total_tokens"] == prompt + counted
    assert slow.engine.stats.generated_tokens - tokens_before == counted


def test_i15_tokens_of_a_client_that_left_are_counted_as_far_as_they_were_made(slow: FullServer) -> None:
    before = slow.metrics()["octavo_generation_tokens_total"]
    with slow.raw() as connection:
        connection.sendall(completion_request(max_tokens=200, stream=True))
        slow.wait_until(lambda: slow.metrics()["octavo_generation_tokens_total"] - before > 5)
    slow.wait_until(lambda: slow.server.admission.inside == 0)
    slow.wait_until(lambda: slow.run(lambda: slow.engine.call("stats"))["requests"] == 0)
    made = slow.metrics()["octavo_generation_tokens_total"] - before
    assert slow.records[-1].disconnected
    assert slow.records[-1].completion_tokens <= made < 200
    assert slow.metrics()["octavo_generation_tokens_total"] - before == made  # and no more is


# I21


def test_i21_leaving_at_any_moment_frees_everything_within_a_few_steps(slow: FullServer) -> None:
    """Random bytes of a request sent, random tokens of its answer read; counted in steps, not seconds."""
    source = random.Random(21)
    for _ in range(40):
        options: dict[str, Any] = {"stream": source.random() < 0.5, "n": source.choice([1, 2]), "temperature": 1.0}
        data = completion_request(max_tokens=200, **options)
        with slow.raw() as connection:
            whole = source.random() < 0.7
            connection.sendall(data if whole else data[: source.randrange(len(data))])
            if whole and source.random() < 0.7:
                wanted = slow.engine.progress + source.randrange(6)
                slow.wait_until(lambda w=wanted: slow.engine.progress >= w)
            if source.random() < 0.3:  # a reset instead of an end
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        left = slow.engine.progress
        slow.wait_until(lambda: slow.server.admission.inside == 0)
        while (stats := slow.run(lambda: slow.engine.call("stats")))["requests"]:
            assert slow.engine.progress - left < 20  # of 200
        assert stats["blocks_used"] == 0


# I35, I36


def resident_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def test_i35_after_bombs_threads_and_memory_are_as_before(slow: FullServer) -> None:
    def throw() -> None:
        for route in ("/v1/completions", "/tokenize"):
            for body in bombs().values():
                connection = http.client.HTTPConnection("127.0.0.1", slow.port, timeout=20)
                connection.request("POST", route, body, {"content-type": "application/json"})
                status = connection.getresponse().status
                assert status in (400, 413) if route != "/tokenize" else status < 500
                connection.close()

    throw()
    threads, kib = threading.active_count(), resident_kib()
    throw()
    assert threading.active_count() <= threads
    assert resident_kib() - kib < 16 << 10  # of 20 MB of bombs
    assert slow.server.admission.inside == 0


def test_i36_a_multipart_body_is_refused_whatever_its_parts(slow: FullServer) -> None:
    parts = b"".join(b'--x\r\ncontent-disposition: form-data; name="p"\r\n\r\n1\r\n' for _ in range(10_000))
    for route in ROUTES:
        connection = http.client.HTTPConnection("127.0.0.1", slow.port, timeout=20)
        connection.request("POST", route, parts + b"--x--", {"content-type": "multipart/form-data; boundary=x"})
        answer = connection.getresponse()
        assert answer.status == 415, (route, answer.read())
        connection.close()


# I39


def test_i39_metrics_answers_and_headers_do_not_tell_keys_apart(two_keys: FullServer) -> None:
    names_before = set(two_keys.metrics())
    answers = [two_keys.complete("the same prompt of both", key=key, seed=1) for key in (KEY, OTHER, KEY, OTHER)]
    cached = [answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached[:2] == [0, 0]  # cold, and warmed by the other only: the same
    assert cached[2] == cached[3] > 0
    texts = {answer.json["choices"][0]["text"] for answer in answers}
    assert len(texts) == 1
    new = {name for name in set(two_keys.metrics()) - names_before if "completions" not in name}
    assert not any("key" in name for name in new), new
    page = two_keys.ask("/metrics", ops=True).body.decode()
    for secret in (KEY, OTHER):
        assert secret not in page
        assert all(secret not in str(answer.headers) + answer.body.decode() for answer in answers)


def test_i39_nobody_ends_the_request_of_another_by_its_id(two_keys: FullServer) -> None:
    """Ids that clients choose are labels: the same one twice, or a part of one, meets nobody."""
    results: dict[str, Any] = {}

    def run(key: str, request_id: str) -> None:
        headers = {"authorization": f"Bearer {key}", "x_request_id": request_id}
        body = {"model": "tiny", "prompt": "mine", "max_tokens": 80, "ignore_eos": True, "temperature": 0}
        results[request_id + key] = two_keys.ask("/v1/completions", body, **headers)

    threads = [threading.Thread(target=run, args=(KEY, "chosen-id")), threading.Thread(target=run, args=(KEY, "c"))]
    for thread in threads:
        thread.start()
    two_keys.wait_until(lambda: two_keys.server.admission.inside == 2)
    with two_keys.raw() as connection:  # the same id under another key, and then gone
        head, _, body = completion_request(max_tokens=80, stream=True).partition(b"\r\n\r\n")
        mine = f"\r\nauthorization: Bearer {OTHER}\r\nx-request-id: chosen-id\r\n\r\n".encode()
        connection.sendall(head + mine + body)
        two_keys.wait_until(lambda: two_keys.server.admission.inside == 3)
    for method, path in [("DELETE", "/v1/completions/chosen-id"), ("POST", "/v1/completions/chosen-id/cancel")]:
        assert two_keys.ask(path, {}, method=method, authorization=f"Bearer {OTHER}").status in (404, 405)
    for path in ("/abort", "/abort_request", "/v1/abort"):
        answer = two_keys.ask(path, {"rid": "chosen-id", "request_id": ""}, authorization=f"Bearer {OTHER}")
        assert answer.status in (404, 405)
    for thread in threads:
        thread.join()
    assert [answer.status for answer in results.values()] == [200, 200]
    assert all(answer.json["usage"]["completion_tokens"] == 80 for answer in results.values())


# I40


@contextmanager
def listener() -> Iterator[tuple[str, list[Any]]]:
    """An address of this machine, and who has connected to it."""
    seen: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        closing = threading.Event()

        def accept() -> None:
            while not closing.is_set():
                try:
                    connection, peer = server.accept()
                except TimeoutError:
                    continue
                seen.append(peer)
                connection.close()

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}", seen
        finally:
            closing.set()
            thread.join()


def with_urls(kind: Any, body: dict[str, Any], url: str) -> Iterator[dict[str, Any]]:
    """The body with the URL in each of its fields, as text and as what other servers would fetch."""
    parts = [{"type": "text", "text": f"![]({url})"}, {"type": "image_url", "image_url": {"url": url}}]
    shapes: list[Any] = [url, [url], {"url": url}, [{"role": "user", "content": parts}], {"type": "url", "url": url}]
    others = ("url", "webhook", "callback_url", "image_url", "audio", "file", "tools", "response_format", "adapter_id")
    for name in (*kind.__struct_fields__, *others):
        for shape in shapes:
            yield {**body, name: shape}
    if "parameters" in body:
        for shape in shapes:
            yield {**body, "parameters": {**body["parameters"], "grammar": shape, "adapter_id": url, "stop": [url]}}


def ask(server: Served, path: str, body: Any, headers: dict[str, str]) -> int:
    connection = server.connect()
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json", **headers})
    status = connection.getresponse().status
    connection.close()
    return status


def test_i40_no_request_makes_the_server_connect_to_anything(folder: Path, tmp_path: Path) -> None:
    """What both processes do is recorded by an audit hook; a listener sees what no hook would."""
    record = tmp_path / "egress"
    with served(folder, faults={"egress": str(record)}) as server, listener() as (address, seen):
        headers = {name: f"http://{address}/h" for name in ("referer", "x-callback-url", "x-forwarded-host", "host")}
        asked, at_start = 0, record.read_text()  # its own address
        for path, (kind, body) in ROUTES.items():
            for scheme in ("http", "https"):
                for changed in with_urls(kind, body, f"{scheme}://{address}/x.png"):
                    assert ask(server, path, changed, {}) < 500
                    asked += 1
            assert ask(server, path, body, headers) < 500
        for path in ("/v1/models", "/health", "/metrics", "/info", f"//{address}/", f"/v1/models/http://{address}/x"):
            assert server.ask(path).status < 500
        assert asked > 500
        assert server.end() == 0
        assert seen == []
        assert at_start.count("recording") == 2  # processes
        assert record.read_text() == at_start


def test_i40_the_recorder_of_this_test_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess
    import sys

    record = tmp_path / "egress"
    program = """
import socket, sys
from tests.support.faulty_engine import record_egress
record_egress(sys.argv[1])
try:
    socket.create_connection(("127.0.0.1", 9), timeout=1)
except OSError:
    pass
"""
    subprocess.run([sys.executable, "-c", program, str(record)], check=True, env=os.environ, timeout=60)
    lines = record.read_text().splitlines()
    assert lines[0] == "recording"
    assert any(line.startswith("socket.connect") for line in lines)
