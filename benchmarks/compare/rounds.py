"""The measuring itself: settings are tried first, then all contenders run in turn, round after round."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.compare import workloads
from benchmarks.compare.contenders import OCTAVO, Contender, Settings
from benchmarks.compare.workloads import Workload
from benchmarks.peers import setup
from benchmarks.peers.process import Worker, WorkerError

# Of the settings of a contender: "process", the number of that of its process, "options" of the call, the "rate" when
# they were tried in tokens a second, and "text" for people.
Choice = dict[str, Any]


@dataclass
class Session:
    """All that was measured with one model, by one command.

    rates: workload → contender → tokens a second, one a round. tried: the same shape, of the settings chosen.
    about: what the contenders said of themselves. agreement: share of requests whose first token is Octavo's.
    roofline: one a round. extra: other values, one a round. refusals: contenders that could not load their file.
    """

    name: str
    command: str
    tried: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    rates: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    busy: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    about: dict[str, dict[str, Any]] = field(default_factory=dict)
    agreement: dict[str, float] = field(default_factory=dict)
    roofline: list[dict[str, Any]] = field(default_factory=list)
    extra: dict[str, list[float]] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    idle_share: float = 0.0


def log_file() -> Path:
    setup.folder().mkdir(parents=True, exist_ok=True)
    return setup.folder() / "workers.log"


def choose(
    contenders: Iterable[Contender], loads: Sequence[Workload], session: Session
) -> dict[str, dict[str, Choice]]:
    """workload → contender → what was fastest. A process a setting, one at a time, the best of two calls each.

    Long workloads take what was fastest on the largest batch of the others: to try them all would take an hour.
    """
    short = [load for load in loads if not load.is_long]
    requests = [load for load in loads if len(load.prompts) > 32]
    chosen: dict[str, dict[str, Choice]] = {load.name: {} for load in loads}
    for contender in contenders:
        if contender.name == OCTAVO:  # it has nothing to choose
            for by in chosen.values():
                by[OCTAVO] = {"process": 0, "options": {}, "rate": 0.0, "text": "default"}
            continue
        for process in range(len(contender.settings)):
            try:
                _try(contender, process, requests if contender.sample else short, chosen)
            except WorkerError as error:
                session.refusals[contender.name] = str(error)
                _say(f"  {contender.name}: {error}")
    for load in loads:
        if load.is_long:
            chosen[load.name] = {**chosen[short[-1].name], **chosen[load.name]}
    return chosen


def _try(contender: Contender, process: int, loads: Sequence[Workload], chosen: dict[str, dict[str, Choice]]) -> None:
    settings = contender.settings[process]
    with Worker(contender.python(), contender.environment, settings, log_file()) as worker:
        for load in loads:
            small = workloads.sample(load, 1, 0) if contender.sample else load.smaller()
            for options in contender.options:
                runs = [worker.run(small.op, *small.requests(-1 - n), options) for n in range(2)]
                rate = max(small.rate(run) for run in runs)
                text = settings_text(settings | options)
                _say(f"  {contender.name}, {load.name}: {rate:.0f} tok/s, {text}")
                choice = {"process": process, "options": options, "rate": rate, "text": text}
                if contender.name not in chosen[load.name] or rate > chosen[load.name][contender.name]["rate"]:
                    chosen[load.name][contender.name] = choice


def settings_text(settings: Settings) -> str:
    """Without paths and what is the same for all."""
    hidden = {"model", "folder", "file", "threads", "cache_gb", "batched_tokens", "properties"}
    every = {**settings, **settings.get("properties", {})}
    shown = []
    for key, value in every.items():
        if key not in hidden:
            shown.append(f"{key} {'on' if value is True else 'off' if value is False else value}")
    return ", ".join(shown) or "default"


def rivals(
    chosen: Mapping[str, Choice], contenders: Sequence[Contender], always: Sequence[str], others: int
) -> list[str]:
    """Whom it is worth to measure: those named, and of the others in 4 or 8 bits so many that were fastest."""
    ranked = [c.name for c in contenders if c.bits <= 8 and c.name in chosen and c.name not in always]
    ranked.sort(key=lambda name: -chosen[name]["rate"])
    return [name for name in always if name in chosen] + ranked[:others]


def measure(
    plan: Mapping[str, Sequence[tuple[Contender, Choice]]],
    loads: Sequence[Workload],
    rounds: int,
    session: Session,
    threads: int,
    keep: Callable[[], None],
    *,
    prefix: bool = False,
) -> None:
    """plan: workload → who is measured on it. Round 0 is a warm-up and is not counted. `keep` is called after each of
    the others: the session then holds whole rounds only."""
    from octavo.bench.roofline import RooflineProbe

    probe = RooflineProbe(threads)
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for pairs in plan.values():
            for contender, choice in pairs:
                key = _process(contender, choice)
                if key not in workers:
                    worker = Worker(
                        contender.python(), contender.environment, contender.settings[choice["process"]], log_file()
                    )
                    workers[key] = stack.enter_context(worker)
                    session.about[contender.name] = workers[key].about
        same: dict[str, list[bool]] = defaultdict(list)
        for round in range(rounds + 1):
            begin = time.perf_counter()
            if round:
                session.roofline.append(_roofline(probe))
            for load in loads:
                first_tokens: dict[str, list[int]] = {}
                pairs = plan[load.name]
                for contender, choice in _rotated(pairs, round):
                    mine = load if round else load.smaller()
                    if contender.sample:
                        mine = workloads.sample(load, contender.sample if round else 1, round)
                    worker = workers[_process(contender, choice)]
                    answer = worker.run(mine.op, *mine.requests(round), choice["options"])
                    if round:
                        rate = mine.rate(answer)
                        session.rates.setdefault(load.name, {}).setdefault(contender.name, []).append(rate)
                        busy = answer["cpu_seconds"] / answer["seconds"]
                        session.busy.setdefault(load.name, {}).setdefault(contender.name, []).append(busy)
                        if not contender.sample:
                            first_tokens[contender.name] = [output[0] for output in answer["outputs"]]
                for name, tokens in first_tokens.items():
                    same[name] += [a == b for a, b in zip(tokens, first_tokens.get(OCTAVO, []))]
            if prefix:
                ours = next(pair for pair in plan[loads[0].name] if pair[0].name == OCTAVO)
                _shared_prefix(workers[_process(*ours)], round, session)
            _say(f"  round {round} of {rounds}: {time.perf_counter() - begin:.0f} s" + _progress(session, loads, round))
            session.agreement = {name: sum(all) / len(all) for name, all in same.items() if all and name != OCTAVO}
            session.idle_share = max(worker.idle_share for worker in workers.values())
            if round:
                keep()


def _shared_prefix(worker: Worker, round: int, session: Session) -> None:
    """Seconds to the first token of a 50-token question after 2,000 tokens: never seen before, and seen once."""
    rng = random.Random(f"prefix {round}")
    prefix = workloads.random_ids(rng, 2000)
    cold, hit = (worker.run("generate", [prefix + workloads.random_ids(rng, 50)], [1], {})["seconds"] for _ in range(2))
    if round:
        for name, value in (("ttft cold", cold), ("ttft hit", hit), ("ttft cold / hit", cold / hit)):
            session.extra.setdefault(name, []).append(value)


def _roofline(probe: Any) -> dict[str, Any]:
    probe.reset()
    for _ in range(3):
        probe.read()
        for _ in range(8):
            probe.compute()
    result = probe.result()
    return {"integer_gmacs": result.integer_gmacs, "read_gbs": result.read_gbs, "kernels": result.kernels}


def _rotated(pairs: Sequence[tuple[Contender, Choice]], round: int) -> list[tuple[Contender, Choice]]:
    """Everyone comes first in some round, so that nobody always finds the caches of the same predecessor."""
    start = round % len(pairs)
    return [*pairs[start:], *pairs[:start]]


def _process(contender: Contender, choice: Choice) -> str:
    return f"{contender.name} {choice['process']}"


def _progress(session: Session, loads: Sequence[Workload], round: int) -> str:
    if not round:
        return " (warm-up)"
    rates = ((load.name, session.rates[load.name]) for load in loads)
    return "".join(
        f"\n    {name}: " + ", ".join(f"{who} {values[-1]:.0f}" for who, values in by.items()) for name, by in rates
    )


def _say(text: str) -> None:
    print(text, flush=True)
