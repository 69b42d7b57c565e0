"""Programs of the kinds in SGLang's paper on smollm2: `python -m benchmarks.programs`; writes benchmarks/PROGRAMS.md.

Each workload is a batch of programs in the language of `octavo.lang`, run in turn on engines that differ in one thing
(prefix cache, policy, jump-forward), round after round, each time from an empty cache; and, those that an
OpenAI-compatible endpoint can run, on llama-server with the same file (its own prompt cache on). Texts are made of
random words, the same for all; outputs are greedy and have the same number of tokens wherever their form allows it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.compare import machine
from benchmarks.compare.figures import figure, table
from benchmarks.serving import llama_server
from octavo import LLM, ProgramState, assistant, function, gen, select, user
from octavo.lang.backends.openai import OpenAIEndpoint

HERE = Path(__file__).parent
MODEL = "smollm2"
LEAST_OF_CACHE = 3.0  # few-shot and multi-turn, against no cache
SLOTS, SLOT_TOKENS = 16, 2048  # of llama-server
LLAMA = "llama-server"
VARIANTS: dict[str, dict[str, Any]] = {
    "Octavo, defaults": {},
    "no prefix cache": {"enable_prefix_caching": False},
    "policy lpm": {"policy": "lpm"},
    "no jump-forward": {"jump_forward": False},
}
DEFAULTS = next(iter(VARIANTS))
WORDS = [
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system",
    "program", "question", "work", "government", "number", "night", "point", "home", "water", "room", "mother",
    "area", "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business",
    "issue", "side", "kind", "head", "house", "service", "friend", "father", "power", "hour", "game", "line", "end",
    "member", "law", "car", "city", "community", "name", "president", "team", "minute", "idea", "body",
]  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "category": {"enum": ["person", "place", "organisation"]},
        "number_of_mentions": {"type": "integer", "minimum": 0, "maximum": 99},
        "is_recent": {"type": "boolean"},
    },
    "required": ["name", "category", "number_of_mentions", "is_recent"],
    "additionalProperties": False,
}


def text(source: random.Random, words: int) -> str:
    return " ".join(source.choice(WORDS) for _ in range(words))


@function
def few_shot(s: ProgramState, examples: str, question: str) -> None:
    s += examples + f"\nQuestion: {question}\nAnswer:"
    s += select("answer", [" A", " B", " C", " D"])


@function
def extract(s: ProgramState, document: str) -> None:
    s += user(f"Tell what this is about, as JSON.\n{document}")
    s += assistant(gen("json", max_tokens=96, temperature=0, json_schema=SCHEMA))


@function
def chain_of_thought(s: ProgramState, problem: str) -> None:
    s += user(f"Think step by step.\n{problem}")
    forks = s.fork(4)
    for fork in forks:
        fork += assistant(gen("thought", max_tokens=48, temperature=0.8))
    s += assistant(max((fork["thought"] for fork in forks), key=len))
    s += user("So what is the answer?")
    s += assistant(gen("answer", max_tokens=16, temperature=0))


@function
def multi_turn(s: ProgramState, background: str, questions: list[str]) -> None:
    s += user(background)
    s += assistant("I have read it. What do you want to know?")
    for i, question in enumerate(questions):
        s += user(question)
        s += assistant(gen(f"answer {i}", max_tokens=4, temperature=0))


@function
def tree_of_thought(s: ProgramState, problem: str) -> None:
    s += user(problem)
    for depth in range(2):
        forks = s.fork(3)
        for fork in forks:
            fork += assistant(gen("step", max_tokens=32, temperature=0.8))
            fork += user("Is this step good?")
            fork += assistant(select("verdict", ["good", "bad"]))
        best = max(forks, key=lambda fork: fork.get_meta_info("verdict")["normalized_prompt_logprobs"][0])
        s += assistant(best["step"])
        s += user("Go on." if depth == 0 else "Now the answer.")
    s += assistant(gen("answer", max_tokens=16, temperature=0))


@dataclass(frozen=True)
class Workload:
    program: Any
    batch: list[dict[str, Any]]
    about: str
    on_endpoints: bool  # select needs more than OpenAI's API has


def workloads() -> dict[str, Workload]:
    source = random.Random(7)
    examples = "\n".join(f"Question: {text(source, 60)}\nAnswer: {'ABCD'[i % 4]}" for i in range(8))
    shots = [{"examples": examples, "question": text(source, 24)} for _ in range(24)]
    documents = [{"document": text(source, 150)} for _ in range(24)]
    problems = [{"problem": text(source, 150)} for _ in range(8)]
    chats = [{"background": text(source, 600), "questions": [text(source, 12) for _ in range(5)]} for _ in range(8)]
    return {
        "few-shot multiple choice": Workload(
            few_shot, shots, "24 questions behind the same 8 examples, 4 choices each", False
        ),
        "JSON by a schema": Workload(extract, documents, "24 documents of 150 words", True),
        "chain of thought, forked": Workload(chain_of_thought, problems, "8 problems, 4 forks of 48 tokens", True),
        "multi-turn chat": Workload(multi_turn, chats, "8 chats of 5 short turns behind 600 words", True),
        "tree of thought": Workload(tree_of_thought, problems, "8 problems, 2 × 3 forks judged by select", False),
    }


@dataclass
class Measured:
    """One entry a round. share: of prompt tokens found in the cache. first: median seconds to a gen's first token."""

    rates: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    spared: list[int] = field(default_factory=list)  # steps, by jump-forward


Results = dict[str, dict[str, Measured]]  # workload → who


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.programs", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-llama", action="store_true", help=f"without {LLAMA}")
    arguments = parser.parse_args()
    results = measure(arguments.rounds, arguments.threads, not arguments.no_llama)
    shown = report(results, arguments)
    HERE.joinpath("PROGRAMS.md").write_text(shown)
    print(shown)


def measure(rounds: int, threads: int, with_llama: bool) -> Results:
    loads = workloads()
    results: Results = {name: {} for name in loads}
    with ExitStack() as stack:
        engines = {
            who: stack.enter_context(LLM(MODEL, threads=threads, kv_memory="1GiB", **options))
            for who, options in VARIANTS.items()
        }
        endpoint: OpenAIEndpoint | None = None
        if with_llama:
            flags = ("--parallel", str(SLOTS), "--ctx-size", str(SLOTS * SLOT_TOKENS), "--jinja")
            port = stack.enter_context(llama_server(threads, flags))
            endpoint = OpenAIEndpoint(f"http://127.0.0.1:{port}/v1", MODEL)
        for turn in range(rounds + 1):
            for name, whole in loads.items():
                load = whole if turn else replace(whole, batch=whole.batch[:2])  # only to have run once
                runs: dict[str, Callable[[], dict[str, Any]]] = {
                    who: lambda load=load, llm=llm: _run(load, llm)  # type: ignore[misc]
                    for who, llm in engines.items()
                }
                if endpoint is not None and load.on_endpoints:
                    runs[LLAMA] = lambda load=load: _timed(load, endpoint)  # type: ignore[misc]
                order = list(runs.items())
                for who, run in order[turn % len(order) :] + order[: turn % len(order)]:
                    got = run()
                    if turn == 0:
                        continue
                    into = results[name].setdefault(who, Measured())
                    into.rates.append(got["rate"])
                    into.shares.append(got.get("share", 0.0))
                    into.firsts.append(got.get("first", 0.0))
                    into.spared.append(got.get("spared", 0))
                if turn:
                    results[name] = {who: results[name][who] for who in runs}
                    rates = ", ".join(f"{who} {each.rates[-1]:.2f}" for who, each in results[name].items())
                    print(f"round {turn}: {name}: {rates} programs/s", file=sys.stderr, flush=True)
    return results


def _run(load: Workload, llm: LLM) -> dict[str, Any]:
    llm.flush_cache()
    before = llm.stats()
    got = _timed(load, llm)
    after = llm.stats()
    grown = {
        name: after[name] - before[name] for name in ("prefix_hit_tokens", "computed_tokens", "jump_forward_tokens")
    }
    got["share"] = grown["prefix_hit_tokens"] / (grown["prefix_hit_tokens"] + grown["computed_tokens"])
    got["spared"] = grown["jump_forward_tokens"]
    return got


def _timed(load: Workload, backend: Any) -> dict[str, Any]:
    begin = time.perf_counter()
    states = load.program.run_batch(load.batch, backend=backend, seed=11)
    seconds = time.perf_counter() - begin
    firsts = []
    for state in states:
        if (error := state.error()) is not None:
            raise error
        metas = state._transcript.meta.values()
        firsts += [meta["time_to_first_token"] for meta in metas if meta.get("time_to_first_token")]
    return {"rate": len(states) / seconds, "first": statistics.median(firsts) if firsts else 0.0}


def report(results: Results, arguments: argparse.Namespace) -> str:
    lines = [
        "# Programs",
        "",
        f"Made by `python -m {' '.join(['benchmarks.programs', *sys.argv[1:]])}` on {datetime.now():%-d %B %Y}, with "
        f"`{MODEL}` and {arguments.threads} threads; medians of {arguments.rounds} rounds, in each of which everyone "
        "runs every workload in turn, in an order that shifts, from an empty cache; the least and the most "
        "in brackets. A ratio is taken within a round.",
        "",
        *(f"- {name}: {value}" for name, value in machine.describe().items()),
        "",
    ]
    for name, load in workloads().items():
        lines += [f"## {name}", "", f"{load.about}.", ""]
        rows = []
        ours = results[name][DEFAULTS]
        for who, each in results[name].items():
            times = figure([mine / other for mine, other in zip(ours.rates, each.rates)])
            of_cache = who != LLAMA
            rows.append(
                [
                    who,
                    str(figure(each.rates)),
                    "" if each is ours else f"{times}×",
                    f"{statistics.median(each.shares):.0%}" if of_cache else "",
                    f"{1e3 * statistics.median(each.firsts):.0f} ms" if statistics.median(each.firsts) else "",
                    str(round(statistics.median(each.spared))) if of_cache else "",
                ]
            )
        head = ("who", "programs/s", "the defaults are faster", "of all tokens from the cache")
        lines += [table((*head, "time to first token, median", "steps that jump-forward spared"), rows)]
        if name in ("few-shot multiple choice", "multi-turn chat"):
            pairs = zip(ours.rates, results[name]["no prefix cache"].rates)
            met = statistics.median(mine / other for mine, other in pairs) >= LEAST_OF_CACHE
            lines += [f"Wanted: ≥ {LEAST_OF_CACHE:g}× of no prefix cache: {'met' if met else '**not met**'}.", ""]
        if not load.on_endpoints:
            lines += [f"{LLAMA} cannot take part: OpenAI's API does not tell how likely a given text is.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
