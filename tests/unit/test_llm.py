"""`LLM`: what it takes and what it gives."""

from __future__ import annotations

import gc
import io
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import LLM, SamplingParams, _native
from octavo.engine import progress
from octavo.errors import (
    CapacityError,
    ChatTemplateError,
    InvalidParameterError,
    OctavoError,
    RequestFailedError,
)
from tests.support.llms import ENDLESS, GREEDY, MESSAGES, SAMPLED, assert_idle, environment, open_llm, slow_down, texts
from tests.support.tiny_llm import VOCAB, write_tiny_llm

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
    bad: list[Any] = [
        "",
        [],
        [VOCAB],
        [-1],
        [True],
        [1.5],
        "x" * 300,
        [5] * 256,
        None,
        7,
        b"raw",
        {},
        {"prompt": 3},
        [[1]],
        object(),
    ]
    outputs = llm.generate(["good", *bad, "fine"], GREEDY)
    assert texts([outputs[0], outputs[-1]]) == good
    for output, prompt in zip(outputs[1:-1], bad):
        assert isinstance(output.error, (InvalidParameterError, CapacityError)), prompt
        assert output.outputs == []
        assert output.finished
    assert all(output.error is None for output in (outputs[0], outputs[-1]))


@pytest.mark.parametrize(
    "bad", ["", [VOCAB], [True], "x" * 300, b"raw", {}, None, 7, np.array([1.0]), {"prompt_token_ids": []}]
)
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


def test_without_prefix_caching_nothing_is_found_and_the_answer_is_the_same(llm: LLM, folder: Path) -> None:
    prompt = "The same prompt as before, " * 4
    expected = texts(llm.generate([prompt] * 3, GREEDY))
    with open_llm(folder, enable_prefix_caching=False) as other:
        outputs = [*other.generate([prompt] * 2, GREEDY), *other.generate(prompt, GREEDY)]
        assert texts(outputs) == expected
        assert [output.num_cached_tokens for output in outputs] == [0, 0, 0]
        assert other.stats()["prefix_hit_tokens"] == 0


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


@pytest.mark.model
def test_a_known_model_is_sampled_as_its_authors_recommend() -> None:
    with LLM("SmolLM2-135M", kv_memory="64MiB") as llm:
        defaults = llm.get_default_sampling_params()
        assert (defaults.temperature, defaults.top_p) == (0.2, 0.9)


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


# Options, numbers and the bar


def test_options_are_checked_by_name(folder: Path) -> None:
    bad: dict[str, list[Any]] = {
        "kv_dtype": ["f8"],
        "weights": ["q2"],
        "kernels": ["cuda"],
        "threads": [0],
        "policy": ["random"],
        "max_num_seqs": [0],
        "kv_memory": ["lots"],
        "max_model_len": [1, 10_000],
        "inter_token_target": [-1],
        "chunk_size": [0],
    }
    for field, value in ((field, value) for field, values in bad.items() for value in values):
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
    assert info["kernels"] == _native.kernel_names()[-1]


def test_int8_kv_takes_less_memory_and_rounds_more(llm: LLM, folder: Path) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=1)
    with open_llm(folder, kv_dtype="int8") as small:
        assert small.info()["kv_dtype"] == "int8"
        assert small.info()["num_blocks"] > 1.5 * llm.info()["num_blocks"]
        rounded = [entry.logprob for token in logprobs_of(small, params) for entry in token.values()]
    exact = [entry.logprob for token in logprobs_of(llm, params) for entry in token.values()]
    assert rounded != exact
    assert rounded == pytest.approx(exact, abs=0.1)


def logprobs_of(llm: LLM, params: SamplingParams) -> list[Any]:
    (output,) = llm.generate("the same request", params)
    logprobs = output.outputs[0].logprobs
    assert logprobs
    return logprobs


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
from octavo import LLM, SamplingParams, _native
llm = LLM("smollm2")
ready = time.process_time()
prompt = list(range(100, 612))
llm.generate([prompt, "The capital of France is"], SamplingParams(max_tokens=8, temperature=0.0), use_tqdm=False)
stats, info = llm.stats(), llm.info()
resident = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
touched = (stats["blocks_used"] + stats["blocks_cached"]) * info["block_bytes"]
mapping = open("/proc/self/smaps").read().split(info["path"])[1]
file_kib = int(mapping.split("Rss:")[1].split()[0])
print(ready, resident, info["weight_bytes"], touched, file_kib)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment(), check=True)
    ready, resident, weights, touched, file_kib = map(float, done.stdout.split())
    assert ready < 2.0
    assert resident < 1.1 * weights + 200e6 + touched, f"{resident / 1e6:.0f} MB"
    assert file_kib < 1024  # all is packed: the file's pages are given back


@pytest.mark.model
def test_smollm2_answers_and_the_engine_itself_takes_little_of_a_step() -> None:
    with LLM("smollm2", kv_memory="256MB") as llm:
        question = {"role": "user", "content": "What is the capital of France?"}
        brief = {"role": "system", "content": "Answer in one short sentence."}
        (answer,) = llm.chat([brief, question], SamplingParams(temperature=0.0, max_tokens=20))
        assert "Paris" in answer.outputs[0].text
        assert answer.outputs[0].finish_reason == "stop"
        llm.generate([f"{i}" for i in range(32)], SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
        stats = llm.stats()
        assert stats["overhead_seconds"]["p50"] < 0.1 * stats["executor_seconds"]["p50"]
