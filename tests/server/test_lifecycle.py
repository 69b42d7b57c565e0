"""`octavo serve` from its start to its end: what it says, and that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.server.config import ServerConfig
from octavo.server.lifecycle import _listen, _listeners
from tests.support.clients import is_running
from tests.support.full_server import completion_request, read_all
from tests.support.llms import environment
from tests.support.served import Served, served
from tests.support.tiny_llm import write_tiny_llm

SLOW = {"step_seconds": 0.02}
ASKED = {"model": "tiny", "prompt": "hi", "max_tokens": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llm(tmp_path_factory.mktemp("tiny"))


def test_the_start_says_where_what_and_how_to_call_it_and_the_line_works(folder: Path) -> None:
    with served(folder) as server:
        text = "\n".join(server.log)
        assert f"tiny is ready at http://127.0.0.1:{server.port}" in text
        assert "KV memory" in text
        assert "\x1b" not in text
        command = re.search(r"curl .*", text)
        assert command is not None
        answer = subprocess.run(["bash", "-c", command[0]], capture_output=True, text=True, timeout=20)
        assert json.loads(answer.stdout)["choices"][0]["message"]["role"] == "assistant"
        assert server.end() == 0
        assert server.log[-1].endswith("the server has ended")


def test_i27_a_drain_lets_streams_finish_refuses_new_work_and_ends_with_0(folder: Path) -> None:
    with served(folder, faults=SLOW) as server:
        lines = server.stream(max_tokens=60)
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(r"shutting down; .*: 1\b")
        refused = server.ask("/v1/completions", ASKED)
        assert (refused.status, refused.json["error"]["code"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) >= 1
        ready = server.ask("/readyz")
        assert (ready.status, ready.json["status"]) == (503, "draining")
        assert server.ask("/livez").status == 200
        assert list(lines)[-2].strip() == b"data: [DONE]"
        assert server.process.wait(10) == 0


@pytest.mark.parametrize("signals", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGINT)])
def test_i27_a_second_signal_hurries_and_still_tells_the_clients(folder: Path, signals: tuple[int, int]) -> None:
    with served(folder, faults=SLOW) as server:
        lines = server.stream(max_tokens=240)  # 5 seconds
        next(lines)
        server.process.send_signal(signals[0])
        server.wait_for(r"shutting down; .*: 1\b")
        begin = time.monotonic()
        assert server.end(signals[1]) == 0
        assert time.monotonic() - begin < 4
        assert_cut_short(b"".join(lines))


def test_i27_the_drain_has_a_limit(folder: Path) -> None:
    with served(folder, "--drain-timeout", "0.3", faults=SLOW) as server:
        lines = server.stream(max_tokens=240)
        next(lines)
        assert server.end() == 0
        assert_cut_short(b"".join(lines))
    assert any("requests cut short: 1" in line for line in server.log)


def assert_cut_short(text: bytes) -> None:
    """An error that says so, and no mark of a regular end."""
    assert b'"error"' in text.strip().split(b"\n\n")[-1]
    assert b"[DONE]" not in text


def test_ctrl_c_while_idle_ends_it_with_0(folder: Path) -> None:
    with served(folder) as server:
        assert server.end(signal.SIGINT) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.3])
def test_a_signal_while_it_starts_ends_it_with_0(folder: Path, number: int, seconds: float) -> None:
    with served(folder, ready=False) as server:
        server.wait_for("loading")
        time.sleep(seconds)
        assert server.end(number) == 0
    assert not any("Traceback" in line for line in server.log)


def test_two_signals_at_the_same_moment_are_two(folder: Path) -> None:
    with served(folder, faults=SLOW) as server:
        lines = server.stream(max_tokens=240)  # 5 seconds
        next(lines)
        begin = time.monotonic()
        server.process.send_signal(signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGINT)
        assert server.end(signal.SIGCONT) == 0
        assert time.monotonic() - begin < 4
        assert_cut_short(b"".join(lines))


def test_whatever_runs_when_the_end_is_forced_gets_json_or_a_cut_connection(folder: Path) -> None:
    long_text = {"model": "tiny", "prompt": "a b" * 500_000, "max_tokens": 1}
    with served(folder, faults=SLOW) as server, ExitStack() as stack:
        connections = []
        for request in (
            completion_request(max_tokens=240),
            completion_request(max_tokens=240, stream=True),
            completion_request(max_tokens=240)[:-5],
            completion_request(**long_text),
            b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 5\r\n\r\n",
            b"GET /livez HT",
        ):
            address = ("127.0.0.1", server.port)
            connections.append(stack.enter_context(socket.create_connection(address, timeout=10)))
            connections[-1].sendall(request)
        server.wait_for("ready")
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(r"shutting down; .*: [2-9]\b")
        begin = time.monotonic()
        assert server.end() == 0
        assert time.monotonic() - begin < 5
        for connection in connections:
            head, _, body = read_all(connection).partition(b"\r\n\r\n")
            assert not head or b"application/json" in head or b"text/event-stream" in head
            assert b"Internal Server Error" not in body
    assert not [line for line in server.log if "Traceback" in line or "CancelledError" in line or "ASGI" in line]


@pytest.mark.parametrize("stderr", ["full", "nobody"])
def test_a_log_that_cannot_be_written_stops_nothing(folder: Path, stderr: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "octavo", "serve", str(folder), "--port", str(port), "--log-requests"]
    if stderr == "full":
        sink = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, sink = os.pipe()
        os.close(reader)
    flags = ["--served-model-name", "tiny", "--kv-memory", "2MB", "--threads", "1"]
    process = subprocess.Popen([*command, *flags], stdout=sink, stderr=sink, env=environment())
    os.close(sink)
    try:
        server = Served(process, port=port)  # type: ignore[arg-type]
        wait_until_ready(server)
        for _ in range(3):
            assert server.ask("/v1/completions", ASKED).status == 200
        (engine,) = server.children()
        os.kill(engine, signal.SIGKILL)
        assert server.ask("/v1/completions", ASKED).status in (200, 503)
        assert server.end() == 0
    finally:
        process.kill()
        process.wait()


def test_i26_kill_9_of_the_server_ends_the_engine_and_the_port_is_free_at_once(folder: Path) -> None:
    with served(folder) as server:
        port, engines = server.port, server.children()
        assert len(engines) == 1
        lines = server.stream(max_tokens=240)
        next(lines)
        server.process.kill()
        server.process.wait()
        with served(folder, "--port", str(port)) as successor:
            assert successor.port == port
            assert successor.ask("/v1/completions", ASKED).status == 200
            end = time.monotonic() + 10
            while any(map(is_running, engines)):
                assert time.monotonic() < end
                time.sleep(0.02)


def failed(folder: Path, *flags: str) -> str:
    with served(folder, *flags, ready=False) as server:
        assert server.process.wait(20) == 1
    assert not any("Traceback" in line for line in server.log)
    return "\n".join(server.log)


def test_a_taken_port_is_said_before_anything_is_loaded(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        told = failed(folder, "--port", str(port))
        assert f"--port {port} on 127.0.0.1 is not allowed: it is taken by another program" in told
        told = failed(folder, "--ops-port", str(port))
        assert f"--ops-port {port}" in told


def test_a_model_that_cannot_be_loaded_ends_it_with_one_line(tmp_path: Path) -> None:
    assert "error: " in failed(tmp_path / "nothing-here")


def test_a_unix_socket_serves_survives_a_crash_and_is_removed_at_the_end(folder: Path, tmp_path: Path) -> None:
    path = str(tmp_path / "octavo.sock")

    def alive() -> str:
        command = ["curl", "-s", "--unix-socket", path, "http://octavo/livez"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout

    with served(folder, "--uds", path) as server:
        assert alive() == '{"status":"alive"}'
        assert "another server listens there" in failed(folder, "--uds", path)
        server.process.kill()
        server.process.wait()
    assert os.path.exists(path)
    with served(folder, "--uds", path) as server:
        assert alive() == '{"status":"alive"}'
        assert server.end() == 0
    assert not os.path.exists(path)
    Path(path).write_text("not a socket")
    with pytest.raises(ConfigError, match="no other file"), _listeners(ServerConfig(uds=path)):
        pass


def test_an_address_of_a_host_that_this_machine_lacks_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    here = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))
    elsewhere = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0)),
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2001:db8::1", 0, 0, 0)),
        (socket.AF_APPLETALK, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
    ]
    for found in ([*elsewhere, here], [here, *elsewhere]):
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, found=found, **__: found)
        (listener,) = _listen("some.host", 0, "--port")
        with listener:
            assert listener.getsockname()[0] == "127.0.0.1"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: elsewhere)
    with pytest.raises(ConfigError, match="can't be opened"):
        _listen("some.host", 0, "--port")


def test_one_port_for_all_addresses_of_a_host() -> None:
    sockets = _listen("localhost", 0, "--port")
    try:
        assert len({each.getsockname()[1] for each in sockets}) == 1
    finally:
        for each in sockets:
            each.close()
    with pytest.raises(ConfigError, match="address of this machine"):
        _listen("no.such.host.invalid", 0, "--port")


def test_json_logs_are_an_object_a_line_and_show_no_content(folder: Path) -> None:
    with served(folder, "--log-format", "json", "--log-requests") as server:
        secret = "a prompt nobody may see"
        server.ask("/v1/completions", {**ASKED, "prompt": secret, "ignore_eos": True})
        server.wait_for('"route":"/v1/completions"')
        assert server.end() == 0
    lines = [json.loads(line) for line in server.log]
    assert len(lines) >= 4
    told = next(line for line in lines if line.get("route") == "/v1/completions")
    assert (told["status"], told["prompt_tokens"], told["completion_tokens"]) == (200, len(secret), 3)
    assert secret not in "\n".join(server.log)


@pytest.mark.parametrize(("level", "others"), [("info", {"info"}), ("error", set())])
def test_both_processes_log_in_the_format_and_from_the_level_that_was_asked_for(
    folder: Path, level: str, others: set[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ("--port", str(port), "--log-format", "json", "--log-level", level)
    with served(folder, *flags, faults={"poison": [7, 8, 9], "how": "raise"}, ready=False) as server:
        server.port = port
        wait_until_ready(server)
        answer = server.ask("/v1/completions", {**ASKED, "prompt": [5, 7, 8, 9]})
        assert answer.status == 500
        wait_until_ready(server)
        assert server.end() == 0
    lines = [json.loads(line) for line in server.log]
    assert {line["level"] for line in lines} == {"error", "critical", *others}
    ended = [line for line in lines if line.get("process") == "engine" and line["level"] == "critical"]
    assert all("planted" in line["exception"] for line in ended)
    assert len(ended) == 2


def wait_until_ready(server: Served) -> None:
    end = time.monotonic() + 20
    while True:
        assert server.process.poll() is None
        assert time.monotonic() < end
        with contextlib.suppress(OSError):
            if server.ask("/readyz").status == 200:
                return
        time.sleep(0.05)


def test_requests_are_not_logged_unless_asked_for(folder: Path) -> None:
    with served(folder) as server:
        server.ask("/v1/completions", ASKED)
        assert server.end() == 0
    assert not any("/v1/completions request" in line for line in server.log)


def test_servers_started_at_the_same_time_do_not_meet(folder: Path) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(served(folder, ready=False)) for _ in range(3)]
        for server in servers:
            server.wait_ready()
        assert len({server.port for server in servers}) == 3


def listening(pid: int) -> list[str]:
    """Local addresses, in /proc's hexadecimal, of the TCP sockets a process listens on."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(entry).removeprefix("socket:[").rstrip("]"))
        except OSError:
            continue
    found = []
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/{pid}/net/{table}")
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1])
    return found


def test_i37_nothing_listens_but_the_port_that_was_asked_for(folder: Path) -> None:
    with served(folder) as server:
        (engine,) = server.children()
        assert listening(server.process.pid) == [f"0100007F:{server.port:04X}"]
        assert listening(engine) == []


# --- what the system has no more of ---


def test_connections_without_end_leave_descriptors_for_the_engine(folder: Path) -> None:
    """Also where few are allowed."""
    with served(folder, limited_to=180, faults={}) as server, ExitStack() as stack:
        assert "connections at once" in "\n".join(server.log)
        held = []
        for _ in range(250):
            with contextlib.suppress(OSError):
                held.append(stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=5)))
        (engine,) = server.children()
        os.kill(engine, signal.SIGKILL)
        server.wait_for("it is started again")
        time.sleep(0.5)
        for connection in held:
            connection.close()
        wait_until_ready(server)
        assert server.ask("/v1/completions", ASKED).status == 200
        assert server.ask("/readyz").json["restarts"] == 1


def test_as_many_descriptors_are_taken_as_connections_need(folder: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    for most in (10, hard // 4):
        with served(folder, "--max-connections", str(most), limited_to=(200, hard), ready=False) as server:
            server.wait_for("loading")
            end = time.monotonic() + 10
            while resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)[0] < most:
                assert time.monotonic() < end
                time.sleep(0.02)
            assert resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)[0] >= 200
