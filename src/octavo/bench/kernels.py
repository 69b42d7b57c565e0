"""`octavo bench kernels`: each kernel in the executor's own steps, beside what the hardware could do at most.

The roofline and all measurements of a group are taken in turn, round by round, so that they see the same machine.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from octavo.bench import programs
from octavo.bench.roofline import Roofline, RooflineProbe
from octavo.bench.shapes import SMOLLM2, Matrix, Shapes
from octavo.errors import InvalidParameterError
from octavo.executor.native import KV_DTYPES, NativeExecutor, kv_block_bytes
from octavo.limits import BLOCK_TOKENS, MAX_STEP_ROWS

FORMATS = ("q4", "q8", "f16", "bf16", "f32")
PARTS = ("linear", "attention", "norm", "sampler")
ROWS = (1, 2, 4, 8, 32, 128, 512)
# (sequences, rows of each, context): decode, then a prefill
_ATTENTION = ((1, 1, 128), (1, 1, 1024), (1, 1, 4096), (8, 1, 1024), (32, 1, 128), (32, 1, 1024), (1, 512, 512))

# A model's matrices come from the last cache or from memory: so many bytes are read before the first comes again.
WORKING_SET = 24 << 20
_BYTES_PER_WEIGHT = {"q4": 0.625, "q8": 1.0625, "f16": 2.0, "bf16": 2.0, "f32": 4.0}


class Kernel(NamedTuple):
    """One kernel at one size. rows: of the step. context: tokens a query sees, for attention."""

    part: str
    name: str
    format: str
    rows: int
    context: int | None = None


@dataclass(frozen=True, slots=True)
class KernelResult:
    """seconds: of one call on all threads (the sampler: one row on one thread), median and best of the rounds; None
    when it was lost in the machine's noise.

    gmacs: 10⁹ multiply-adds a second, gbs: 10⁹ bytes of weights or KV read a second, at the median. share: the time the
    roofline of the same rounds allows, divided by the median; more than 1 when a cache is faster than memory.
    """

    kernel: Kernel
    seconds: float | None = None
    best_seconds: float | None = None
    gmacs: float | None = None
    gbs: float | None = None
    share: float | None = None


@dataclass(frozen=True, slots=True)
class KernelBench:
    """What is to be measured. formats: None for those of `shapes`, or all where it has none."""

    shapes: Shapes = SMOLLM2
    formats: Sequence[str] | None = None
    rows: Sequence[int] = ROWS
    parts: Sequence[str] = PARTS
    rounds: int = 5

    def __post_init__(self) -> None:
        _listed("parts", self.parts, PARTS)
        if self.formats is not None:
            _listed("formats", self.formats, FORMATS)
        if not self.rows or any(type(m) is not int or not 1 <= m <= MAX_STEP_ROWS for m in self.rows):
            raise InvalidParameterError("rows", list(self.rows), f"integers from 1 to {MAX_STEP_ROWS}")
        if type(self.rounds) is not int or not 1 <= self.rounds <= 1000:
            raise InvalidParameterError("rounds", self.rounds, "1 to 1000")


def run(
    bench: KernelBench, probe: RooflineProbe, report: Callable[[list[KernelResult]], None] = lambda results: None
) -> tuple[list[KernelResult], list[Roofline]]:
    """Measures group by group; `report` gets each group's results. Returns them all, and each group's roofline."""
    results: list[KernelResult] = []
    rooflines: list[Roofline] = []
    for group in groups(bench, probe):
        with group:
            probe.reset()
            found = group.measure(probe, bench.rounds)
        rooflines.append(probe.result())
        results += found
        report(found)
    return results, rooflines


def best_of(rooflines: Sequence[Roofline]) -> Roofline:
    """The best rate of each kind."""
    return Roofline(
        max(roofline.integer_gmacs for roofline in rooflines),
        max(roofline.float_gmacs for roofline in rooflines),
        max(roofline.read_gbs for roofline in rooflines),
        rooflines[0].threads,
        rooflines[0].kernels,
    )


def group_count(bench: KernelBench) -> int:
    linears = sum(len(_formats(bench, matrix)) for matrix in bench.shapes.matrices)
    sizes = {"linear": linears, "attention": len(KV_DTYPES), "norm": 1, "sampler": 1}
    return sum(sizes[part] for part in set(bench.parts))


def groups(bench: KernelBench, probe: RooflineProbe) -> Iterator[Group]:
    shapes = bench.shapes
    if "linear" in bench.parts:
        for matrix in shapes.matrices:
            for format in _formats(bench, matrix):
                yield linear_group(matrix, format, bench.rows, probe)
    if "attention" in bench.parts:
        for kv_dtype in KV_DTYPES:
            yield attention_group(shapes, kv_dtype, _ATTENTION, probe)
    if "norm" in bench.parts:
        yield norm_group(shapes.hidden, bench.rows, probe)
    if "sampler" in bench.parts:
        yield sampler_group(shapes.vocab_size, probe)


@dataclass(slots=True)
class Timed:
    """A step that runs its kernel `calls` times, and one like it that doesn't, whose time is subtracted."""

    kernel: Kernel
    step: Callable[[], object]
    empty: Callable[[], object]
    calls: int
    macs: float = 0.0  # of one call
    read_bytes: float = 0.0
    quantised: bool = True


@dataclass(slots=True)
class Group:
    timed: list[Timed] = field(default_factory=list)
    owned: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.owned.close()

    def executor(self, bench: programs.Bench, num_blocks: int, probe: RooflineProbe, **options: Any) -> NativeExecutor:
        executor = NativeExecutor(
            bench.program,
            bench.tensors,
            num_blocks=num_blocks,
            weights=bench.weights,
            fusion=bench.fusion,
            max_rows=MAX_STEP_ROWS,
            threads=probe.threads,
            kernels=probe.kernels,
            **options,
        )
        return self.owned.enter_context(closing(executor))

    def measure(self, probe: RooflineProbe, rounds: int) -> list[KernelResult]:
        steps: list[list[float]] = [[] for _ in self.timed]
        empties: list[list[float]] = [[] for _ in self.timed]
        for timed in self.timed:  # once before it counts: pages are touched, caches and threads are warm
            timed.step()
            timed.empty()
        for _ in range(rounds):
            probe.read()
            for i, timed in enumerate(self.timed):
                probe.compute()
                empties[i].append(seconds_of(timed.empty))
                steps[i].append(seconds_of(timed.step))
        roofline = probe.result()
        return [_result(timed, steps[i], empties[i], roofline) for i, timed in enumerate(self.timed)]


def bytes_of(n: int, k: int, format: str) -> float:
    """Of a packed matrix [n, k]: whole panels of 16 outputs, and of a quantised one whole groups of inputs."""
    return _BYTES_PER_WEIGHT[format] * (math.ceil(n / 16) * 16) * (_whole_groups(k) if _quantised(format) else k)


def _whole_groups(k: int) -> int:
    return math.ceil(k / 32) * 32


def _quantised(format: str) -> bool:
    return format.startswith("q")


def seconds_of(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _result(timed: Timed, steps: list[float], empties: list[float], roofline: Roofline) -> KernelResult:
    rest = min(empties)  # its noise belongs to no kernel
    seconds, best = (statistics.median(steps) - rest) / timed.calls, (min(steps) - rest) / timed.calls
    if best <= 0:
        return KernelResult(timed.kernel)
    if not timed.macs:
        return KernelResult(timed.kernel, seconds, best)
    return KernelResult(
        timed.kernel,
        seconds,
        best,
        gmacs=timed.macs / seconds / 1e9,
        gbs=timed.read_bytes / seconds / 1e9,
        share=roofline.least_seconds(timed.macs, timed.read_bytes, quantised=timed.quantised) / seconds,
    )


def _runner(executor: NativeExecutor, rows: Sequence[int], contexts: Sequence[int]) -> Callable[[], object]:
    batch, sampling = programs.batch(rows, contexts)
    return lambda: executor.step(batch, sampling)


def linear_group(
    matrix: Matrix, format: str, rows: Sequence[int], probe: RooflineProbe, working_set: int | None = None
) -> Group:
    """The matrix times so many rows each; as many copies of it as fill the working set, one after another."""
    size = bytes_of(matrix.n, matrix.k, format)
    copies = math.ceil((working_set or WORKING_SET) / size)
    group = Group()
    rows = [m for m in rows if m <= matrix.most_rows] or [matrix.most_rows]
    most = max(rows)
    k = _whole_groups(matrix.k) if _quantised(format) else matrix.k  # the kernels pad the last group
    executor = group.executor(programs.linears(matrix.n, k, format, copies), most, probe)
    empty = group.executor(programs.empty(), most, probe)
    for m in rows:
        group.timed.append(
            Timed(
                Kernel("linear", f"{matrix.name} {matrix.n}×{matrix.k}", format, m),
                _runner(executor, [1] * m, [1] * m),
                _runner(empty, [1] * m, [1] * m),
                copies,
                macs=float(matrix.n * matrix.k * m),
                read_bytes=size,
                quantised=_quantised(format),
            )
        )
    return group


def attention_group(
    shapes: Shapes,
    kv_dtype: str,
    sizes: Sequence[tuple[int, int, int]],
    probe: RooflineProbe,
    working_set: int | None = None,
) -> Group:
    """Attention with the storing of the new K and V; sizes: (sequences, rows of each, context)."""
    group = Group()
    empty = group.executor(programs.empty(), max(count * rows for count, rows, _ in sizes), probe)
    one = programs.attentions(shapes.heads, shapes.kv_heads, shapes.head_dim, 1)
    block_bytes = kv_block_bytes(one.program, kv_dtype)
    for count, rows, context in sizes:
        blocks = count * math.ceil(context / BLOCK_TOKENS)
        layers = min(max(math.ceil((working_set or WORKING_SET) / (blocks * block_bytes)), 1), 32)
        bench = programs.attentions(shapes.heads, shapes.kv_heads, shapes.head_dim, layers)
        executor = group.executor(bench, blocks, probe, kv_dtype=kv_dtype)
        _fill(executor, blocks)
        first = context - rows  # row i sees first + i + 1 tokens
        seen = count * (rows * first + rows * (rows + 1) / 2)
        name = "attention, decode" if rows == 1 else "attention, prefill"
        group.timed.append(
            Timed(
                Kernel("attention", f"{name} of {count}", kv_dtype, count * rows, context),
                _runner(executor, [rows] * count, [context] * count),
                _runner(empty, [1] * (count * rows), [1] * (count * rows)),
                layers,
                macs=2.0 * seen * shapes.heads * shapes.head_dim,
                read_bytes=float(blocks * block_bytes),
                quantised=False,
            )
        )
    return group


def _fill(executor: NativeExecutor, blocks: int) -> None:
    """Random K and V in every block: those of one are computed, and copied to the others."""
    executor.step(*programs.batch([BLOCK_TOKENS], [BLOCK_TOKENS]))
    copies = np.array([(block, 0, BLOCK_TOKENS) for block in range(1, blocks)], dtype=np.int32).reshape(-1, 3)
    executor.step(*programs.batch([1], [BLOCK_TOKENS], copies))


def norm_group(width: int, rows: Sequence[int], probe: RooflineProbe) -> Group:
    """RMSNorm and quantisation in one pass, as in front of a quantised linear."""
    copies = 128
    group = Group()
    normed, plain = (
        group.executor(programs.norms(width, copies, normed=normed), max(rows), probe) for normed in (True, False)
    )
    for m in rows:
        kernel = Kernel("norm", f"norm + quantise {width}", "f32", m)
        step, empty = (_runner(executor, [1] * m, [1] * m) for executor in (normed, plain))
        group.timed.append(Timed(kernel, step, empty, copies))
    return group


def sampler_group(vocab_size: int, probe: RooflineProbe) -> Group:
    from octavo import _native
    from octavo.params import SamplingParams
    from octavo.sampling import SamplerState, build_rows, resolve

    choices = {
        "greedy": SamplingParams(temperature=0.0),
        "top-p": SamplingParams(temperature=0.8, top_p=0.95, seed=1),
        "top-k 50, top-p": SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=1),
    }
    count = 8
    logits = np.random.default_rng(1).standard_normal((count, vocab_size), dtype=np.float32) * np.float32(3.0)
    group = Group()
    for name, params in choices.items():
        resolved = resolve(
            params, prompt_len=1, vocab_size=vocab_size, context_len=64, eos_ids=frozenset(), encode=lambda text: []
        )
        states = [SamplerState(resolved, [0], n) for n in range(count)]
        rows = build_rows([state.scalars for state in states], [1] * count, [None] * count, vocab_size)

        def sample(rows: Any = rows) -> object:
            return _native.sample(logits, rows, probe.kernels)

        group.timed.append(Timed(Kernel("sampler", f"sampler {vocab_size}, {name}", "f32", 1), sample, int, count))
    return group


def _formats(bench: KernelBench, matrix: Matrix) -> Sequence[str]:
    if bench.formats is not None:
        return bench.formats
    return FORMATS if matrix.format is None else (matrix.format,)


def _listed(name: str, values: Sequence[str], allowed: Sequence[str]) -> None:
    if not values or any(value not in allowed for value in values):
        raise InvalidParameterError(name, list(values), f"any of {', '.join(allowed)}")
