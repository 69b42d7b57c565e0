"""One command for all of it: `python -m benchmarks.compare`; --quick for a look. See benchmarks/README.md."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.compare import contenders, machine, report, rounds, start, workloads
from benchmarks.compare.contenders import OCTAVO, Contender, llamacpp, octavo, openvino
from benchmarks.compare.targets import SAME_FILE, SMOLLM2, TRANSFORMERS
from benchmarks.peers import setup

HERE = Path(__file__).parents[1]
FORMATS = ("Q4_1", "Q4_0", "Q8_0", "F16")


def main() -> None:
    arguments = _arguments()
    folder = Path(arguments.output)
    if arguments.render:
        folder.joinpath("RESULTS.md").write_text(report.render(json.loads((folder / "results.json").read_text())))
        return
    results: dict[str, Any] = {
        "date": datetime.now().strftime("%-d %B %Y"),
        "machine": machine.describe(),
        "load": machine.load(),
        "rounds": arguments.rounds,
        "threads": arguments.threads,
        "sessions": [],
    }
    if arguments.keep:
        _keep(json.loads(folder.joinpath("results.json").read_text()), arguments.models, results)
    if results["load"] > 0.5:
        print(f"The machine is busy (load average {results['load']:.1f}): figures will spread, and be low.")

    def save() -> None:
        folder.joinpath("results.json").write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
        folder.joinpath("RESULTS.md").write_text(report.render(results))

    for name in arguments.models:
        print(f"{name}:", flush=True)
        _session(name, arguments, results["sessions"], save)
    if not arguments.quick and SMOLLM2 in arguments.models:
        print("start and memory", flush=True)
        results["start"] = start.measure(arguments.rounds, arguments.threads)
        save()
        print("neighbours", flush=True)
        results["neighbours"] = json.loads(_output("benchmarks.neighbours", "--json"))
        save()
        print("the engine's own costs", flush=True)
        results["engine"] = _output("benchmarks.engine")
        save()
    print(f"written: {folder / 'RESULTS.md'}")


def _keep(earlier: dict[str, Any], models: list[str], results: dict[str, Any]) -> None:
    """What an earlier run measured of other models stays."""
    results["sessions"] = [session for session in earlier["sessions"] if session["name"] not in models]
    if SMOLLM2 not in models:
        results |= {name: earlier[name] for name in ("start", "neighbours", "engine") if name in earlier}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(SAME_FILE), default=list(SAME_FILE), metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="of every system")
    parser.add_argument("--output", default=str(HERE), metavar="FOLDER", help="where RESULTS.md and results.json go")
    parser.add_argument("--quick", action="store_true", help="2 rounds of the shortest workloads, fewer peers")
    parser.add_argument("--short", action="store_true", help="without the workloads that take minutes")
    parser.add_argument("--settings", metavar="FILE", help="take the peers' settings from this results.json, try none")
    parser.add_argument("--keep", action="store_true", help="what results.json holds of other models stays in it")
    parser.add_argument("--vllm", action="store_true", help="vLLM takes part too, in bfloat16")
    parser.add_argument("--render", action="store_true", help="only write RESULTS.md again, from results.json")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = min(arguments.rounds, 2)
    return arguments


def _session(
    name: str, arguments: argparse.Namespace, sessions: list[dict[str, Any]], save: Callable[[], None]
) -> None:
    """Adds the session to the others; they are saved after each of its rounds."""
    command = " ".join(["python -m benchmarks.compare", *sys.argv[1:]])
    session, others = rounds.Session(name, command), list(sessions)
    if name == SMOLLM2:
        everyone, loads = _on_smollm2(arguments), list(workloads.ALL)
    else:
        everyone, loads = (
            _on_random_weights(name, arguments.threads),
            [workloads.PREFILL, workloads.BATCH_1, workloads.BATCH_32],
        )
    if arguments.quick:
        loads = [load for load in loads if len(load.prompts) <= 8]
    if arguments.short:
        loads = [load for load in loads if not load.is_long]
    if arguments.settings:
        earlier = json.loads(Path(arguments.settings).read_text())["sessions"]
        session.tried = next(each["tried"] for each in earlier if each["name"] == name)
    else:
        session.tried = rounds.choose(everyone, loads, session)
    always = [OCTAVO, SAME_FILE[name], TRANSFORMERS, "vLLM bfloat16"]
    plan = {}
    for load in loads:
        tried = session.tried[load.name]
        names = rounds.rivals(tried, everyone, always, 1 if load.is_long else 2)
        plan[load.name] = [(c, tried[c.name]) for c in everyone if c.name in names]

    def keep() -> None:
        sessions[:] = [*others, asdict(session)]
        save()

    rounds.measure(plan, loads, arguments.rounds, session, arguments.threads, keep, prefix=name == SMOLLM2)


def _on_smollm2(arguments: argparse.Namespace) -> list[Contender]:
    from octavo.weights.sources import resolve_model

    source = resolve_model("smollm2")
    formats = ("Q4_1", "Q8_0") if arguments.quick else FORMATS
    files = {format: source if format == "Q4_1" else contenders.requantised(source, format) for format in formats}
    threads = arguments.threads
    everyone = [octavo("smollm2", threads), *(llamacpp(format, file, threads) for format, file in files.items())]
    everyone += [openvino(format, file, threads) for format, file in files.items() if format != "F16"]
    if not arguments.quick:
        everyone.append(contenders.transformers(source, threads))
    if arguments.vllm:
        everyone.append(contenders.vllm(contenders.dequantised(source), threads))
    return everyone


def _on_random_weights(name: str, threads: int) -> list[Contender]:
    file = contenders.random_model(name)
    model = file.with_suffix("") if name.endswith("-bf16") else file
    return [octavo(model, threads), llamacpp(SAME_FILE[name].split()[-1], file, threads)]


def _output(module: str, *arguments: str) -> str:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=setup.ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main()
