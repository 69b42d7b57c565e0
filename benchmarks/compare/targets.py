"""What the figures are held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.compare import workloads
from benchmarks.compare.contenders import OCTAVO
from benchmarks.compare.figures import Figure, Key, best, figure, ratio

SMOLLM2 = "smollm2"
SAME_FILE = {  # session → the contender with the same weights
    SMOLLM2: "llama.cpp Q4_1",
    "qwen2.5-0.5b": "llama.cpp Q4_1",
    "qwen2.5-1.5b": "llama.cpp Q4_1",
    "qwen2.5-0.5b-bf16": "llama.cpp Q8_0",
}
TRANSFORMERS = "Transformers float32"


@dataclass(frozen=True)
class Target:
    """`against`: a contender, or None for the best peer in 4 or 8 bits. Octavo is to be `factor` times as fast."""

    session: str
    workload: str
    against: str | None
    factor: float
    stretch: float | None = None


def _smollm2() -> list[Target]:
    rows = (
        (workloads.PREFILL, 4.5, 2.2, 5.8),
        (workloads.BATCH_1, 2.0, 1.7, 2.5),
        (workloads.BATCH_8, 3.5, 2.6, 4.6),
        (workloads.BATCH_32, 4.5, 2.2, 5.8),
        (workloads.LONG, 3.0, 2.0, None),
        (workloads.REQUESTS, 4.0, 2.0, None),
    )
    targets = []
    for load, same, any, stretch in rows:
        targets.append(Target(SMOLLM2, load.name, SAME_FILE[SMOLLM2], same, stretch))
        targets.append(Target(SMOLLM2, load.name, None, any))
    return [*targets, Target(SMOLLM2, workloads.REQUESTS.name, TRANSFORMERS, 40.0)]


def _others() -> list[Target]:
    factors = ((workloads.PREFILL, 3.0), (workloads.BATCH_32, 3.0), (workloads.BATCH_1, 1.7))
    return [
        Target(session, load.name, SAME_FILE[session], factor)
        for session in SAME_FILE
        if session != SMOLLM2
        for load, factor in factors
    ]


TARGETS = (*_smollm2(), *_others())


@dataclass(frozen=True)
class Verdict:
    target: Target
    against: str
    measured: Figure

    @property
    def met(self) -> bool:
        return self.measured.median >= self.target.factor


def rates_of(session: dict[str, Any]) -> dict[Key, list[float]]:
    return {Key(load, who): values for load, by in session["rates"].items() for who, values in by.items()}


def peers(session: dict[str, Any]) -> list[str]:
    """Those in 4 or 8 bits."""
    names = {who for by in session["rates"].values() for who in by}
    return sorted(name for name in names if name.endswith(("Q4_0", "Q4_1", "Q8_0")))


def verdicts(sessions: Sequence[dict[str, Any]]) -> list[Verdict]:
    """Of the targets whose workload and opponent were measured."""
    by_name = {session["name"]: session for session in sessions}
    found = []
    for target in TARGETS:
        session = by_name.get(target.session)
        if session is None or target.workload not in session["rates"]:
            continue
        rates = rates_of(session)
        measured = [name for name in peers(session) if Key(target.workload, name) in rates]
        against = target.against or (best(rates, target.workload, measured) if measured else "")
        if Key(target.workload, against) in rates:
            found.append(Verdict(target, against, ratio(rates, target.workload, OCTAVO, against)))
    return found


def roofline_shares(
    session: dict[str, Any], load: workloads.Workload
) -> tuple[Figure, Figure, Figure | None, Figure | None]:
    """Octavo's integer GMAC/s and its share of the ceiling; GB/s of weights and KV read and their share, when decoding.

    The multiply-adds are the matrices' own; attention's, in floats, come on top. Reading counts the packed weights
    once a step and every sequence's KV at its mean length.
    """
    about = session["about"][OCTAVO]
    layers, head = about["layer_macs"], about["head_macs"]
    rates, rooflines = session["rates"][load.name][OCTAVO], session["roofline"]
    prompt = sum(load.prompts) if load.op == "generate" else 0
    outputs = load.tokens if load.counts == "output" else len(load.prompts)
    # The last token of a request is sampled and never computed on; the first comes with the prompt.
    macs = (prompt + outputs - (len(load.prompts) if prompt else 0)) * layers + outputs * head
    seconds = [load.tokens / rate for rate in rates]
    gmacs = [macs / s / 1e9 for s in seconds]
    shares = [value / roof["integer_gmacs"] for value, roof in zip(gmacs, rooflines)]
    if load.op != "decode":
        return figure(gmacs), figure(shares), None, None
    steps = load.outputs[0] - 1
    context = load.prompts[0] + load.outputs[0] / 2
    read = steps * (about["weight_bytes"] + len(load.prompts) * context * about["kv_token_bytes"])
    gbs = [read / s / 1e9 for s in seconds]
    read_shares = [value / roof["read_gbs"] for value, roof in zip(gbs, rooflines)]
    return figure(gmacs), figure(shares), figure(gbs), figure(read_shares)
