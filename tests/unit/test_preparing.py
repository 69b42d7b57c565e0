"""Grammars are compiled beside the step loop of an engine process: what is not ready holds up nobody."""

from __future__ import annotations

import select
import threading
import time
from typing import Any, cast

from octavo.engine.preparing import Preparing
from octavo.engine.request import Request


def collect(preparing: Preparing, count: int) -> dict[int, Any]:
    found: dict[int, Any] = {}
    end = time.monotonic() + 10
    while len(found) < count:
        assert time.monotonic() < end
        select.select([preparing.fileno()], [], [], 1)
        found.update(preparing.ready())
    return found


def test_a_slow_one_does_not_hold_up_a_quick_one() -> None:
    preparing = Preparing()
    release = threading.Event()
    slow, quick = cast(Request, object()), cast(Request, object())

    def wait() -> Request:
        release.wait(10)
        return slow

    preparing.start(1, wait)
    preparing.start(2, lambda: quick)
    assert collect(preparing, 1) == {2: quick}
    assert len(preparing) == 1
    release.set()
    assert collect(preparing, 1) == {1: slow}
    assert len(preparing) == 0
    assert select.select([preparing.fileno()], [], [], 0)[0] == []


def test_an_error_comes_like_a_request() -> None:
    preparing = Preparing()
    error = ValueError("no")

    def fail() -> Request:
        raise error

    preparing.start(7, fail)
    assert collect(preparing, 1) == {7: error}


def test_a_cancelled_one_does_not_come() -> None:
    preparing = Preparing()
    release = threading.Event()

    def wait() -> Request:
        release.wait(10)
        return cast(Request, object())

    preparing.start(1, wait)
    assert preparing.cancel(1)
    assert not preparing.cancel(1)
    release.set()
    preparing.start(2, wait)
    assert list(collect(preparing, 1)) == [2]
    assert not preparing.cancel(2)


def test_many_ready_at_once_all_come() -> None:
    preparing = Preparing()
    for number in range(500):
        preparing.start(number, lambda: cast(Request, object()))
    assert set(collect(preparing, 500)) == set(range(500))
