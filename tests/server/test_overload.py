"""Too much work: bounds on the queue, 429 at once with the time to wait, and deadlines."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import limits
from octavo.errors import DrainingError, InvalidParameterError, OverloadedError
from octavo.server.admission import Admission, Entry, Timeouts
from octavo.server.state import RequestCost
from tests.support.full_server import FullServer, completion_request, full_server, read_answer
from tests.support.tiny_llm import write_tiny_llm


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def admission(clock: Clock | None = None, **bounds: Any) -> Admission:
    return Admission(**{"max_queued_requests": 3, "max_queued_tokens": 100, "clock": clock or Clock(), **bounds})


def enter(queue: Admission) -> Entry:
    """One whose body is there."""
    entry = queue.enter()
    queue.arrived(entry)
    return entry


# --- the count ---


def test_i23_the_queue_is_bounded_in_requests() -> None:
    queue = admission()
    entries = [enter(queue) for _ in range(3)]
    with pytest.raises(OverloadedError):
        enter(queue)
    queue.first_token(entries[0])  # it runs now, and makes room
    entries.append(enter(queue))
    with pytest.raises(OverloadedError):
        enter(queue)
    assert queue.refused["queue_requests"] == 2


def test_i23_the_queue_is_bounded_in_tokens_but_takes_one_long_request_alone() -> None:
    queue = admission()
    long, other = enter(queue), enter(queue)
    queue.charge(long, 5000)
    with pytest.raises(OverloadedError, match="5000 prompt tokens are waiting"):
        queue.charge(other, 1)
    queue.first_token(long)
    queue.charge(other, 1)
    assert (queue.queued_tokens, queue.refused["queue_tokens"]) == (1, 1)


def test_concurrency_counts_what_runs_too() -> None:
    queue = admission(max_concurrent_requests=1)
    entry = enter(queue)
    queue.first_token(entry)
    with pytest.raises(OverloadedError):
        enter(queue)
    queue.leave(entry)
    enter(queue)


def test_i23_who_is_still_sending_holds_no_place() -> None:
    queue = admission(max_concurrent_requests=3)
    slow = [queue.enter() for _ in range(1000)]
    entries = [enter(queue) for _ in range(3)]
    with pytest.raises(OverloadedError):
        queue.arrived(slow[0])  # now it is its turn to find a place
    queue.first_token(entries[0])
    with pytest.raises(OverloadedError):  # concurrency
        queue.arrived(slow[1])
    queue.leave(entries[0])
    queue.arrived(slow[2])
    assert (queue.queued_requests, queue.arriving, queue.inside) == (3, 999, 1002)


def test_i23_what_arrives_is_bounded_in_bytes_and_short_bodies_always_may() -> None:
    queue = admission()
    short, long, longer = queue.enter(), queue.enter(), queue.enter()
    queue.receive(long, limits.MAX_ARRIVING_BYTES)
    queue.receive(short, limits.SHORT_BODY_BYTES)
    with pytest.raises(OverloadedError):
        queue.receive(short, 1)
    with pytest.raises(OverloadedError):
        queue.receive(longer, limits.SHORT_BODY_BYTES + 1)
    for entry in (short, longer):
        queue.leave(entry)
    queue.arrived(long)
    assert (queue.arriving, queue.arriving_bytes, queue.refused["arriving"]) == (0, 0, 2)


def test_a_draining_server_lets_nobody_in() -> None:
    queue = admission()
    queue.draining, queue.drain_seconds = True, 7
    with pytest.raises(DrainingError) as error:
        enter(queue)
    assert error.value.retry_after == 7


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["enter", "part", "arrive", "charge", "first", "leave"]), st.integers(0, 120)),
        max_size=80,
    )
)
def test_whatever_comes_and_goes_the_count_is_that_of_those_inside(steps: list[tuple[str, int]]) -> None:
    queue = admission()
    inside: list[Entry] = []
    waits: list[int] = []
    for step, number in steps:
        entry = inside[number % len(inside)] if inside else None
        try:
            if step == "enter":
                inside.append(queue.enter())
            elif entry is not None and step == "part" and entry.arriving:
                queue.receive(entry, number * 1000)
            elif entry is not None and step == "arrive" and entry.arriving:
                queue.arrived(entry)
            elif entry is not None and step == "charge" and entry.waiting and not entry.tokens:
                queue.charge(entry, number)
            elif entry is not None and step == "first" and not entry.arriving:
                queue.first_token(entry)
            elif entry is not None and step == "leave":
                inside.remove(entry)
                queue.leave(entry)
        except OverloadedError as error:
            waits.append(error.retry_after)
        waiting = [each for each in inside if each.waiting]
        assert queue.inside == len(inside)
        assert queue.queued_requests == len(waiting) <= 3
        assert queue.queued_tokens == sum(each.tokens for each in waiting)
        assert queue.arriving == sum(each.arriving for each in inside)
        assert queue.arriving_bytes == sum(each.bytes for each in inside if each.arriving)
    assert all(1 <= seconds <= limits.MAX_RETRY_AFTER_SECONDS for seconds in waits)


# --- Retry-After ---


def refused(queue: Admission, tokens: int | None = None) -> int:
    with pytest.raises(OverloadedError) as error:
        enter(queue) if tokens is None else queue.charge(enter(queue), tokens)
    return error.value.retry_after


def test_retry_after_follows_the_measured_speed() -> None:
    clock = Clock()
    queue = admission(clock, max_queued_requests=2, max_queued_tokens=1000)
    for _ in range(11):  # one request of 50 tokens every 4 seconds
        entry = enter(queue)
        queue.charge(entry, 50)
        clock.now += 4.0
        queue.first_token(entry)
        queue.leave(entry)
    first = enter(queue)
    queue.charge(first, 1000)
    assert refused(queue, 100) == pytest.approx(8, abs=1)  # 100 tokens at 12.5 to 13.75 a second
    assert refused(queue) == pytest.approx(4, abs=1)
    clock.now += 61.0
    assert refused(queue) == 5  # nothing is known of the last minute


def test_i32_retry_after_stays_in_its_bounds_whatever_the_clock_does() -> None:
    clock = Clock()
    queue = admission(clock, max_queued_requests=1)
    for jump in (0.0, 3600.0, -3600.0, 1e-9):
        entry = enter(queue)
        clock.now += jump
        queue.first_token(entry)
        held = enter(queue)
        assert 1 <= refused(queue) <= limits.MAX_RETRY_AFTER_SECONDS
        queue.leave(held)


# --- deadlines ---


def deadlines(timeouts: Timeouts, headers: dict[str, str], **asked: float) -> tuple[float | None, ...]:
    queue = admission(timeouts=timeouts)
    scope = {"headers": [(name.encode(), value.encode()) for name, value in headers.items()]}
    found = queue.deadlines(enter(queue), scope, RequestCost(1, 1, **asked))
    return found.queue_deadline, found.first_token_deadline, found.deadline


def test_deadlines_come_from_the_body_then_a_header_then_the_server_and_never_beyond_it() -> None:
    server = Timeouts(queue=10, first_token=20, request=30)
    assert deadlines(Timeouts(), {}) == (None, None, None)
    assert deadlines(server, {}) == (1010, 1020, 1030)
    headers = {f"x-octavo-{name}-timeout": "5" for name in ("queue", "first-token", "request")}
    assert deadlines(server, headers) == (1005, 1005, 1005)
    assert deadlines(server, headers, queue_timeout=2, request_timeout=99) == (1002, 1005, 1030)
    assert deadlines(Timeouts(), headers) == (1005, 1005, 1005)


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e9", "soon", ""])
def test_a_deadline_header_out_of_range_is_refused(value: str) -> None:
    with pytest.raises(InvalidParameterError, match="x-octavo-request-timeout"):
        deadlines(Timeouts(), {"x-octavo-request-timeout": value})


# --- on the wire ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llm(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def slow(folder: Path) -> Iterator[FullServer]:
    """One sequence at a time, a step takes 20 ms."""
    with full_server(folder, faults={"step_seconds": 0.02}, max_num_seqs=1, max_queued_requests=3) as full:
        yield full
        full.wait_until(lambda: full.server.admission.inside == 0)
        assert (full.server.admission.queued_requests, full.server.admission.queued_tokens) == (0, 0)


def test_i23_a_burst_gets_429_at_once_and_who_was_admitted_is_served(slow: FullServer) -> None:
    before = slow.metrics()
    gate = threading.Barrier(20)

    def ask(i: int) -> Any:
        gate.wait()
        return slow.complete(f"prompt {i}", max_tokens=5)

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(ask, range(20)))
    full = [answer for answer in answers if answer.status == 429]
    served = [answer for answer in answers if answer.status == 200]
    assert len(full) + len(served) == 20
    assert len(served) >= 3
    assert len(full) >= 10
    for answer in full:
        assert 1 <= int(answer.headers["retry-after"]) <= limits.MAX_RETRY_AFTER_SECONDS
        assert answer.json["error"]["code"] == "overloaded"
    assert all(answer.json["usage"]["completion_tokens"] == 5 for answer in served)
    counted = 'octavo_admission_rejections_total{reason="queue_requests"}'
    assert slow.metrics()[counted] - before[counted] == len(full)


def test_i23_a_full_queue_answers_before_the_body_is_sent_in_the_words_of_each_api(slow: FullServer) -> None:
    waiting = [slow.raw() for _ in range(4)]
    for i, connection in enumerate(waiting):
        connection.sendall(completion_request(max_tokens=100))
        slow.wait_until(lambda i=i: slow.server.admission.inside == i + 1)
        if i == 0:
            slow.wait_until(lambda: slow.server.admission.queued_requests == 0)
    heads = {"/v1/chat/completions": "code", "/generate": "error_type", "/tokenize": "code"}
    for path, key in heads.items():
        with slow.raw() as connection:
            connection.sendall(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n".encode())
            answer = read_answer(connection)
        assert answer.status == 429
        assert int(answer.headers["retry-after"]) >= 1
        told = answer.json
        assert (told if key in told else told["error"])[key] == "overloaded"
    assert slow.ask("/v1/models").status == 200  # what takes no work is not refused
    for connection in waiting:
        connection.close()
    slow.wait_until(lambda: slow.server.admission.inside == 0)


@pytest.mark.parametrize("size", [0, 1, 60])
def test_i23_uploads_that_never_end_keep_nobody_out(slow: FullServer, size: int) -> None:
    """However many: here 20, where the queue holds 3."""
    request = completion_request(max_tokens=2)
    head = request.index(b"\r\n\r\n") + 4
    uploads = [slow.raw() for _ in range(20)]
    for upload in uploads:
        upload.sendall(request[: head + size])
    slow.wait_until(lambda: slow.server.admission.inside == 20)
    assert slow.complete(max_tokens=2).status == 200
    for upload in uploads[:2]:
        upload.sendall(request[head + size :])
        assert read_answer(upload).status == 200
    for upload in uploads:
        upload.close()
    idle(slow)


def test_a_body_that_arrives_when_the_queue_is_full_is_answered_with_429(slow: FullServer) -> None:
    request = completion_request(max_tokens=2)
    with slow.raw() as upload, ExitStack() as stack:
        upload.sendall(request[:-1])
        slow.wait_until(lambda: slow.server.admission.inside == 1)
        others = [stack.enter_context(slow.raw()) for _ in range(4)]
        for other in others:
            other.sendall(completion_request(max_tokens=200))
            time.sleep(0.1)
        slow.wait_until(lambda: slow.server.admission.queued_requests == 3)
        upload.sendall(request[-1:])
        answer = read_answer(upload)
        assert (answer.status, answer.json["error"]["code"]) == (429, "overloaded")
        assert int(answer.headers["retry-after"]) >= 1
        for other in others:
            other.close()
        idle(slow)
        upload.sendall(request)  # the connection goes on
        assert read_answer(upload).status == 200


def test_a_request_past_its_deadline_ends_with_an_error_that_says_so(slow: FullServer) -> None:
    answer = slow.complete(max_tokens=200, request_timeout=0.3)
    assert (answer.status, answer.json["error"]["code"]) == (504, "deadline_exceeded")
    answer = slow.ask(
        "/v1/completions",
        {"model": "tiny", "prompt": "hi", "max_tokens": 200, "ignore_eos": True, "stream": True},
        x_octavo_request_timeout="0.3",
    )
    events = answer.body.decode().strip().split("\n\n")
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    assert "[DONE]" not in answer.body.decode()
    assert len(events) > 2
    idle(slow)


def test_the_queue_deadline_ends_who_waits_and_nobody_who_runs(slow: FullServer) -> None:
    with ThreadPoolExecutor(2) as pool:
        runs = pool.submit(slow.complete, max_tokens=60, queue_timeout=0.2)  # 60 steps of 20 ms
        slow.wait_until(lambda: slow.server.admission.inside == 1 and slow.server.admission.queued_requests == 0)
        waits = pool.submit(slow.complete, "other", max_tokens=5, queue_timeout=0.2)
        assert waits.result().status == 504
        assert "queue deadline" in waits.result().json["error"]["message"]
        assert not runs.done()
        assert runs.result().status == 200
    idle(slow)


def test_the_first_token_deadline_ends_who_has_none_and_nobody_who_streams(slow: FullServer) -> None:
    with ThreadPoolExecutor(2) as pool:
        runs = pool.submit(slow.complete, max_tokens=60, first_token_timeout=0.5)
        slow.wait_until(lambda: slow.server.admission.inside == 1 and slow.server.admission.queued_requests == 0)
        assert slow.complete("other", max_tokens=5, first_token_timeout=0.2).status == 504
        assert runs.result().status == 200
    idle(slow)


def test_i21_whoever_leaves_frees_everything_streaming_or_not_running_or_queued(slow: FullServer) -> None:
    for stream in (False, True):
        connections = [slow.raw() for _ in range(3)]
        for connection in connections:
            connection.sendall(completion_request(max_tokens=200, stream=stream))
        slow.wait_until(lambda: slow.server.admission.inside == 3)
        slow.wait_until(lambda: slow.engine.stats.blocks_used > 0)
        for connection in connections:
            connection.close()
        idle(slow)
        assert slow.records[-1].disconnected


def idle(full: FullServer) -> None:
    """Within a second: nothing inside, no block in use."""
    full.wait_until(lambda: full.server.admission.inside == 0, 2.0)
    full.wait_until(lambda: full.run(lambda: full.engine.call("stats"))["blocks_used"] == 0, 2.0)
