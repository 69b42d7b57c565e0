"""`octavo serve` from its start to its end: what it says, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.server.config import ServerConfig
from octavo.server.lifecycle import _listen, _listeners
from tests.support.clients import is_running
from tests.support.served import served
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
        server.wait_for("shutting down: 1 requests")
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
        server.wait_for("shutting down: 1 requests")
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
    assert any("1 requests are cut short" in line for line in server.log)


def assert_cut_short(text: bytes) -> None:
    """An error that says so, and no mark of a regular end."""
    assert b'"error"' in text.strip().split(b"\n\n")[-1]
    assert b"[DONE]" not in text


def test_ctrl_c_while_idle_ends_it_with_0(folder: Path) -> None:
    with served(folder) as server:
        assert server.end(signal.SIGINT) == 0


def test_a_signal_while_the_model_is_loaded_ends_it(folder: Path) -> None:
    with served(folder, ready=False) as server:
        server.wait_for("loading")
        time.sleep(0.3)
        assert server.end() in (0, -signal.SIGTERM)


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
        server.ask("/v1/completions", {**ASKED, "prompt": secret})
        server.wait_for('"route":"/v1/completions"')
        assert server.end() == 0
    lines = [json.loads(line) for line in server.log if line.startswith("{")]
    told = next(line for line in lines if line.get("route") == "/v1/completions")
    assert (told["status"], told["prompt_tokens"], told["completion_tokens"]) == (200, len(secret), 3)
    assert secret not in "\n".join(server.log)


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
