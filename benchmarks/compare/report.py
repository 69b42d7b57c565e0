"""RESULTS.md from what was measured: everything in it comes from the dictionary that results.json holds."""

from __future__ import annotations

from typing import Any

from benchmarks.compare import workloads
from benchmarks.compare.contenders import OCTAVO
from benchmarks.compare.figures import Figure, figure, ratio, shown, table
from benchmarks.compare.start import MOST_READY_SECONDS
from benchmarks.compare.targets import Verdict, rates_of, roofline_shares, verdicts

_HOW = """\
Every figure is the median over {rounds} rounds, with the least and the most in brackets. In a round each system runs
each workload in turn, so that a machine that slows down slows all of them; a ratio is taken within a round, and the
median of those ratios is given. All use {threads} threads, greedy sampling and the same random token prompts, and
generate the number of tokens asked for, past any end of sequence. "Decode" counts the tokens after the first one of
every sequence. A peer's settings are those that were fastest for that workload when all were tried (below; with
--settings in an earlier run), for the longest workloads those of batch 32; the best peer is the one with the highest
median among all in 4- or 8-bit formats. Octavo runs with its defaults.
"""


def render(results: dict[str, Any]) -> str:
    sessions = results["sessions"]
    counts = sorted({len(session["roofline"]) for session in sessions})
    commands = " and ".join(dict.fromkeys(f"`{session['command']}`" for session in sessions))
    head = "\n".join(f"- {name}: {value}" for name, value in results["machine"].items())
    parts = [
        "# Octavo beside its peers\n",
        f"Made by {commands}, the last on {results['date']}. What it does and how to repeat it: "
        "[benchmarks/README.md](README.md#beside-its-peers).\n",
        head + f"\n- versions: {', '.join(sorted(_versions(sessions)))}\n"
        f"- load average before the run: {results['load']:.2f}\n",
        _HOW.format(
            rounds=" or ".join(map(str, counts)),
            threads=results["threads"],
        ),
        "## Targets\n",
        _targets(results),
        *(_session(session) for session in sessions),
        *_engine(results),
    ]
    return "\n".join(parts)


def _versions(sessions: list[dict[str, Any]]) -> set[str]:
    return {about["version"] for session in sessions for about in session["about"].values()}


def _targets(results: dict[str, Any]) -> str:
    rows = [_verdict(verdict) for verdict in verdicts(results["sessions"])]
    rows += _start_rows(results.get("start"))
    rows += _prefix_rows(results["sessions"])
    rows += _neighbour_rows(results.get("neighbours"))
    return table(("model", "workload", "against", "target", "measured", "met"), rows)


def _verdict(verdict: Verdict) -> list[str]:
    target = verdict.target
    wanted = f"≥ {target.factor:g}×" + (f" (stretch {target.stretch:g}×)" if target.stretch else "")
    against = verdict.against + (" (the best peer)" if target.against is None else "")
    return [target.session, target.workload, against, wanted, _times(verdict.measured), _met(verdict.met)]


def _start_rows(start: dict[str, Any] | None) -> list[list[str]]:
    if start is None:
        return []
    ready, peak = figure(start["ready_seconds"]), figure([rss / 1e6 for rss in start["peak_rss"]])
    least, bound = f"≤ {MOST_READY_SECONDS} s", start["bound"] / 1e6
    in_time, in_bounds = _met(ready.median <= MOST_READY_SECONDS), _met(peak.high <= bound)
    what = "packed weights × 1.1 + KV pool + 200 MB"
    return [
        ["smollm2", "ready, from the start of a process", "–", least, f"{ready} s", in_time],
        ["smollm2", "peak memory", what, f"≤ {bound:.0f} MB", f"{peak} MB", in_bounds],
    ]


def _prefix_rows(sessions: list[dict[str, Any]]) -> list[list[str]]:
    rows = []
    for session in sessions:
        if "ttft cold / hit" in session["extra"]:
            measured = figure(session["extra"]["ttft cold / hit"])
            what = "first token of a 50-token question after 2,000 shared tokens"
            rows.append(
                [session["name"], what, "the same, cold", "≥ 15×", _times(measured), _met(measured.median >= 15)]
            )
    return rows


def _neighbour_rows(neighbours: dict[str, Any] | None) -> list[list[str]]:
    rows = []
    for verdict in (neighbours or {}).get("verdicts", []):
        median, low, high = verdict["measured"]
        what = f"{verdict['workload']}, {verdict['what']}"
        measured = f"{median:.0%} ({low:.0%} – {high:.0%})"
        rows.append(["smollm2", what, verdict["against"], f"≥ {verdict['least']:.0%}", measured, _met(verdict["met"])])
    return rows


def _session(session: dict[str, Any]) -> str:
    rates = rates_of(session)
    parts = [f"## {session['name']}\n"]
    rows = []
    for load, by in session["rates"].items():
        for who, values in sorted(by.items(), key=lambda item: item[0] != OCTAVO):
            times = "" if who == OCTAVO else _times(ratio(rates, load, OCTAVO, who))
            busy = figure(session["busy"][load][who]).median
            rows.append([load, who, str(figure(values)), times, f"{busy:.2f}"])
    parts.append(table(("workload", "who", "tokens/s", "Octavo is faster", "cores busy"), rows))
    parts.append("### Beside the hardware's limits\n")
    roofs = session["roofline"]
    gmacs, gbs = (figure([roof[name] for roof in roofs]) for name in ("integer_gmacs", "read_gbs"))
    parts.append(
        f"Measured once a round, with {roofs[0]['kernels']} kernels: {gmacs} GMAC/s of int8, {gbs} GB/s read from "
        "memory. Multiply-adds are those of the weight matrices alone; reads are the packed weights once a step, and "
        "the KV. What lies in the caches can be read faster than memory.\n"
    )
    parts.append(table(("workload", "GMAC/s", "of the limit", "GB/s", "of the limit"), _rooflines(session)))
    parts.append("### All settings and formats\n")
    parts.append("The fastest settings of each, as tried once before the rounds on a smaller workload.\n")
    parts.append(table(("workload", "who", "tokens/s", "settings"), _tried(session)))
    parts += [f"- {name} could not take part: {why}\n" for name, why in session["refusals"].items()]
    if session["agreement"]:
        same = ", ".join(f"{name} {share:.0%}" for name, share in sorted(session["agreement"].items()))
        parts.append(
            f"First tokens equal to Octavo's, a check that all run the same model (other formats round otherwise, and "
            f"random prompts leave many near-ties): {same}.\n"
        )
    parts.append(f"CPU that a waiting worker took, at most: {session['idle_share']:.2%} of a core.\n")
    return "\n".join(parts)


def _rooflines(session: dict[str, Any]) -> list[list[str]]:
    rows = []
    for load in workloads.ALL:
        if load.name in session["rates"]:
            gmacs, share, gbs, read_share = roofline_shares(session, load)
            reads = [shown(gbs.median), f"{read_share.median:.0%}"] if gbs and read_share else ["", ""]
            rows.append([load.name, shown(gmacs.median), f"{share.median:.0%}", *reads])
    return rows


def _tried(session: dict[str, Any]) -> list[list[str]]:
    rows = []
    for load, by in session["tried"].items():
        for who, choice in sorted(by.items(), key=lambda item: -item[1]["rate"]):
            if choice["rate"]:
                rows.append([load, who, shown(choice["rate"]), choice["text"]])
    return rows


def _engine(results: dict[str, Any]) -> list[str]:
    parts = []
    if "neighbours" in results:
        parts += ["## Busy neighbours\n", table(*results["neighbours"]["table"])]
    if "engine" in results:
        parts += ["## The engine's own costs\n", "From `python -m benchmarks.engine`:\n"]
        parts.append("```\n" + results["engine"].strip() + "\n```\n")
    return parts


def _times(value: Figure) -> str:
    return f"{value.median:.2f}× ({value.low:.2f} – {value.high:.2f})"


def _met(met: bool) -> str:
    return "yes" if met else "**no**"
