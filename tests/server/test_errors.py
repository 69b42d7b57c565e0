"""Every error has its status and its words in both surfaces, also when it comes from the engine's process."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import msgspec
import pytest

from octavo import errors
from octavo.engine.ipc import Failure
from octavo.errors import OctavoError
from octavo.server.exchange import OPENAI, TGI, Endpoint, Exchange
from octavo.server.state import ServerState

EXAMPLES: dict[type[OctavoError], OctavoError] = {
    errors.InvalidParameterError: errors.InvalidParameterError("top_p", 2, "a number above 0, up to 1"),
    errors.DatasetError: errors.DatasetError("/a/file", "entry 1", "is odd"),
    errors.ModelFileError: errors.ModelFileError("/a/file", "is damaged"),
    errors.ConfigError: errors.ConfigError("--port", "a port"),
    errors.OverloadedError: errors.OverloadedError("512 requests are waiting", 7),
    errors.DrainingError: errors.DrainingError(9),
    errors.ProgramError: errors.ProgramError("a.py", 3, "gen()", ValueError("odd")),
}

INVALID, BROKEN, AWAY = "invalid_request_error", "server_error", "service_unavailable_error"
# The status, type and code of OpenAI's surface; the status and error_type of TGI's.
ANSWERS: dict[str, tuple[int, str, str, int, str]] = {
    "OctavoError": (500, BROKEN, "request_failed", 424, "generation"),
    "InvalidParameterError": (400, INVALID, "invalid_value", 422, "validation"),
    "ModelNotFoundError": (500, BROKEN, "request_failed", 424, "generation"),
    "DownloadError": (500, BROKEN, "request_failed", 424, "generation"),
    "ModelFileError": (500, BROKEN, "request_failed", 424, "generation"),
    "DatasetError": (500, BROKEN, "request_failed", 424, "generation"),
    "UnsupportedModelError": (500, BROKEN, "request_failed", 424, "generation"),
    "ChatTemplateError": (400, INVALID, "chat_template_error", 422, "template_error"),
    "CapacityError": (400, INVALID, "context_length_exceeded", 422, "validation"),
    "QueueFullError": (429, "rate_limit_error", "overloaded", 429, "overloaded"),
    "RequestFailedError": (500, BROKEN, "request_failed", 424, "generation"),
    "EngineClosedError": (503, AWAY, "engine_unavailable", 503, "healthcheck"),
    "EngineUnavailableError": (503, AWAY, "engine_unavailable", 503, "healthcheck"),
    "DeadlineError": (504, BROKEN, "deadline_exceeded", 504, "overloaded"),
    "SlowReaderError": (408, INVALID, "slow_reader", 408, "validation"),
    "FrameError": (500, BROKEN, "request_failed", 424, "generation"),
    "ConfigError": (500, BROKEN, "request_failed", 424, "generation"),
    "OverloadedError": (429, "rate_limit_error", "overloaded", 429, "overloaded"),
    "DrainingError": (503, AWAY, "draining", 503, "healthcheck"),
    "ProgramError": (500, BROKEN, "request_failed", 424, "generation"),
    "BackendError": (500, BROKEN, "request_failed", 424, "generation"),
    "UnsupportedByBackendError": (500, BROKEN, "request_failed", 424, "generation"),
    "ProgramCancelledError": (500, BROKEN, "request_failed", 424, "generation"),
}
COMES_BACK = {429, 503}  # the client is told when to try again


def kinds() -> dict[str, type[OctavoError]]:
    found = inspect.getmembers(errors, lambda item: isinstance(item, type) and issubclass(item, OctavoError))
    return dict(found)


def answer(error: Exception, surface: str) -> tuple[int, dict[str, str], Any]:
    """What a client gets from a route whose handler raises it."""

    async def handler(state: ServerState, exchange: Exchange, body: bytes) -> None:
        raise error

    async def ask() -> list[Any]:
        sent: list[Any] = []
        body = iter([{"type": "http.request", "body": b"{}"}])

        async def receive() -> Any:
            for message in body:
                return message
            return await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        state: Any = type("State", (), {"max_body_bytes": 100, "observe": lambda self, record: None})()
        scope = {"type": "http", "path": "/", "method": "POST", "headers": [(b"content-type", b"application/json")]}
        await Endpoint(state, handler, surface)(scope, receive, send)
        return sent

    start, body = asyncio.run(ask())
    headers = {name.decode(): value.decode() for name, value in start["headers"]}
    return start["status"], headers, msgspec.json.decode(body["body"])


def test_every_kind_of_error_has_an_answer() -> None:
    assert set(ANSWERS) == set(kinds())


@pytest.mark.parametrize("from_the_engine", [False, True])
@pytest.mark.parametrize("name", ANSWERS)
def test_i20_each_error_has_its_status_and_its_words_in_both_surfaces(name: str, from_the_engine: bool) -> None:
    kind = kinds()[name]
    error = EXAMPLES[kind] if kind in EXAMPLES else kind("the words of it")
    if from_the_engine:
        error = Failure.of(error).error()
        assert type(error) is kind
    status, kind_said, code, tgi_status, tgi_kind = ANSWERS[name]
    got, headers, body = answer(error, OPENAI)
    assert (got, body["error"]["type"], body["error"]["code"]) == (status, kind_said, code)
    tgi_got, tgi_headers, tgi_body = answer(error, TGI)
    assert (tgi_got, tgi_body["error_type"]) == (tgi_status, tgi_kind)
    for each in (headers, tgi_headers):
        assert ("retry-after" in each) == (status in COMES_BACK)
        assert int(each.get("retry-after", 1)) >= 1
    for text in (body["error"]["message"], tgi_body["error"]):
        assert "/a/file" not in text


def test_what_is_not_our_error_says_nothing() -> None:
    for surface, shown in ((OPENAI, 500), (TGI, 424)):
        status, _, body = answer(KeyError("s3cret"), surface)
        assert status == shown
        assert "s3cret" not in str(body)


def test_a_full_queue_of_the_engine_is_an_error_of_its_own() -> None:
    from octavo.scheduler.policy import Policy, WaitingQueue

    queue = WaitingQueue(Policy("fcfs", 1), max_waiting=0)
    with pytest.raises(errors.QueueFullError, match="try again"):
        queue.check_room()
