"""Keys: nothing but /livez without one, whatever the request looks like; each key's prompts in a cache of its own."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo import __version__
from octavo.errors import ConfigError
from octavo.server.auth import TENANT, Keys, read_key_file, salt_of
from tests.support.full_server import KEY, MODEL, FullServer, full_server, read_all
from tests.support.tiny_llm import write_tiny_llm

OTHER = "second-key"


def line(name: str, key: str) -> str:
    return f"{name} sha256:{hashlib.sha256(key.encode()).hexdigest()}\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llm(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def guarded(folder: Path) -> Iterator[FullServer]:
    with full_server(folder, api_key=[KEY, OTHER]) as full:
        yield full


def targets(path: str) -> list[str]:
    """Ways to write a path, or something that a careless reader takes for it or for a public one."""
    bare = path.lstrip("/")
    return [
        path,
        path + "/",
        path + "?x=/livez",
        path + "#/livez",
        path + ";/livez",
        path + "%2e",
        path + "/../livez",
        "/livez/.." + path,
        "/livez/" + bare,
        "//" + bare,
        "/" + bare.upper(),
        "/%2F" + bare,
        "http://127.0.0.1" + path,
        "http://x/livez" + path,
    ]


HOSTS = ["x", "x/livez?", "x/?", "x/#", "x@livez", "livez", "127.0.0.1/livez", ""]


def send(full: FullServer, method: str, target: str, host: str, *headers: str) -> tuple[int, bytes]:
    lines = [f"{method} {target} HTTP/1.1", f"host: {host}", "content-length: 0", "connection: close", *headers, "", ""]
    with full.raw() as connection:
        connection.sendall("\r\n".join(lines).encode())
        data = read_all(connection)
    return int(data.split(b" ", 2)[1]), data


def test_i34_no_key_no_answer_whatever_the_host_the_path_or_the_method(guarded: FullServer) -> None:
    paths = sorted({route.path.replace("{id:path}", MODEL) for route in guarded.server.routes} - {"/livez"})
    assert {"/readyz", "/metrics", "/v1/models", "/tokenize", "/generate", "/", "/openapi.json"} <= set(paths)
    requests = [(method, target, "x") for path in paths for target in targets(path) for method in ("GET", "POST")]
    requests += [(method, path, host) for path in paths for host in HOSTS for method in ("GET", "POST")]
    requests += [(method, path, "x") for path in paths for method in ("HEAD", "OPTIONS", "PUT", "DELETE", "TRACE")]
    for method, target, host in requests:
        status, answer = send(guarded, method, target, host)
        # 200 only where the server, like a client, reads the target as the very path /livez.
        assert status in (400, 401), (method, target, host, status)
        for secret in (MODEL.encode(), __version__.encode(), b"octavo", b"uvicorn", b"Traceback"):
            assert secret not in answer.lower(), (method, target, host)


def test_i34_livez_is_open_and_says_nothing(guarded: FullServer) -> None:
    for host in HOSTS:
        status, answer = send(guarded, "GET", "/livez", host)
        assert status == 200
        assert answer.endswith(b'\r\n\r\n{"status":"alive"}')
    for target in ("/livez/", "//livez", "/LIVEZ", "/livez/x"):
        assert send(guarded, "GET", target, "x")[0] == 401
    assert send(guarded, "POST", "/livez", "x")[0] == 401


@pytest.mark.parametrize(
    "header",
    [
        "authorization: Bearer wrong",
        "authorization: Bearer ",
        "authorization: Bearer",
        f"authorization: Basic {KEY}",
        f"authorization: {KEY}",
        f"authorization: Bearer {KEY.upper()}",
        f"authorization: Bearer {KEY}x",
        f"authorization: Bearer {KEY[:-1]}",
        f"authorization: Bearer {KEY}\r\nauthorization: Bearer {KEY}",
        f"x-authorization: Bearer {KEY}",
        "authorization: Bearer " + "k" * 5000,
        f"authorization: Bearer {KEY} {OTHER}",
    ],
)
def test_i34_a_wrong_key_is_none(guarded: FullServer, header: str) -> None:
    assert send(guarded, "GET", "/v1/models", "x", header)[0] == 401


def test_the_right_key_opens_every_route(guarded: FullServer) -> None:
    for key in (KEY, OTHER):
        for route in guarded.server.routes:
            path = route.path.replace("{id:path}", MODEL)
            if "GET" in (route.methods or ()):
                assert guarded.ask(path, authorization=f"Bearer {key}").status == 200, path
                assert guarded.ask(path, authorization=f"bearer  {key}").status == 200, path
    assert guarded.complete(key=KEY).status == 200


def test_a_refusal_is_an_error_openai_clients_understand(guarded: FullServer) -> None:
    answer = guarded.complete()
    assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert answer.json["error"]["code"] == "invalid_api_key"


def test_without_keys_nothing_is_asked_and_the_ops_listener_never_asks(folder: Path, guarded: FullServer) -> None:
    for path in ("/livez", "/readyz", "/metrics"):
        assert guarded.ask(path, ops=True).status == 200
    for path in ("/v1/models", "/v1/completions", "/version", "/health"):
        assert guarded.ask(path, ops=True).status == 404
    with full_server(folder) as open_server:
        assert open_server.complete().status == 200


def test_i39_a_prompt_of_another_key_is_never_found_in_the_cache(guarded: FullServer) -> None:
    prompt = "a prompt of some length that nobody else has"

    def cached(key: str, **options: str) -> int:
        return guarded.complete(prompt, key=key, **options).json["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(KEY) == 0
    assert cached(KEY) > 0
    assert cached(OTHER) == 0
    for guess in ("key-" + hashlib.sha256(KEY.encode()).hexdigest()[:12], salt_of({TENANT: "x"}, None), KEY):
        assert cached(OTHER, cache_salt=str(guess)) == 0
    assert cached(KEY, cache_salt="mine") == 0
    assert cached(KEY, cache_salt="mine") > 0


def test_keys_share_prefixes_when_the_operator_says_so(folder: Path) -> None:
    with full_server(folder, api_key=[KEY, OTHER], share_prefix_cache=True) as full:
        full.complete("a prompt of some length", key=KEY)
        usage = full.complete("a prompt of some length", key=OTHER).json["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0


def test_salts_of_tenants_and_wishes_never_meet() -> None:
    cases = [(tenant, asked) for tenant in ("a", "a\0b", "b", "ab") for asked in (None, "", "b", "a", "a\0", "\0")]
    made = {salt_of({TENANT: tenant}, asked) for tenant, asked in cases if "\0" not in tenant}
    assert len(made) == sum("\0" not in tenant for tenant, _ in cases)
    assert salt_of({}, "x") == "x"
    assert salt_of({}, None) is None


def test_a_key_file_is_read_again_when_it_changes_and_keeps_its_last_good_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text("# teams\n\n" + line("red", "r1") + line("blue", "b1"))
    keys = Keys(["given"], file)
    assert [keys.name_of(key) for key in (b"r1", b"b1", b"r2", b"")] == ["red", "blue", None, None]
    assert keys.name_of(b"given") is not None
    file.write_text(line("red", "r1") + line("red", "r2-new"))  # rotation: two keys, one tenant
    keys.reload()
    assert [keys.name_of(key) for key in (b"r1", b"r2-new", b"b1")] == ["red", "red", None]
    file.write_text("red r1\n")
    with caplog.at_level(logging.ERROR, "octavo"):
        keys.reload()
    assert keys.name_of(b"r1") == "red"
    assert "line 1" in caplog.text
    assert "r1" not in caplog.text
    os.unlink(file)
    keys.reload()
    assert keys.name_of(b"r2-new") == "red"
    file.write_text(line("green", "g"))
    keys.reload()
    assert [keys.name_of(key) for key in (b"g", b"r1")] == ["green", None]


def test_an_empty_key_file_closes_the_server_and_an_unreadable_one_stops_the_start(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# nobody yet\n")
    assert Keys((), file).required
    assert Keys((), file).name_of(b"") is None
    with pytest.raises(ConfigError, match="missing"):
        Keys((), tmp_path / "missing")
    file.write_text("name plain-key\n")
    with pytest.raises(ConfigError, match="line 1"):
        read_key_file(file)


def test_every_key_is_compared_so_time_does_not_tell_which_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr("octavo.server.auth.hmac.compare_digest", lambda a, b: compared.append(b) or a == b)
    keys = Keys(["one", "two", "three"])
    for key in (b"one", b"three", b"wrong"):
        compared.clear()
        keys.name_of(key)
        assert len(compared) == 3


def test_cors_is_off_unless_an_origin_is_named(folder: Path, guarded: FullServer) -> None:
    asked = {"origin": "https://a.example", "access_control_request_method": "POST"}
    assert guarded.ask("/v1/completions", method="OPTIONS", **asked).status == 401
    answer = guarded.ask("/v1/models", authorization=f"Bearer {KEY}", origin="https://a.example")
    assert not any(name.startswith("access-control") for name in answer.headers)
    with full_server(folder, api_key=[KEY], cors_origin=["https://a.example"]) as full:
        assert full.ask("/v1/completions", method="OPTIONS", **asked).status == 200
        refused = full.ask("/v1/completions", method="OPTIONS", **{**asked, "origin": "https://b.example"})
        assert refused.status == 400
        assert full.ask("/v1/models", origin="https://a.example").status == 401
