"""`LLM`: what it takes and gives, from many threads, and that nobody ever waits for ever."""

from __future__ import annotations

import gc
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.engine import progress
from octavo.errors import (
    CapacityError,
    ChatTemplateError,
    EngineClosedError,
    InvalidParameterError,
    OctavoError,
    RequestFailedError,
)
from octavo.outputs import RequestOutput
from tests.support.tiny_llm import VOCAB, write_tiny_llm

ROOT = Path(__file__).parents[2]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llm(tmp_path_factory.mktemp("tiny"))


def open_llm(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **{"threads": 1, "kv_memory": "2MB", **options})


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[LLM]:
    with open_llm(folder) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """The shared engine, cold; and idle again after the test."""
    shared.flush_cache()
    yield shared
    assert_idle(shared)


def assert_idle(llm: LLM) -> None:
    stats = llm.stats()
    assert (stats["requests"], stats["running"], stats["waiting"], stats["blocks_used"]) == (0, 0, 0, 0)


def slow_down(llm: LLM, seconds: float = 0.004) -> None:
    step = llm._executor.step

    def slow(batch: Any, sampling: Any) -> Any:
        time.sleep(seconds)
        return step(batch, sampling)

    llm._executor.step = slow  # type: ignore[method-assign]


def texts(outputs: list[RequestOutput]) -> list[list[str]]:
    return [[completion.text for completion in output.outputs] for output in outputs]


# What it takes


def test_prompts_in_every_form_give_the_same_answer(llm: LLM) -> None:
    ids = llm.tokenizer.encode("Hello")
    expected = texts(llm.generate("Hello", GREEDY))
    forms: list[Any] = [
        ["Hello"],
        {"prompt": "Hello"},
        [{"prompt": "Hello"}],
        {"prompt": "Hello", "prompt_token_ids": None},
        ids,
        tuple(ids),
        [ids],
        (tuple(ids),),
        {"prompt_token_ids": ids},
        np.array(ids),
        np.array([ids], dtype=np.int16),
        [np.array(ids, dtype=np.uint8)],
        [np.int64(i) for i in ids],
        iter(["Hello"]),
    ]
    for form in forms:
        assert texts(llm.generate(form, GREEDY, use_tqdm=False)) == expected, form


def test_outputs_come_in_order_with_what_was_asked(llm: LLM) -> None:
    prompts = [f"Number {i}: " + "x" * (37 * i % 50) for i in range(20)]
    outputs = llm.generate(prompts, [SamplingParams(max_tokens=1 + i % 7, seed=i, ignore_eos=True) for i in range(20)])
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1 + i % 7 for i in range(20)]
    assert [output.seed for output in outputs] == list(range(20))
    for output, prompt in zip(outputs, prompts):
        assert output.finished
        assert output.prompt_token_ids == llm.tokenizer.encode(prompt)
    assert len({output.request_id for output in outputs}) == 20


def test_a_list_reports_each_bad_prompt_in_its_place(llm: LLM) -> None:
    good = texts(llm.generate(["good", "fine"], GREEDY))
    bad: list[Any] = ["", [], [VOCAB], [-1], [True], [1.5], "x" * 300, [5] * 256, None, 7, b"raw", {}, {"prompt": 3}, [[1]], object()]
    outputs = llm.generate(["good", *bad, "fine"], GREEDY)
    assert texts([outputs[0], outputs[-1]]) == good
    for output, prompt in zip(outputs[1:-1], bad):
        assert isinstance(output.error, (InvalidParameterError, CapacityError)), prompt
        assert output.outputs == []
        assert output.finished
    assert all(output.error is None for output in (outputs[0], outputs[-1]))


@pytest.mark.parametrize("bad", ["", [VOCAB], [True], "x" * 300, b"raw", {}, None, 7, np.array([1.0]), {"prompt_token_ids": []}])
def test_a_single_bad_prompt_raises(llm: LLM, bad: Any) -> None:
    with pytest.raises(OctavoError, match="prompt"):
        llm.generate(bad, GREEDY)
    with pytest.raises(OctavoError, match="prompt"):
        llm.stream(bad, GREEDY)


def test_what_can_never_fit_is_refused_while_others_go_on(folder: Path) -> None:
    with open_llm(folder, kv_memory=4096 * 4) as llm:  # four blocks: 64 tokens
        assert llm.info()["max_model_len"] == 64
        with pytest.raises(CapacityError, match="context of 64 tokens"):
            llm.generate([5] * 64, GREEDY)
        outputs = llm.generate([[5] * 63, [5] * 64, [6] * 40], GREEDY)
        assert [len(output.outputs[0].token_ids) if output.outputs else 0 for output in outputs] == [1, 0, 8]
        assert isinstance(outputs[1].error, CapacityError)


def test_params_are_one_for_all_or_one_for_each(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []
    assert llm.generate([]) == []
    assert llm.chat([], GREEDY) == []
    assert [len(o.outputs[0].token_ids) for o in llm.generate(["a", "b"], (GREEDY, SAMPLED))] == [8, 12]
    for bad in ([GREEDY], [GREEDY] * 3, "fast", {"temperature": 1}, [GREEDY, None], 5):
        with pytest.raises(InvalidParameterError, match="sampling_params"):
            llm.generate(["a", "b"], bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameterError, match="sampling_params"):
        llm.stream("a", "fast")  # type: ignore[arg-type]


def test_parameters_a_model_can_not_honour_are_refused_by_name(llm: LLM) -> None:
    with pytest.raises(InvalidParameterError, match="stop_token_ids"):
        llm.generate("a", SamplingParams(stop_token_ids=[VOCAB]))
    assert llm.generate(["a"], SamplingParams(logit_bias={VOCAB: 1.0}))[0].error is not None


def test_two_hundred_prompts_at_once_give_what_each_gives_alone(llm: LLM) -> None:
    prompts = [f"{i} " * (1 + i % 9) for i in range(200)]
    params = [SamplingParams(max_tokens=1 + i % 6, temperature=1.0, seed=i, ignore_eos=True) for i in range(200)]
    together = llm.generate(prompts, params)
    assert all(output.error is None for output in together)
    for i in range(0, 200, 17):
        llm.flush_cache()
        assert texts(llm.generate(prompts[i], params[i])) == texts([together[i]])


def test_the_seed_of_an_answer_makes_it_again(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, n=2, ignore_eos=True)
    first, other = llm.generate(["same", "same"], params)
    assert first.seed != other.seed
    assert texts([first]) != texts([other])
    again = llm.generate("same", SamplingParams(max_tokens=20, temperature=1.0, n=2, ignore_eos=True, seed=first.seed))
    assert texts(again) == texts([first])


def test_a_repeated_prompt_comes_from_the_cache_with_equal_bits(llm: LLM) -> None:
    prompt = "a prompt of more than one block of tokens"
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=1, logprobs=2)
    first, second = llm.generate(prompt, params)[0], llm.generate(prompt, params)[0]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, len(prompt) - 1)
    assert first.outputs == second.outputs
    assert llm.flush_cache() > 0
    assert llm.generate(prompt, params)[0].num_cached_tokens == 0


# Chat and defaults


def test_chat_writes_the_conversation_with_the_models_template(llm: LLM) -> None:
    text = "user: hi\nassistant: "
    expected = texts(llm.generate(text, GREEDY))
    (answer,) = llm.chat(MESSAGES, GREEDY)
    assert answer.prompt == text
    assert texts([answer]) == expected
    assert texts(llm.chat([MESSAGES, MESSAGES], GREEDY)) == expected * 2
    assert "".join(delta.text for delta in llm.stream(MESSAGES, GREEDY)) == expected[0][0]
    assert llm.chat(MESSAGES, GREEDY, add_generation_prompt=False)[0].prompt == "user: hi\n"


def test_a_bad_conversation_is_reported_in_its_place_or_raised(llm: LLM, tmp_path: Path) -> None:
    outputs = llm.chat([MESSAGES, [{"role": "user"}], "hi", MESSAGES], GREEDY)  # type: ignore[list-item]
    assert [output.error is None for output in outputs] == [True, False, False, True]
    for bad in ("hi", [{"content": 3}], 5, {"role": "user", "content": "hi"}):
        with pytest.raises(InvalidParameterError):
            llm.chat(bad, GREEDY)  # type: ignore[arg-type]
    with open_llm(write_tiny_llm(tmp_path, template=None)) as plain:
        with pytest.raises(ChatTemplateError):
            plain.chat(MESSAGES, GREEDY)
        with pytest.raises(ChatTemplateError):
            plain.stream(MESSAGES, GREEDY)
        assert texts(plain.generate("a", GREEDY)) == texts(llm.generate("a", GREEDY))


def test_the_models_recommended_values_are_the_default(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_tiny_llm(tmp_path, generation={"do_sample": True, "temperature": 50.0, "top_k": 7, "top_p": 0.9})
    with open_llm(folder) as llm:
        defaults = llm.get_default_sampling_params()
        assert (defaults.temperature, defaults.top_k, defaults.top_p) == (1.0, 7, 0.9)
        assert "temperature" in caplog.text
        assert llm.generate("a", use_tqdm=False)[0].error is None


# Streams


def test_deltas_are_the_output_piece_by_piece(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=5, n=2, ignore_eos=True, logprobs=1)
    (whole,) = llm.generate("stream me", params)
    deltas = list(llm.stream("stream me", params))
    for completion in whole.outputs:
        mine = [delta for delta in deltas if delta.index == completion.index]
        assert "".join(delta.text for delta in mine) == completion.text
        assert [token for delta in mine for token in delta.token_ids] == completion.token_ids
        assert [entry for delta in mine for entry in delta.logprobs or ()] == completion.logprobs
        assert (mine[-1].finish_reason, mine[-1].stop_reason) == (completion.finish_reason, completion.stop_reason)


def test_a_stream_closed_early_or_forgotten_ends_its_request(llm: LLM) -> None:
    stream = llm.stream("a", ENDLESS)
    next(stream)
    stream.close()
    assert_idle(llm)
    with closing(llm.stream("b", ENDLESS)) as deltas:
        for _, _delta in zip(range(3), deltas):
            pass
    assert_idle(llm)
    stream = llm.stream("c", ENDLESS)
    next(stream)
    del stream
    assert_idle(llm)
    stream = llm.stream("never begun", ENDLESS)
    assert llm.stats()["requests"] == 0
    del stream


def test_a_stream_may_be_collected_on_the_engines_own_thread(llm: LLM) -> None:
    slow_down(llm, 0.0)
    gc.disable()
    try:
        stream = llm.stream("a", ENDLESS)
        next(stream)
        cycle: list[Any] = [stream]
        cycle.append(cycle)
        del stream, cycle
        llm._loop.call(lambda engine: gc.collect() and None)
    finally:
        gc.enable()
    assert_idle(llm)


def test_a_failed_request_raises_from_its_stream_and_from_generate(folder: Path) -> None:
    with open_llm(folder) as llm:
        expected = texts(llm.generate("a", GREEDY))

        def fail(batch: Any, sampling: Any) -> Any:
            raise MemoryError("injected")

        step, llm._executor.step = llm._executor.step, fail  # type: ignore[method-assign]
        with pytest.raises(RequestFailedError):
            llm.generate("a", GREEDY)
        with pytest.raises(RequestFailedError):
            list(llm.stream("a", GREEDY))
        assert all(isinstance(output.error, RequestFailedError) for output in llm.generate(["a", "b"], GREEDY))
        llm._executor.step = step  # type: ignore[method-assign]
        assert texts(llm.generate("a", GREEDY)) == expected
        assert_idle(llm)


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


def test_ctrl_c_while_waiting_ends_the_requests_at_once(folder: Path) -> None:
    with open_llm(folder) as llm:
        expected = texts(llm.generate("a", GREEDY))
        slow_down(llm)
        for delay in (0.001, 0.02, 0.1):
            timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                llm.generate(["a", "b", "c"], ENDLESS)
                time.sleep(5)
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
    with pytest.raises(OctavoError):
        llm.generate("", GREEDY)
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
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment())
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


# Options, numbers and the bar


def test_options_are_checked_by_name(folder: Path) -> None:
    for field, value in [
        ("kv_dtype", "f8"), ("weights", "q2"), ("kernels", "cuda"), ("threads", 0), ("policy", "random"), ("max_num_seqs", 0),
        ("kv_memory", "lots"), ("max_model_len", 1), ("max_model_len", 10_000), ("inter_token_target", -1), ("chunk_size", 0),
    ]:  # fmt: skip
        with pytest.raises(InvalidParameterError) as caught:
            open_llm(folder, **{field: value})
        assert caught.value.field == field


def test_max_model_len_bounds_prompt_and_output(folder: Path) -> None:
    with open_llm(folder, max_model_len=20) as llm:
        (output,) = llm.generate([5] * 15, ENDLESS)
        assert len(output.outputs[0].token_ids) == 5
        with pytest.raises(CapacityError, match="20 tokens"):
            llm.generate([5] * 20, GREEDY)


def test_policy_reaches_the_scheduler(folder: Path) -> None:
    with open_llm(folder, policy="priority", max_num_seqs=1) as llm:
        slow_down(llm, 0.001)
        params = [SamplingParams(max_tokens=2, priority=p) for p in (3, 2, 1)]
        outputs = llm.generate(["a", "b", "c"], params)
        ends = [output.timings.finished for output in outputs if output.timings is not None]
        assert sorted(ends, reverse=True) == ends


def test_info_says_what_runs(llm: LLM, folder: Path) -> None:
    info = llm.info()
    assert info["path"] == str(folder)
    assert (info["vocab_size"], info["layers"], info["threads"], info["kv_dtype"]) == (VOCAB, 2, 1, "f16")
    assert info["num_blocks"] == 2_000_000 // info["block_bytes"]
    assert info["weight_bytes"] > 0
    assert info["kernels"] in ("avx2", "scalar")


def test_the_bar_counts_prompts_and_tokens_on_a_terminal_only(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    llm.generate(["a", "", "b"], GREEDY, use_tqdm=True)
    assert capfd.readouterr() == ("", "")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for wanted in (True, False):
        terminal = Terminal()
        monkeypatch.setattr(progress.sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        llm.generate(["a", "", "b"], ENDLESS, use_tqdm=wanted)
        assert bool(terminal.getvalue()) == wanted
        if wanted:
            assert re.search(r"3/3", terminal.getvalue())
            assert re.search(r"\d+ tokens/s", terminal.getvalue())


# The real model


@pytest.mark.model
def test_smollm2_is_ready_in_two_seconds_and_keeps_its_memory_small() -> None:
    """CPU time, as the machine may be busy; both processors count. Resident memory: what pages are really there."""
    program = """
import os, time
from octavo import LLM, SamplingParams
llm = LLM("smollm2")
ready = time.process_time()
prompt = list(range(100, 612))
llm.generate([prompt, "The capital of France is"], SamplingParams(max_tokens=8, temperature=0.0), use_tqdm=False)
stats, info = llm.stats(), llm.info()
resident = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
touched = (stats["blocks_used"] + stats["blocks_cached"]) * info["block_bytes"]
print(ready, resident, info["weight_bytes"], touched)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment(), check=True)
    ready, resident, weights, touched = map(float, done.stdout.split())
    assert ready < 2.0
    assert resident < 1.1 * weights + 200e6 + touched, f"{resident / 1e6:.0f} MB"


@pytest.mark.model
def test_smollm2_answers_and_the_engine_itself_takes_little_of_a_step() -> None:
    with LLM("smollm2", kv_memory="256MB") as llm:
        (answer,) = llm.chat([{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0, max_tokens=20))
        assert "Paris" in answer.outputs[0].text
        assert answer.outputs[0].finish_reason == "stop"
        llm.generate([f"{i}" for i in range(32)], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
        stats = llm.stats()
        assert stats["overhead_seconds"]["p50"] < 0.1 * stats["executor_seconds"]["p50"]
