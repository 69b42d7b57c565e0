"""`LLM` among threads, signals, forks and ends: nobody ever waits for ever, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import (
    EngineClosedError,
)
from tests.support.llms import ENDLESS, GREEDY, MESSAGES, SAMPLED, assert_idle, environment, open_llm, slow_down, texts

# Threads


def test_many_threads_get_what_one_gets(llm: LLM) -> None:
    prompts = [f"thread {i} " + "y" * i for i in range(6)]
    expected = texts(llm.generate(prompts, SAMPLED))
    expected_chat = texts(llm.chat(MESSAGES, SAMPLED))

    def work(i: int) -> None:
        for _ in range(3):
            assert texts(llm.generate(prompts[i], SAMPLED)) == [expected[i]]
            assert "".join(delta.text for delta in llm.stream(prompts[i], SAMPLED)) == expected[i][0]
            assert texts(llm.chat(MESSAGES, SAMPLED)) == expected_chat
            with closing(llm.stream(prompts[i], ENDLESS)) as deltas:
                next(deltas)
            llm.stats()
            llm.flush_cache()
            assert texts(llm.generate(prompts, SAMPLED)) == expected

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))


def waiting_calls(llm: LLM) -> list[Callable[[], Any]]:
    return [
        lambda: llm.generate("a", ENDLESS),
        lambda: list(llm.stream("b", ENDLESS)),
        lambda: llm.chat(MESSAGES, ENDLESS),
        lambda: [output.error for output in llm.generate(["c", "d"], ENDLESS)],
    ]


def outcomes_while(llm: LLM, meanwhile: Callable[[], None]) -> list[Any]:
    """What calls that would take long return or raise when something happens to the engine meanwhile."""
    results: list[Any] = []

    def run(call: Callable[[], Any]) -> None:
        try:
            results.append(call())
        except BaseException as error:
            results.append(error)

    slow_down(llm)
    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in waiting_calls(llm)]
    for thread in threads:
        thread.start()
    while llm.stats()["requests"] < 5:
        time.sleep(0.002)
    meanwhile()
    for thread in threads:
        thread.join(10)
    assert len(results) == len(threads), "a call still waits"
    return results


def assert_closed(llm: LLM, message: str) -> None:
    later: list[Callable[[], Any]] = [*waiting_calls(llm), llm.stats, llm.flush_cache, lambda: llm.generate([])]
    for call in later:
        with pytest.raises(EngineClosedError, match=message):
            call()


def test_close_ends_everyone_who_waits(folder: Path) -> None:
    llm = open_llm(folder)
    results = outcomes_while(llm, llm.close)
    errors = [error for result in results for error in (result if isinstance(result, list) else [result])]
    assert len(errors) == 5
    assert all(isinstance(error, EngineClosedError) for error in errors), errors
    assert_closed(llm, "the engine is closed")
    llm.close()
    assert not llm._loop._thread.is_alive()


def test_many_threads_may_close_and_call_at_the_same_time(folder: Path) -> None:
    for _ in range(10):
        llm = open_llm(folder)
        slow_down(llm, 0.001)

        def use(i: int, llm: LLM = llm) -> None:
            try:
                while True:
                    llm.generate(f"{i}", GREEDY)
                    llm.stats()
            except EngineClosedError:
                pass

        with ThreadPoolExecutor(6) as pool:
            users = [pool.submit(use, i) for i in range(4)]
            time.sleep(0.01)
            closers = [pool.submit(llm.close) for _ in range(2)]
            for future in users + closers:
                future.result(timeout=10)


def test_an_engine_that_dies_takes_nobody_with_it(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    llm = open_llm(folder)

    def die() -> None:
        llm._engine.scheduler.commit = None  # type: ignore[method-assign, assignment]

    results = outcomes_while(llm, die)
    errors = [error for result in results for error in (result if isinstance(result, list) else [result])]
    assert all(isinstance(error, EngineClosedError) and "internal error" in str(error) for error in errors), errors
    assert "the engine stopped" in caplog.text
    assert_closed(llm, "internal error")
    with pytest.raises(EngineClosedError):
        llm._executor.export_block(0)  # its memory is free
    llm.close()


def test_the_engines_thread_never_waits_for_itself(llm: LLM) -> None:
    with pytest.raises(RuntimeError, match="wait for itself"):
        llm._loop.call(lambda engine: llm.stats())
    assert texts(llm.generate("a", GREEDY))


def test_a_call_that_the_thread_no_longer_sees_is_refused(folder: Path) -> None:
    """A caller passed the check, then the engine ended, then the call was queued."""
    llm = open_llm(folder)
    llm.close()
    reply: Future[None] = Future()
    llm._loop._put((lambda engine: None, reply))
    assert isinstance(reply.exception(timeout=5), EngineClosedError)


def test_a_context_manager_closes(folder: Path) -> None:
    with open_llm(folder) as llm:
        assert llm.generate("a", GREEDY)
    assert_closed(llm, "closed")
    llm.info()


# Ctrl-C


def _interrupt_at_line(number: int) -> Callable[[FrameType, str, Any], Any]:
    """A trace function that raises KeyboardInterrupt before the number-th line run in the engine's client code."""
    files = ("/engine/llm.py", "/engine/loop.py", "/engine/progress.py", "/concurrent/futures/_base.py")
    seen = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if not frame.f_code.co_filename.endswith(files):
            return None
        if event == "line":
            seen += 1
            if seen == number:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    return trace


@pytest.mark.parametrize("kind", ["generate", "stream"])
def test_ctrl_c_at_any_line_frees_everything_and_is_raised(llm: LLM, kind: str) -> None:
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)

    def use() -> list[str]:
        if kind == "stream":
            return ["".join(delta.text for delta in llm.stream("one", params))]
        return [text for (text,) in texts(llm.generate(["one", "two"], params))]

    expected = use()
    interrupted = 0
    for number in range(1, 2000):
        sys.settrace(_interrupt_at_line(number))
        try:
            result = use()
        except KeyboardInterrupt:
            interrupted += 1
        else:
            assert result == expected
            break
        finally:
            sys.settrace(None)
        assert_idle(llm)
        if number % 10 == 0:
            assert use() == expected
    else:
        raise AssertionError("the call never ran to its end")
    assert interrupted == number - 1 > 40


def _start_and_generate(timer: threading.Timer, llm: LLM) -> None:
    timer.start()
    llm.generate(["a", "b", "c"], ENDLESS)


def test_ctrl_c_while_waiting_ends_the_requests_at_once(folder: Path) -> None:
    with open_llm(folder) as llm:
        expected = texts(llm.generate("a", GREEDY))
        slow_down(llm)
        for delay in (0.02, 0.1, 0.2):
            timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                _start_and_generate(timer, llm)
            timer.join()
            assert_idle(llm)
        assert texts(llm.generate("a", GREEDY)) == expected


# Ends of processes and objects


def test_use_after_fork_raises_and_the_child_ends(folder: Path) -> None:
    llm = open_llm(folder)
    stream = llm.stream("a", ENDLESS)
    next(stream)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(20)
            calls: list[Callable[[], Any]] = [
                *waiting_calls(llm), llm.stats, llm.flush_cache, lambda: next(stream), lambda: llm.generate([]),
            ]  # fmt: skip
            for call in calls:
                try:
                    call()
                except EngineClosedError as error:
                    os.write(write, b"." if "fork" in str(error) else b"?")
            stream.close()
            llm.close()
            del llm, stream, calls, call
            gc.collect()
            os.write(write, b"end")
        finally:
            os._exit(0)
    os.close(write)
    _, status = os.waitpid(child, 0)
    assert status == 0, "the child hung or crashed"
    assert os.read(read, 100) == b"." * 8 + b"end"
    os.close(read)
    next(stream)  # the parent's engine is as it was
    stream.close()
    assert_idle(llm)
    llm.close()


def test_an_llm_nobody_holds_ends_its_thread(folder: Path) -> None:
    llm = open_llm(folder)
    llm.generate(["a", "", "b"], GREEDY)
    list(llm.stream("a", GREEDY))
    llm._loop.call(lambda engine, llm=llm: None)
    thread, gone, executor = llm._loop._thread, weakref.ref(llm), llm._executor
    gc.disable()
    try:
        del llm
        assert gone() is None  # by reference count alone: no cycle, and the engine's thread holds nothing
    finally:
        gc.enable()
    thread.join(10)
    assert not thread.is_alive()
    with pytest.raises(EngineClosedError):
        executor.export_block(0)


ENDINGS = {
    "never closed": "",
    "amid a stream": "s = llm.stream('a', endless); next(s)",
    "amid calls of daemon threads": """
import threading, time
for i in range(3):
    threading.Thread(target=lambda: llm.generate('a', endless), daemon=True).start()
while llm.stats()['requests'] < 3: time.sleep(0.001)
""",
    "by an exception": "llm.stream('a', endless).__next__(); sys.excepthook = lambda *a: None; raise SystemExit(0)",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_program_ends_without_a_word(folder: Path, ending: str) -> None:
    program = f"""
import sys
from octavo import LLM, SamplingParams
endless = SamplingParams(max_tokens=None, ignore_eos=True)
llm = LLM({str(folder)!r}, kv_memory='2MB')
llm.generate('a', SamplingParams(max_tokens=2))
{ENDINGS[ending]}
"""
    if ending == "amid calls of daemon threads":
        program = program.replace("llm.generate('a', endless)", "quiet()") + ""
        program = program.replace(
            "import threading, time",
            "import threading, time\ndef quiet():\n  try: llm.generate('a', endless)\n  except Exception: pass",
        )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment()
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
