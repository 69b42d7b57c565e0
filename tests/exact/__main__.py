"""`python -m tests.exact`: the full suite on the real model (`make exact`). With --print, the traces of one run."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from . import scenarios
from .cases import constrained_cases, model_cases, sharing_cases, text_ids
from .faults import FAULTS, suite_fails_on
from .machine import Model
from .models import smollm2

TOKENS = 12  # drawn by each case of the full suite
SHORT_TOKENS = 6  # and of its repetition with int8 KV

Steps = list[tuple[str, Callable[[], None]]]


def full() -> None:
    begin = time.monotonic()
    run_steps(steps_on(smollm2(), TOKENS, short_form=False))
    run_steps(steps_on(smollm2("int8"), SHORT_TOKENS, short_form=True))
    run_steps(steps_under_grammars(smollm2()))
    run_steps([(f"fault: {name}", lambda name=name: suite_fails_on(name)) for name in FAULTS])
    print(f"all equal, to the bit ({time.monotonic() - begin:.0f} s)")


def steps_on(model: Model, tokens: int, *, short_form: bool) -> Steps:
    """Every scenario, each case drawing so many tokens."""
    cases = model_cases(model.tokenizer, tokens, short_form=short_form)
    print(f"{len(cases)} cases on {model.name}: {sum(len(c.prompt) for c in cases)} prompt tokens", flush=True)
    printing = ["--print", "--kv-dtype", model.kv_dtype, "--tokens", str(tokens), *(["--short"] if short_form else [])]
    short = [case for case in cases if len(case.prompt) < 1000]
    prefix = 300 if short_form else 2000
    shared = sharing_cases(text_ids(model.tokenizer), prefix, 32, tokens)
    expected: dict[str, Any] = {}

    def reference() -> None:
        expected.update(scenarios.reference(model, cases))

    return [
        ("alone", reference),
        ("random batches", lambda: scenarios.in_random_batches(model, cases, expected, seeds=range(4))),
        *[(f"chunks of {n}", lambda n=n: scenarios.with_chunks(model, cases, expected, n)) for n in (1, 7, 16, 17, 64)],
        ("prefix hits", lambda: scenarios.with_prefix_hits(model, cases, expected, (0, 1, 15, 16, 17, None))),
        ("preempted, blocks kept", lambda: scenarios.preempted_at_every_step(model, cases, expected, flush=False)),
        ("preempted, blocks flushed", lambda: scenarios.preempted_at_every_step(model, cases, expected, flush=True)),
        ("tiny pool", lambda: scenarios.squeezed_by_a_tiny_pool(model, cases, 40)),
        *[(f"{n} threads", lambda n=n: scenarios.with_options(model, cases, expected, threads=n)) for n in (1, 2, 4)],
        ("no fusion", lambda: scenarios.with_options(model, cases, expected, fusion=False)),
        ("a shared prefix", lambda: scenarios.sharing_a_prefix(model, shared, prefix)),
        ("cancelled neighbours", lambda: scenarios.cancelled_neighbours(model, short, expected)),
        ("blocks full of NaN", lambda: scenarios.on_blocks_full_of_nan(model, cases, expected)),
        ("cut at every token", lambda: scenarios.cut_at_every_token(model, cases, expected)),
        ("a new process", lambda: scenarios.in_a_new_process(printing, expected)),
        *[(f"{name} kernels", lambda name=name: scenarios.with_options(model, cases, expected, kernels=name))
          for name in reversed(scenarios.other_kernels())],
    ]  # fmt: skip


def steps_under_grammars(model: Model) -> Steps:
    """The scenarios in which a grammar's state and its forced tokens could go wrong."""
    cases = constrained_cases([case.prompt for case in model_cases(model.tokenizer, TOKENS, short_form=False)[2:14:3]])
    expected: dict[str, Any] = {}
    return [
        ("under grammars, alone", lambda: expected.update(scenarios.reference(model, cases))),
        ("jump-forward off", lambda: scenarios.with_jump_forward_off(model, cases, expected)),
        ("random batches", lambda: scenarios.in_random_batches(model, cases, expected, seeds=range(4))),
        *[(f"chunks of {n}", lambda n=n: scenarios.with_chunks(model, cases, expected, n)) for n in (1, 7, 16)],
        ("prefix hits", lambda: scenarios.with_prefix_hits(model, cases, expected, (0, 15, 16, 17, None))),
        ("preempted, blocks kept", lambda: scenarios.preempted_at_every_step(model, cases, expected, flush=False)),
        ("preempted, blocks flushed", lambda: scenarios.preempted_at_every_step(model, cases, expected, flush=True)),
        ("cut at every token", lambda: scenarios.cut_at_every_token(model, cases, expected)),
        ("cancelled neighbours", lambda: scenarios.cancelled_neighbours(model, cases, expected)),
    ]  # fmt: skip


def run_steps(steps: Steps) -> None:
    for name, step in steps:
        start = time.monotonic()
        step()
        verdict = "found" if name.startswith("fault") else "equal"
        print(f"  {name}: {verdict} ({time.monotonic() - start:.0f} s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.exact", description=__doc__)
    parser.add_argument("--print", action="store_true", help="run each case alone and print its trace as JSON")
    parser.add_argument("--short", action="store_true", help="with --print: the short form's cases")
    parser.add_argument("--kv-dtype", default="f16", help="with --print: f16 or int8")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="with --print: tokens to draw")
    options = parser.parse_args()
    if not options.print:
        full()
        return
    model = smollm2(options.kv_dtype)
    cases = model_cases(model.tokenizer, options.tokens, short_form=options.short)
    traces = scenarios.reference(model, cases)
    json.dump({name: repr(trace) for name, trace in traces.items()}, sys.stdout)


if __name__ == "__main__":
    main()
