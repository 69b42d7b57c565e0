"""`octavo bench`: how fast kernels, one batch, or many requests are on this machine, beside what it could do."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli import engine, options, terminal
from octavo.limits import MAX_BATCH_SEQUENCES

if TYPE_CHECKING:
    from octavo.bench.datasets import BenchRequest
    from octavo.bench.kernels import KernelResult
    from octavo.bench.shapes import Shapes
    from octavo.engine.llm import LLM
    from octavo.params import SamplingParams

SCHEMA = 1  # of the JSON; docs/cli.md describes it

app = typer.Typer(
    name="bench", no_args_is_help=True, rich_markup_mode=None, help="Measure speed on this machine, beside its limits."
)

OutputJson = Annotated[
    Path | None, typer.Option("--output-json", "--json", help="Also write the result to this file.", dir_okay=False)
]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")]
N = Annotated[int, typer.Option("--n", help="Outputs a prompt.")]
Seed = Annotated[int, typer.Option(help="Of prompts and sampling.")]


@app.command()
def kernels(
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Use this model's shapes and formats.  [default: SmolLM2-135M's]"),
    ] = None,
    revision: options.Revision = None,
    weights: options.Weights = "auto",
    formats: Annotated[
        str | None, typer.Option(help="Weight formats, e.g. q4,q8.  [default: the model's; without one, all]")
    ] = None,
    rows: Annotated[str, typer.Option(help="Rows of a step.")] = "1,2,4,8,32,128,512",
    only: Annotated[str, typer.Option(help="Which kernels.")] = "linear,attention,norm,sampler",
    rounds: Annotated[int, typer.Option(help="Times that everything is measured, in turn.")] = 5,
    threads: options.Threads = None,
    kernels: options.Kernels = "auto",
    output_json: OutputJson = None,
) -> None:
    """Time each kernel in steps of the executor: multiply-adds and bytes a second, and their share of the roofline."""
    from octavo.bench import kernels as bench
    from octavo.bench.roofline import RooflineProbe

    shapes = _shapes(model, revision, weights)
    what = bench.KernelBench(shapes, _words(formats), _integers("--rows", rows), _words(only) or (), rounds)
    probe = RooflineProbe(threads, kernels)
    _writable(output_json)
    with _progress("Groups", bench.group_count(what)) as advance:
        results, rooflines = bench.run(what, probe, lambda found: advance())
    best = bench.best_of(rooflines)
    _print_table(_kernel_rows(results))
    print(f"\n{best}")
    _write(
        output_json,
        "kernels",
        {
            "shapes": shapes.name,
            "settings": {"rounds": rounds, "threads": probe.threads, "kernels": probe.kernels},
            "roofline": asdict(best),
            "results": [{**result.kernel._asdict(), **_numbers(result)} for result in results],
        },
    )


@app.command()
def latency(
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 128,
    output_len: Annotated[int, typer.Option(help="Tokens of each output.")] = 128,
    batch_size: Annotated[int, typer.Option(help="Requests in the batch.")] = 8,
    n: N = 1,
    temperature: Temperature = 1.0,
    num_iters_warmup: Annotated[int, typer.Option(help="Batches that do not count, at first.")] = 1,
    num_iters: Annotated[int, typer.Option(help="Batches that count.")] = 5,
    seed: Seed = 0,
    model: options.Model = "smollm2",
    revision: options.Revision = None,
    weights: options.Weights = "auto",
    kv_dtype: options.KVDtype = "f16",
    kv_memory: options.KVMemory = None,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = MAX_BATCH_SEQUENCES,
    threads: options.Threads = None,
    kernels: options.Kernels = "auto",
    output_json: OutputJson = None,
) -> None:
    """Time one batch of equal requests with random prompts, again and again."""
    from octavo.bench.latency import latency as measure

    params = _sampling(n, temperature, seed)
    engine_options = options.EngineOptions(
        model, revision, weights, kv_dtype, kv_memory, max_model_len, threads, kernels, max_num_seqs
    )
    _writable(output_json)
    with engine.open_engine(engine_options) as llm, _progress("Batches", num_iters_warmup + num_iters) as advance:
        result = measure(
            llm,
            input_len=input_len,
            output_len=output_len,
            batch_size=batch_size,
            num_iters_warmup=num_iters_warmup,
            num_iters=num_iters,
            params=params,
            seed=seed,
            done=advance,
        )
    seconds = result["batch_seconds"]
    facts = [("latency of a batch", _spread(seconds)), *_times(result)]
    facts.append(("output tokens/s", f"{result['output_tokens_per_second']:.1f}"))
    _print_table([*_failures(result), *facts, *_roofline(result)], header=False)
    _write(output_json, "latency", result)


@app.command()
def throughput(
    num_prompts: Annotated[int, typer.Option(help="Requests, all submitted at once.")] = 64,
    dataset_name: Annotated[
        str, typer.Option(help="random, sharegpt-like (random tokens, lengths of conversations), or sharegpt (a file).")
    ] = "random",
    dataset_path: Annotated[
        Path | None,
        typer.Option("--dataset-path", "--dataset", help="ShareGPT's JSON, or JSON lines with prompt, output_len."),
    ] = None,
    input_len: Annotated[int | None, typer.Option(help="Tokens of a random prompt.  [default: 128]")] = None,
    output_len: Annotated[
        int | None, typer.Option(help="Tokens of an output.  [default: the dataset's, else 128]")
    ] = None,
    random_range_ratio: Annotated[float, typer.Option(help="Random lengths vary by this share, both ways.")] = 0.0,
    prefix_len: Annotated[int, typer.Option(help="Tokens that all random prompts share, in front.")] = 0,
    n: N = 1,
    temperature: Temperature = 1.0,
    seed: Seed = 0,
    model: options.Model = "smollm2",
    revision: options.Revision = None,
    weights: options.Weights = "auto",
    kv_dtype: options.KVDtype = "f16",
    kv_memory: options.KVMemory = None,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = MAX_BATCH_SEQUENCES,
    threads: options.Threads = None,
    kernels: options.Kernels = "auto",
    output_json: OutputJson = None,
) -> None:
    """Run many requests at once; tokens a second, the prefix cache's and the KV memory's use."""
    from octavo.bench.throughput import throughput as measure

    if dataset_name not in ("random", "sharegpt-like", "sharegpt"):
        raise typer.BadParameter(f"--dataset-name {dataset_name}: random, sharegpt-like or sharegpt")
    if dataset_name == "sharegpt" and dataset_path is None:
        raise typer.BadParameter("--dataset-name sharegpt needs --dataset-path")
    if dataset_path is not None and (input_len is not None or prefix_len or random_range_ratio):
        raise typer.BadParameter("--input-len, --prefix-len and --random-range-ratio are for random prompts")
    if dataset_path is not None and dataset_name == "sharegpt-like":
        raise typer.BadParameter("give either --dataset-path or --dataset-name sharegpt-like")
    params = _sampling(n, temperature, seed)
    engine_options = options.EngineOptions(
        model, revision, weights, kv_dtype, kv_memory, max_model_len, threads, kernels, max_num_seqs
    )
    _writable(output_json)

    with engine.open_engine(engine_options) as llm:
        if dataset_path is not None:
            requests = _file_requests(llm, dataset_path, num_prompts, output_len, seed)
        else:
            requests = _random_requests(
                llm, dataset_name, num_prompts, input_len, output_len, random_range_ratio, prefix_len, seed
            )
        result = measure(llm, requests, params, progress=True)
    dataset = {"dataset": str(dataset_path or dataset_name), "seed": seed}
    result["settings"] |= dataset
    facts = [
        ("requests/s", f"{result['requests_per_second']:.2f}"),
        ("output tokens/s", f"{result['output_tokens_per_second']:.1f}"),
        ("total tokens/s", f"{result['total_tokens_per_second']:.1f}"),
        ("elapsed", f"{result['elapsed_seconds']:.2f} s"),
        ("prompt tokens", f"{result['prompt_tokens']:,}"),
        ("… found in the prefix cache", f"{result['prefix_hit_tokens']:,} ({result['prefix_hit_share']:.1%})"),
        ("output tokens", f"{result['output_tokens']:,}"),
        ("latency of a request", _spread(result["latency_seconds"])),
        *_times(result),
        ("KV memory, most used", f"{result['kv']['peak_share']:.1%} of {result['kv']['blocks_total']:,} blocks"),
        ("preemptions, evictions", f"{result['preemptions']}, {result['evictions']}"),
        *_roofline(result),
    ]
    _print_table([*_failures(result), *facts], header=False)
    _write(output_json, "throughput", result)


# What is measured


def _shapes(model: str | None, revision: str | None, weights: str) -> Shapes:
    from octavo.bench.shapes import SMOLLM2, shapes_of

    if model is None:
        return SMOLLM2
    from octavo.engine.loader import load_model

    loaded = load_model(model, revision=revision)
    return shapes_of(loaded.name, loaded.program, loaded.checkpoint.tensors, weights)


def _random_requests(
    llm: LLM,
    name: str,
    count: int,
    input_len: int | None,
    output_len: int | None,
    range_ratio: float,
    prefix_len: int,
    seed: int,
) -> list[BenchRequest]:
    from octavo.bench.datasets import DEFAULT_OUTPUT_LEN, random_requests, sharegpt_like_requests

    vocab_size = llm.info()["vocab_size"]
    if name == "sharegpt-like":
        if input_len is not None or output_len is not None or range_ratio or prefix_len:
            raise typer.BadParameter("sharegpt-like has its own lengths; --dataset-name random takes yours")
        return sharegpt_like_requests(count, vocab_size, seed=seed)
    return random_requests(
        count,
        vocab_size,
        input_len=128 if input_len is None else input_len,
        output_len=DEFAULT_OUTPUT_LEN if output_len is None else output_len,
        range_ratio=range_ratio,
        prefix_len=prefix_len,
        seed=seed,
    )


def _file_requests(llm: LLM, path: Path, count: int, output_len: int | None, seed: int) -> list[BenchRequest]:
    from octavo.bench.datasets import file_requests

    longest = llm.info()["max_model_len"]
    requests, passed_over = file_requests(
        path, llm.tokenizer.encode, count=count, max_model_len=longest, output_len=output_len, seed=seed
    )
    if passed_over:
        terminal.warn(f"{passed_over} entries of {path} were passed over: too short, or too long for the model")
    if len(requests) < count:
        terminal.warn(f"{path} has {len(requests)} usable prompts, fewer than --num-prompts {count}")
    return requests


def _sampling(n: int, temperature: float, seed: int) -> SamplingParams:
    from octavo.params import SamplingParams

    return SamplingParams(n=n, temperature=temperature, seed=seed)


def _words(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(word.strip() for word in text.split(",") if word.strip())


def _integers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in _words(text) or ())
    except ValueError:
        raise typer.BadParameter(f"{option} {text}: integers between commas") from None


# What is shown


def _kernel_rows(results: Sequence[KernelResult]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("KERNEL", "FORMAT", "ROWS", "CONTEXT", "TIME", "GMAC/s", "GB/s", "OF ROOFLINE")]
    for result in results:
        kernel = result.kernel
        numbers = ["", "", ""]
        if result.gmacs is not None and result.gbs is not None and result.share is not None:
            numbers = [f"{result.gmacs:.1f}", f"{result.gbs:.1f}", f"{result.share:.0%}"]
        context = "" if kernel.context is None else str(kernel.context)
        seconds = "-" if result.seconds is None else _duration(result.seconds)
        rows.append((kernel.name, kernel.format, str(kernel.rows), context, seconds, *numbers))
    return rows


def _numbers(result: KernelResult) -> dict[str, float | None]:
    return {name: getattr(result, name) for name in ("seconds", "best_seconds", "gmacs", "gbs", "share")}


def _duration(seconds: float) -> str:
    return (
        f"{seconds * 1e6:.2f} µs"
        if seconds < 1e-3
        else f"{seconds * 1e3:.2f} ms"
        if seconds < 1
        else f"{seconds:.2f} s"
    )


def _spread(summary: dict[str, float] | None) -> str:
    if summary is None:
        return "-"
    return f"median {_duration(summary['median'])}, mean {_duration(summary['mean'])}, p99 {_duration(summary['p99'])}"


def _times(result: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("time to the first token", _spread(result["ttft_seconds"])),
        ("time of each further token", _spread(result["inter_token_seconds"])),
    ]


def _roofline(result: dict[str, Any]) -> list[tuple[str, str]]:
    r = result["roofline"]
    rates = f"{r['integer_gmacs']:.0f} integer and {r['float_gmacs']:.0f} float GMAC/s, {r['read_gbs']:.1f} GB/s read"
    return [
        (f"roofline, {r['threads']} threads, {r['kernels']}", rates),
        ("… would allow", f"{_duration(r['least_seconds'])}: reached {r['share']:.1%} of it"),
    ]


def _failures(result: dict[str, Any]) -> list[tuple[str, str]]:
    failed = result["failed_requests"]
    return [("requests that failed", f"{failed}: {result.get('first_error') or 'see the log'}")] if failed else []


def _print_table(rows: Sequence[Sequence[str]], *, header: bool = True) -> None:
    """Lines and colour on a terminal; plain columns elsewhere."""
    if not terminal.is_terminal(sys.stdout):
        print(terminal.table(rows))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*(rows[0] if header else ("", "")), show_header=header)
    for row in rows[1:] if header else rows:
        table.add_row(*row)
    for column in table.columns[2:]:
        column.justify = "right"
    Console(markup=False, highlight=False).print(table)


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Yields what to call for each of `total` parts that are done. Shown only on a terminal."""
    if not terminal.is_terminal(sys.stderr):
        yield lambda: None
        return
    from rich import progress
    from rich.console import Console

    columns = (progress.TextColumn(what), progress.BarColumn(), progress.MofNCompleteColumn())
    with progress.Progress(*columns, progress.TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def _writable(path: Path | None) -> None:
    """Finds out before minutes are spent measuring."""
    if path is None:
        return
    try:
        path.open("a", encoding="utf-8").close()
    except OSError as error:
        raise typer.BadParameter(f"--output-json: {error}") from error


def _write(path: Path | None, name: str, result: dict[str, Any]) -> None:
    if path is None:
        return
    from octavo.cli.info import machine

    whole = {"bench": name, "schema": SCHEMA, "machine": dict(machine()), **result}
    path.write_text(json.dumps(whole, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
