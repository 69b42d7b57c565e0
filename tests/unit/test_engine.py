"""How requests come, go and are continued in the step loop, and the numbers it tells; on a tiny model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from octavo.engine.core import Engine, EngineConfig
from octavo.engine.request import Drawn
from octavo.errors import CapacityError, InvalidParameterError
from octavo.outputs import RequestOutput
from octavo.params import SamplingParams
from octavo.scheduler.sequence import State
from tests.exact.machine import Model, Trace
from tests.support.engines import EOS, PROMPTS, Inbox, answers, engine_of, finish, load_tiny, submit
from tests.support.tiny_llm import VOCAB


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_tiny(tmp_path_factory.mktemp("tiny"))


def test_cancel_frees_the_blocks_at_once_in_every_state(model: Model) -> None:
    with engine_of(model, max_num_seqs=2, chunk_size=8) as engine:
        expected = answers(engine, PROMPTS[:1])
        engine.flush_cache()
        for i, prompt in enumerate((PROMPTS[0], PROMPTS[2], PROMPTS[1])):
            submit(engine, f"r{i}", prompt, max_tokens=40, n=1)
        for _ in range(3):
            engine.step()
        by_name = {name: request.generations[0].sequence for name, request in engine._requests.items()}
        assert by_name["r0"].num_computed >= by_name["r0"].prefill_end  # decodes
        assert by_name["r1"].num_computed < by_name["r1"].prefill_end  # in its prefill
        assert by_name["r2"].state is State.WAITING
        for name in ("r2", "r1", "r0"):
            sequence = by_name[name]
            used = engine.scheduler.pool.num_used
            held = len(sequence.block_table)
            assert engine.cancel(name)
            assert engine.scheduler.pool.num_used == used - held
            assert sequence.state is State.FINISHED
            assert not engine.cancel(name)
        assert not engine.has_work()
        assert answers(engine, PROMPTS[:1]) == expected


def test_a_cancelled_request_keeps_what_it_has_said(model: Model) -> None:
    with engine_of(model) as engine:
        inbox = submit(engine, "r", PROMPTS[0], max_tokens=40, ignore_eos=True)
        for _ in range(4):
            engine.step()
        engine.cancel("r")
        output = inbox.output
        assert output.finished
        assert output.error is None
        assert output.outputs[0].finish_reason == "abort"
        assert output.outputs[0].token_ids == [d.token_ids[0] for d in inbox.deltas]
        assert output.outputs[0].text == "".join(d.text for d in inbox.deltas)


def test_a_running_request_id_is_not_taken_twice(model: Model) -> None:
    with engine_of(model) as engine:
        first = submit(engine, "same", PROMPTS[0])
        with pytest.raises(InvalidParameterError, match="request_id"):
            submit(engine, "same", PROMPTS[1])
        finish(engine)
        assert first.output.error is None
        submit(engine, "same", PROMPTS[1])
        finish(engine)


def test_what_can_never_fit_is_refused_at_once_and_changes_nothing(model: Model) -> None:
    with engine_of(model, num_blocks=8) as small:
        engine = Engine(small.executor, model.tokenizer, model.eos, EngineConfig(max_model_len=256, max_num_seqs=8))
        running = submit(engine, "running", PROMPTS[0], max_tokens=20)
        engine.step()
        before = {**engine.stats()}
        with pytest.raises(CapacityError, match="9 KV blocks"):
            submit(engine, "too-long", PROMPTS[0], max_tokens=16 * 8 + 1 - 20 + 1, n=3)
        with pytest.raises(CapacityError, match="256 tokens"):
            submit(engine, "no-room", [5] * 256)
        after = engine.stats()
        assert all(after[name] == before[name] for name in ("requests", "waiting", "running", "blocks_used"))
        finish(engine)
        assert running.output.error is None


def test_a_full_queue_refuses_all_n_outputs_or_none(model: Model) -> None:
    with engine_of(model) as engine:
        engine.scheduler.waiting.max_waiting = 3
        submit(engine, "one", PROMPTS[0])
        with pytest.raises(CapacityError, match="try again later"):
            submit(engine, "three", PROMPTS[1], n=3)
        assert engine.stats()["waiting"] == 1
        finish(engine)


@pytest.mark.parametrize("bad", [[], [VOCAB], [-1], [True], [1.0], ["a"], [None], [np.True_], [np.float32(1)], [[1]]])
def test_prompt_ids_are_checked(model: Model, bad: list[Any]) -> None:
    with engine_of(model) as engine, pytest.raises(InvalidParameterError, match="prompt"):
        engine.prepare("r", bad, SamplingParams(), Inbox())


def test_numpy_integers_are_token_ids(model: Model) -> None:
    with engine_of(model) as engine:
        expected = answers(engine)
        for kind in (np.int32, np.int64, np.uint16):
            assert answers(engine, [np.array(p, dtype=kind) for p in PROMPTS]) == expected  # type: ignore[misc]


def test_max_tokens_ends_at_the_context(model: Model) -> None:
    with engine_of(model, num_blocks=4) as engine:
        inbox = submit(engine, "r", PROMPTS[0], max_tokens=None, ignore_eos=True)
        finish(engine)
        completion = inbox.output.outputs[0]
        assert len(PROMPTS[0]) + len(completion.token_ids) == 64
        assert completion.finish_reason == "length"


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_num_seqs", 0), ("max_num_seqs", True), ("max_num_seqs", 4096), ("chunk_size", 0), ("chunk_size", 1.5),
     ("inter_token_target", 0), ("inter_token_target", "fast"), ("policy", "random")],
)  # fmt: skip
def test_engine_options_are_checked_by_name(model: Model, field: str, value: Any) -> None:
    def make(executor: Any) -> Engine:
        config = EngineConfig(**{"max_model_len": 64, field: value})  # type: ignore[arg-type]
        return Engine(executor, model.tokenizer, model.eos, config)

    with engine_of(model) as engine, pytest.raises(InvalidParameterError) as caught:
        make(engine.executor)
    assert caught.value.field == field


# Several outputs, prompt logprobs, continuation


def test_n_outputs_end_at_different_times_and_come_in_order(model: Model) -> None:
    with engine_of(model) as engine:
        params: dict[str, Any] = {"n": 6, "max_tokens": 40, "stop_token_ids": list(range(20, 35))}
        alone = answers(engine, [PROMPTS[0]], **params)[0]
        lengths = [len(tokens) for tokens in alone.tokens]
        assert len(set(lengths)) > 2
        inbox = submit(engine, "n", PROMPTS[0], **params)
        while engine.has_work():
            assert not inbox.ends
            engine.step()
            running = 6 - sum(delta.finish_reason is not None for delta in inbox.deltas)
            assert len(engine.scheduler.running) + len(engine.scheduler.waiting) == running
        finish(engine)
        assert Trace.of(inbox.output) == alone
        assert [completion.index for completion in inbox.output.outputs] == list(range(6))
        assert len(set(alone.tokens)) == 6
        for completion in inbox.output.outputs:
            deltas = [delta for delta in inbox.deltas if delta.index == completion.index]
            assert "".join(delta.text for delta in deltas) == completion.text
            assert [token for delta in deltas for token in delta.token_ids] == completion.token_ids
            assert [entry for delta in deltas for entry in delta.logprobs or ()] == completion.logprobs
            assert [delta.finish_reason for delta in deltas][-1] == completion.finish_reason
            assert all(delta.finish_reason is None for delta in deltas[:-1])


def test_output_i_of_n_is_the_same_whatever_n_is(model: Model) -> None:
    with engine_of(model) as engine:
        many = answers(engine, [PROMPTS[0]], n=4)[0]
        few = answers(engine, [PROMPTS[0]], n=2)[0]
        assert many.tokens[:2] == few.tokens
        assert many.logprobs[:2] == few.logprobs


@pytest.mark.parametrize("start", [0, 1, 15, 16, 17, 33])
@pytest.mark.parametrize("n", [1, 3])
def test_prompt_logprobs_from_a_start_are_the_tail_of_all(model: Model, start: int, n: int) -> None:
    prompt = PROMPTS[2]
    with engine_of(model) as engine:
        whole = answers(engine, [prompt], prompt_logprobs=2)[0].prompt_logprobs
        assert whole[0] is None
        assert [dict((i, rank) for i, _, rank in entry)[token] >= 1 for entry, token in zip(whole[1:], prompt[1:])]
        assert all(prompt[position] in [i for i, _, _ in whole[position]] for position in range(1, len(prompt)))
        inbox = submit(engine, "r", prompt, prompt_logprobs=2, prompt_logprobs_start=start, n=n)
        finish(engine)
        found = Trace.of(inbox.output).prompt_logprobs
        assert found == tuple(None if position < max(start, 1) else whole[position] for position in range(len(prompt)))
        # The cache serves what lies before the start, and nothing behind it.
        assert inbox.output.num_cached_tokens == min(max(start - 1, 0), len(prompt) - 1)


@pytest.mark.parametrize("flush", [False, True])
def test_prompt_logprobs_survive_a_preemption_at_every_step(model: Model, flush: bool) -> None:
    prompt = PROMPTS[2]
    with engine_of(model, chunk_size=7) as engine:
        expected = answers(engine, [prompt], prompt_logprobs=2, n=2)[0]
        engine.flush_cache()
        inbox = submit(engine, "r", prompt, prompt_logprobs=2, n=2)
        steps = 0
        while engine.has_work():
            engine.step()
            steps += 1
            for sequence in list(engine.scheduler.running):
                # A prefill in chunks would begin again for ever if each chunk were followed by a preemption.
                if sequence.num_computed >= sequence.prefill_end or steps == 3:
                    engine.scheduler.preempt(sequence, flush=flush)
        assert engine.stats()["preemptions"] > 5
        assert Trace.of(inbox.output) == expected


def _drawn(output: RequestOutput) -> list[list[Drawn]]:
    result = []
    for completion in output.outputs:
        entries = completion.logprobs or [{} for _ in completion.token_ids]
        pairs = zip(completion.token_ids, entries)
        result.append([Drawn(t, entry[t].logprob if entry else None, entry or None) for t, entry in pairs])
    return result


def test_a_request_is_continued_from_what_each_output_has(model: Model) -> None:
    """Cut at every token; outputs that have ended stay as they are, and the prompt's logprobs come all the same."""
    params: dict[str, Any] = {
        "n": 3,
        "max_tokens": 12,
        "seed": 5,
        "presence_penalty": 0.4,
        "stop_token_ids": [*range(20, 35)],
        "prompt_logprobs": 0,
    }
    with engine_of(model) as engine:
        whole = submit(engine, "whole", PROMPTS[0], **params)
        finish(engine)
        expected = Trace.of(whole.output)
        drawn = _drawn(whole.output)
        assert len({len(tokens) for tokens in drawn}) > 1
        for cut in range(max(map(len, drawn))):
            inbox = submit(engine, f"cut-{cut}", PROMPTS[0], emitted=[tokens[:cut] for tokens in drawn], **params)
            finish(engine)
            assert Trace.of(inbox.output) == expected
            for index, tokens in enumerate(drawn):
                sent = [t for delta in inbox.deltas if delta.index == index for t in delta.token_ids]
                assert sent == [each.token_id for each in tokens[cut:]]
        over = submit(engine, "over", PROMPTS[0], emitted=drawn, **params)
        assert over.output.finished
        assert Trace.of(over.output).tokens == expected.tokens
        assert not over.deltas


def test_a_continuation_that_can_not_be_is_refused(model: Model) -> None:
    with engine_of(model) as engine:
        for emitted in ([[Drawn(5)], [Drawn(5)]], [[Drawn(EOS), Drawn(5)]], [[Drawn(5)] * 7], [[Drawn(VOCAB)]]):
            with pytest.raises(InvalidParameterError, match="emitted"):
                submit(engine, "r", PROMPTS[0], emitted=emitted)
        assert not engine.has_work()
        assert engine.stats()["requests"] == 0


# Cache, policies, numbers


def test_a_salt_keeps_a_prefix_to_itself(model: Model) -> None:
    with engine_of(model) as engine:
        cached = []
        for i, salt in enumerate((None, "a", "b", "a", None)):
            inbox = submit(engine, f"r{i}", PROMPTS[2], cache_salt=salt)
            finish(engine)
            cached.append(inbox.output.num_cached_tokens)
        assert cached == [0, 0, 0, len(PROMPTS[2]) - 1, len(PROMPTS[2]) - 1]


def test_flush_drops_every_prefix_that_no_one_uses(model: Model) -> None:
    with engine_of(model) as engine:
        answers(engine)
        running = submit(engine, "running", PROMPTS[2], max_tokens=20)
        engine.step()
        used = engine.stats()["blocks_used"]
        assert engine.flush_cache() > 0
        stats = engine.stats()
        assert (stats["blocks_cached"], stats["blocks_used"]) == (0, used)
        finish(engine)
        assert running.output.error is None


def _order_of_first_tokens(engine: Engine, requests: Sequence[tuple[Sequence[int], dict[str, Any]]]) -> list[int]:
    order: list[int] = []

    def sink_of(i: int) -> Callable[[Any], None]:
        return lambda update: None if isinstance(update, RequestOutput) or i in order else order.append(i)

    for i, (prompt, params) in enumerate(requests):
        submit(engine, f"r{i}", prompt, sink=sink_of(i), max_tokens=2, **params)
    finish(engine)
    return order


def test_policies_choose_who_goes_first(model: Model) -> None:
    by_priority = [(PROMPTS[0], {"priority": 5}), (PROMPTS[1], {"priority": -1}), (PROMPTS[2], {"priority": 0})]
    with engine_of(model, policy="priority", max_num_seqs=1) as engine:
        assert _order_of_first_tokens(engine, by_priority) == [1, 2, 0]
    with engine_of(model, policy="fcfs", max_num_seqs=1) as engine:
        assert _order_of_first_tokens(engine, by_priority) == [0, 1, 2]
    with engine_of(model, policy="lpm", max_num_seqs=1) as engine:
        answers(engine, [PROMPTS[2]])
        cold = [(prompt[::-1], {}) for prompt in PROMPTS[:2]]
        assert _order_of_first_tokens(engine, [*cold, (PROMPTS[2], {})]) == [2, 0, 1]


def test_stats_name_what_an_operator_asks_for(model: Model) -> None:
    with engine_of(model) as engine:
        submit(engine, "long", PROMPTS[2], max_tokens=30, n=2)
        submit(engine, "short", PROMPTS[1])
        for _ in range(3):
            engine.step()
            stats = engine.stats()
            assert stats["blocks_free"] + stats["blocks_cached"] + stats["blocks_used"] == stats["blocks_total"] == 64
            assert 0 <= stats["waste_percent"] < 100
            assert stats["requests"] == 2
        assert stats["running"] == 3
        finish(engine)
        answers(engine)
        stats = engine.stats()
        assert stats["prefix_hit_tokens"] > 0
        assert stats["waiting"] == stats["running"] == stats["preemptions"] == 0
        assert stats["blocks_used"] == 0
        for name in ("step_seconds", "executor_seconds", "overhead_seconds"):
            assert 0 < stats[name]["p50"] <= stats[name]["p99"]
        assert stats["step_seconds"]["mean"] > stats["executor_seconds"]["mean"]
        assert stats["steps"] > 10
        for word in stats:
            assert word in (Engine.stats.__doc__ or ""), f"{word} is not explained"


def test_timings_are_in_order(model: Model) -> None:
    with engine_of(model, max_num_seqs=1) as engine:
        inboxes = [submit(engine, f"r{i}", prompt) for i, prompt in enumerate(PROMPTS)]
        finish(engine)
        for inbox in inboxes:
            t = inbox.output.timings
            assert t is not None
            assert t.first_scheduled is not None
            assert t.first_token is not None
            assert t.finished is not None
            assert t.arrival <= t.first_scheduled <= t.first_token <= t.finished
        for before, after in pairwise(inboxes):  # one at a time
            assert after.output.timings.first_scheduled >= before.output.timings.finished
