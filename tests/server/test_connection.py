"""Raw sockets: sizes and times are bounded before anything is parsed, and nothing a client does wedges the server."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo import limits
from octavo.logs import set_up_logging
from tests.support.full_server import FullServer, completion_request, full_server, read_all, read_answer
from tests.support.tiny_llm import write_tiny_llm

BODY = 4096
GET = b"GET /livez HTTP/1.1\r\nhost: x\r\n"


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FullServer]:
    times = {"header_timeout": 0.4, "body_timeout": 0.6, "idle_timeout": 0.5, "slow_client_timeout": 0.5}
    with full_server(write_tiny_llm(tmp_path_factory.mktemp("tiny")), max_body_bytes=BODY, **times) as server:
        yield server


@pytest.fixture(scope="module")
def slow(full: FullServer) -> Iterator[FullServer]:
    """A step takes 10 ms."""
    times = {"header_timeout": 0.2, "body_timeout": 0.3, "idle_timeout": 0.5}
    with full_server(Path(full.engine.options.model), faults={"step_seconds": 0.01}, **times) as server:
        yield server


@pytest.fixture(autouse=True)
def _serves_afterwards(full: FullServer) -> Iterator[None]:
    before = full.complete(seed=1)
    yield
    after = full.complete(seed=1)
    assert (after.status, after.json["choices"]) == (200, before.json["choices"])
    full.wait_until(lambda: full.server.admission.inside == 0, 2.0)
    full.wait_until(lambda: full.run(lambda: full.engine.call("stats"))["blocks_used"] == 0, 2.0)


def exchange(full: FullServer, data: bytes) -> int:
    with full.raw() as connection:
        connection.sendall(data)
        return read_answer(connection).status


# --- sizes ---


def test_i36_bodies_up_to_the_limit_are_read_and_longer_ones_refused(full: FullServer) -> None:
    whole = completion_request(max_tokens=1)
    head, _, body = whole.partition(b"\r\n\r\n")
    for size, status in ((BODY - 1, 200), (BODY, 200), (BODY + 1, 413), (100 * BODY, 413)):
        padded = body + b" " * (size - len(body))
        sized = head.replace(b"content-length: %d" % len(body), b"content-length: %d" % size)
        assert exchange(full, sized + b"\r\n\r\n" + padded) == status, size
        chunked = head.replace(b"content-length: %d" % len(body), b"transfer-encoding: chunked")
        data = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in pieces(padded, 1000))
        assert exchange(full, chunked + b"\r\n\r\n" + data + b"0\r\n\r\n") == status, size


def pieces(data: bytes, size: int) -> list[bytes]:
    return [data[i : i + size] for i in range(0, len(data), size)]


def test_i36_after_a_refused_body_the_connection_goes_on(full: FullServer) -> None:
    with full.raw() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        connection.sendall(b"content-length: %d\r\n\r\n" % (BODY + 1))
        assert read_answer(connection).status == 413
        connection.sendall(b" " * (BODY + 1) + GET + b"\r\n")
        assert read_answer(connection).status == 200


def test_i36_an_endless_body_that_nobody_wants_ends_the_connection(full: FullServer) -> None:
    with full.raw() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9999999999\r\n\r\n")
        assert read_answer(connection).status in (413, 415)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            connection.sendall(b" " * 2 * limits.MAX_DISCARDED_BYTES)


def test_i36_headers_are_bounded_in_number_and_bytes(full: FullServer) -> None:
    for count, status in ((limits.MAX_HEADERS - 1, 200), (limits.MAX_HEADERS, 200), (limits.MAX_HEADERS + 1, 431)):
        extra = b"".join(b"x-%d: y\r\n" % i for i in range(count - 1))
        assert exchange(full, GET + extra + b"\r\n") == status, count
    for size, status in ((-1, 200), (0, 200), (1, 431), (1 << 20, 431)):
        long = limits.MAX_HEADER_BYTES + size - len(b"hostx") - len(b"long")
        assert exchange(full, GET + b"long: " + b"y" * long + b"\r\n\r\n") == status, size
    for size, status in ((0, 401), (1, 414)):
        url = b"/" + b"a" * (limits.MAX_URL_BYTES - 1 + size)
        assert exchange(full, b"GET " + url + b" HTTP/1.1\r\nhost: x\r\n\r\n") == (404 if status == 401 else status)


def test_i36_a_header_without_end_is_refused_while_it_comes(full: FullServer) -> None:
    with full.raw() as connection:
        connection.sendall(GET + b"long: ")
        for _ in range(64):
            try:
                connection.sendall(b"y" * 1024)
            except OSError:
                break
        assert b" 431 " in read_all(connection)[:20]


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100,
        b"GET / HTTP/9.9\r\n\r\n",
        b"BREW / HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nhost: x\r\nno colon here\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"CONNECT example.com:80 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
)
def test_what_is_no_http_gets_400_and_the_end(full: FullServer, data: bytes) -> None:
    with full.raw() as connection:
        connection.sendall(data)
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in answer


# --- times ---


def test_i36_a_byte_a_moment_does_not_hold_a_connection(full: FullServer) -> None:
    with full.raw() as connection:
        begin = time.monotonic()
        for byte in GET:
            try:
                connection.sendall(bytes([byte]))
            except OSError:
                break
            time.sleep(0.05)
        assert b" 408 " in read_all(connection)[:20]
        assert time.monotonic() - begin < 5


def test_i36_a_body_must_come_in_time(full: FullServer) -> None:
    with full.raw() as connection:
        connection.sendall(completion_request()[:-5])
        assert b" 408 " in read_all(connection)[:20]


def test_i36_silence_ends_a_connection_before_and_between_requests(full: FullServer) -> None:
    with full.raw() as connection:
        assert read_all(connection) == b""
    with full.raw() as connection:
        connection.sendall(GET + b"\r\n")
        assert read_answer(connection).status == 200
        assert read_all(connection) == b""


def test_a_long_answer_is_not_mistaken_for_silence(full: FullServer) -> None:
    with full_server(Path(full.engine.options.model), faults={"step_seconds": 0.02}, header_timeout=0.3) as slow:
        assert slow.complete(max_tokens=40).status == 200


# --- odd clients ---


def test_pipelined_requests_are_answered_in_order_and_only_so_many(full: FullServer) -> None:
    with full.raw() as connection:
        connection.sendall(completion_request(max_tokens=3) + GET + b"\r\n" + completion_request(max_tokens=2))
        reader = connection.makefile("rb")
        bodies = []
        for _ in range(3):
            assert b" 200 " in reader.readline()
            size = 0
            while (line := reader.readline()) != b"\r\n":
                if line.startswith(b"content-length: "):
                    size = int(line.split()[1])
            bodies.append(reader.read(size))
    assert bodies[1] == b'{"status":"alive"}'
    assert b'"completion_tokens":3' in bodies[0]
    assert b'"completion_tokens":2' in bodies[2]
    with full.raw() as connection:
        connection.sendall(completion_request(max_tokens=200) + (GET + b"\r\n") * (limits.MAX_PIPELINED_REQUESTS + 5))
        answers = read_all(connection)
    assert answers.count(b"HTTP/1.1 200") == 1 + limits.MAX_PIPELINED_REQUESTS
    assert b"HTTP/1.1 400" in answers[answers.rindex(b"HTTP/1.1 ") :]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", [socket.SHUT_WR, "close", "reset"])
def test_i21_a_client_that_leaves_is_noticed(full: FullServer, stream: bool, how: object) -> None:
    count = len(full.records)
    with full.raw() as connection:
        connection.sendall(completion_request(max_tokens=200, n=1, stream=stream))
        full.wait_until(lambda: full.server.admission.inside == 1 or len(full.records) > count)
        if how == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        if isinstance(how, int):
            connection.shutdown(how)
            read_all(connection)
    full.wait_until(lambda: len(full.records) > count)


@pytest.mark.parametrize(("stream", "how"), [(False, "close"), (True, socket.SHUT_WR)])
@pytest.mark.parametrize(
    "behind",
    [
        pytest.param([GET + b"\r\n"], id="with a request"),
        pytest.param([b"", GET + b"\r\n"], id="then a request"),
        pytest.param([b"", completion_request(max_tokens=2)[:-3]], id="then part of a request"),
        pytest.param([b"", b"GET / HT"], id="then part of a head"),
        pytest.param([completion_request(prompt=" " * 3000)] * 12, id="then much more"),
        pytest.param([b"", b" " * 2 * limits.MAX_PIPELINED_BYTES], id="then too much"),
        pytest.param([b"", b"\r\n"], id="then an empty line"),
        pytest.param([b"", b"\0 garbage\r\n\r\n"], id="then garbage"),
    ],
)
def test_i21_a_client_that_leaves_is_noticed_whatever_it_sent_before(
    slow: FullServer, stream: bool, behind: list[bytes], how: object
) -> None:
    count = len(slow.records)
    with slow.raw() as connection:
        connection.sendall(completion_request(max_tokens=240, stream=stream) + behind[0])  # 2.4 seconds
        slow.wait_until(lambda: slow.server.admission.inside == 1 and slow.engine.stats.running == 1)
        for data in behind[1:]:
            time.sleep(0.02)
            connection.sendall(data)
        time.sleep(0.1)
        assert len(slow.records) == count
        if isinstance(how, int):
            connection.shutdown(how)
            slow.wait_until(lambda: slow.server.admission.inside == 0, 1.0)
    slow.wait_until(lambda: slow.server.admission.inside == 0, 1.0)
    assert slow.records[count].disconnected
    assert all(record.disconnected for record in slow.records[count:])


@pytest.mark.parametrize(("stream", "pause"), [(False, 0.0), (True, 0.1)])
@pytest.mark.parametrize(
    ("behind", "status"),
    [
        pytest.param(b"\x00\x01 garbage\r\n\r\n", 400, id="garbage"),
        pytest.param(b"GET /livez HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n", 400, id="two hosts"),
        pytest.param(b"GET /" + b"a" * 2 * limits.MAX_URL_BYTES + b" HTTP/1.1\r\n\r\n", 414, id="long URL"),
        pytest.param(b"GET /livez HT", 408, id="half a head"),
        pytest.param(completion_request(max_tokens=2)[:-3], 408, id="half a body"),
        pytest.param(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400, id="bad body"),
        pytest.param(b" " * 2 * limits.MAX_PIPELINED_BYTES, 400, id="too much"),
        pytest.param(b"\r\n", 200, id="an empty line"),
        pytest.param(b"\r\n\r\n" + GET + b"\r\n", 200, id="empty lines and a request"),
        pytest.param(GET + b"\r\n" + GET + b"\r\n" + b"\x00\x01 garbage\r\n\r\n", 400, id="requests, then garbage"),
        pytest.param(GET + b"\r\n" + completion_request(max_tokens=2), 200, id="requests"),
    ],
)
def test_what_comes_behind_a_request_does_not_touch_its_answer_and_is_answered_after_it(
    slow: FullServer, stream: bool, pause: float, behind: bytes, status: int
) -> None:
    """However long the answer takes, here longer than a header and a body may."""
    with slow.raw() as connection:
        request = completion_request(max_tokens=60, stream=stream)  # 0.6 seconds
        if pause:
            connection.sendall(request)
            time.sleep(pause)
            request = b""
        connection.sendall(request + behind)
        answers = read_all(connection).split(b"HTTP/1.1 ")[1:]
    assert answers[0].startswith(b"200 ")
    assert (b"data: [DONE]" if stream else b'"completion_tokens":60') in answers[0]
    if status == 200:
        wanted = [b"200"] * (behind.count(GET) + behind.count(b"POST"))
    else:
        wanted = [b"200"] * behind.count(GET + b"\r\n") + [b"%d" % status]
    assert [answer[:3] for answer in answers[1:]] == wanted


def test_a_request_in_parts_behind_another_has_its_whole_time(slow: FullServer) -> None:
    with slow.raw() as connection:
        second = completion_request(max_tokens=2)
        connection.sendall(completion_request(max_tokens=60) + second[:-10])
        assert read_answer(connection).status == 200
        time.sleep(0.15)
        connection.sendall(second[-10:])
        assert read_answer(connection).json["usage"]["completion_tokens"] == 2


def test_an_empty_line_does_not_shorten_the_time_a_connection_is_kept(full: FullServer) -> None:
    kept = full_server(Path(full.engine.options.model), header_timeout=0.2, idle_timeout=1.5)
    with kept as server, server.raw() as connection:
        connection.sendall(GET + b"\r\n\r\n")
        assert read_answer(connection).status == 200
        connection.sendall(b"\r\n")
        time.sleep(0.6)
        connection.sendall(GET + b"\r\n")
        assert read_answer(connection).status == 200


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("keep", [b"", b"connection: keep-alive\r\n"])
def test_a_client_of_http_1_0_gets_no_chunks(full: FullServer, version: str, stream: bool, keep: bytes) -> None:
    request = completion_request(max_tokens=5, stream=stream, seed=1)
    with full.raw() as connection:
        connection.sendall(request.replace(b"HTTP/1.1\r\n", b"HTTP/" + version.encode() + b"\r\n" + keep))
        if version == "1.1":
            assert (read_answer(connection).headers.get("transfer-encoding") == "chunked") is stream
            return
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    whole = full.ask("/v1/completions", json.loads(request.partition(b"\r\n\r\n")[2])).body
    assert texts_of(body) == texts_of(whole)
    assert body.count(b"[DONE]") == stream


def texts_of(body: bytes) -> list[str]:
    return re.findall(r'"text":"[^"]*"', body.decode())


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_an_offer_of_another_protocol_is_ignored_and_the_body_is_read(full: FullServer, protocol: bytes) -> None:
    """As Java's HTTP client sends every request."""
    plain = completion_request(max_tokens=3, seed=4)
    offer = (
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %b\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n" % protocol
    )
    offering = plain.replace(b"\r\n", b"\r\n" + offer, 1)
    with full.raw() as connection:
        connection.sendall(plain)
        expected = read_answer(connection)
    with full.raw() as connection:
        connection.sendall(offering + plain)
        answers = [read_answer(connection), read_answer(connection)]
    assert [answer.status for answer in answers] == [200, 200]
    assert [texts_of(answer.body) for answer in answers] == [texts_of(expected.body)] * 2


def test_malformed_requests_cannot_fill_the_log(full: FullServer, capfd: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info", "plain")
    for _ in range(200):
        assert exchange(full, b"\x00\x01 garbage\r\n\r\n") == 400
        assert (
            exchange(full, b"GET /livez HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n")
            == 200
        )
    assert len(capfd.readouterr().err.splitlines()) < 100


def test_i22_a_reader_that_stalls_costs_bounded_memory_and_is_cut_off(full: FullServer) -> None:
    stalled = socket.socket()
    stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stalled.settimeout(10)
    with stalled:
        stalled.connect(("127.0.0.1", full.port))
        asked = {"n": 16, "temperature": 1.0, "logprobs": 5, "max_tokens": 200, "stream": True}
        stalled.sendall(completion_request(**asked, prompt=["a", "b", "c", "d"]))
        full.wait_until(lambda: full.server.admission.inside > 0)
        most = 0

        def cut_off() -> bool:
            nonlocal most
            for connection in list(full.uvicorn.server_state.connections):
                if connection.transport is not None:
                    most = max(most, connection.transport.get_write_buffer_size())
            return full.server.admission.inside == 0

        full.wait_until(cut_off, 20)
    assert full.records[-1].disconnected or full.records[-1].error_code == "slow_reader"
    one_write = 64 * 2048  # all that a step brings for one request
    assert limits.MAX_WRITE_BUFFER_BYTES // 2 < most <= limits.MAX_WRITE_BUFFER_BYTES + one_write
