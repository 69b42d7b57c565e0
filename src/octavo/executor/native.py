"""The native executor: packs the weights, lowers the program, and runs steps in C++ on its own thread team."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from octavo import _native
from octavo.errors import EngineClosedError, InvalidParameterError
from octavo.executor.interface import F32, Batch, SamplingRows, StepResult
from octavo.executor.lowering import Lowered, Packed, assign_buffers, lower
from octavo.executor.threads import default_threads
from octavo.limits import BLOCK_TOKENS, MAX_STEP_ROWS
from octavo.program.program import Program
from octavo.program.rope import scale_frequencies
from octavo.weights.dequantise import dequantise
from octavo.weights.precision import kernel_formats
from octavo.weights.tensor import Tensor

_TOKEN_BYTES = {"f16": (2, 0), "f32": (4, 0), "int8": (1, 4)}  # of K or V in a head: each element, and a scale
KV_DTYPES = tuple(_TOKEN_BYTES)
ARITHMETIC = "octavo-cpu-2"


def kv_block_bytes(program: Program, kv_dtype: str) -> int:
    """Bytes of one block of 16 tokens: keys and values of every layer."""
    if kv_dtype not in KV_DTYPES:
        raise InvalidParameterError("kv_dtype", kv_dtype, "f16, f32 or int8")
    element, scale = _TOKEN_BYTES[kv_dtype]
    return program.layers * program.kv_heads * 2 * BLOCK_TOKENS * (program.head_dim * element + scale)


class NativeExecutor:
    """Implements `Executor` on the CPU. One step at a time; use after fork() raises EngineClosedError.

    kernels: "auto", or one of `octavo._native.kernel_names()`. For tests, as they change no bit:
    fusion=False runs every operation on its own, cascade=False reads a prefix that sequences share for each of them.
    """

    def __init__(
        self,
        program: Program,
        tensors: Mapping[str, Tensor],
        *,
        num_blocks: int,
        weights: str = "auto",
        kv_dtype: str = "f16",
        max_rows: int = 512,
        threads: int | None = None,
        kernels: str = "auto",
        fusion: bool = True,
        cascade: bool = True,
    ) -> None:
        kv_block_bytes(program, kv_dtype)
        if not 1 <= max_rows <= MAX_STEP_ROWS:
            raise InvalidParameterError("max_rows", max_rows, f"1 to {MAX_STEP_ROWS}")
        if kernels != "auto" and kernels not in _native.kernel_names():
            raise InvalidParameterError("kernels", kernels, f"auto, {', '.join(_native.kernel_names())}")
        self.threads = default_threads() if threads is None else threads
        if isinstance(self.threads, bool) or not isinstance(self.threads, int) or not 1 <= self.threads <= 256:
            raise InvalidParameterError("threads", threads, "1 to 256")
        self.program = program
        self.kv_dtype = kv_dtype
        self.max_rows = max_rows
        self.fusion = fusion
        self.cascade = cascade
        self._num_blocks = num_blocks
        self._pid = os.getpid()

        packing = _Packing(tensors, weights, self.threads)
        lowered = lower(program, packing.formats, fusion=fusion)
        plan = _build_plan(lowered, packing)
        self.weight_bytes = packing.nbytes
        self.weight_formats = packing.used_formats
        self._native: Any = _native.Executor(
            plan,
            layers=program.layers,
            kv_heads=program.kv_heads,
            head_dim=program.head_dim,
            kv_dtype=kv_dtype,
            num_blocks=num_blocks,
            max_rows=max_rows,
            threads=self.threads,
            cascade=cascade,
            kernels=kernels,
        )
        self.kernels: str = self._native.kernels

    @property
    def arithmetic(self) -> str:
        return ARITHMETIC

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def vocab_size(self) -> int:
        return self.program.vocab_size

    def step(self, batch: Batch, sampling: SamplingRows) -> StepResult:
        return StepResult(*self._run(batch, sampling, False))

    def logits(self, batch: Batch, sampling: SamplingRows) -> F32:
        """Runs a step and returns the raw logits [R, vocab] of its logit rows. For tests."""
        logits: F32 = self._run(batch, sampling, True)[-1]
        return logits

    def _run(self, batch: Batch, sampling: SamplingRows, want_logits: bool) -> tuple[Any, ...]:
        """The fields of a StepResult, and behind them the logits if they are wanted."""
        native = self._usable()
        try:
            result: tuple[Any, ...] = native.step(
                batch.token_ids,
                batch.positions,
                batch.sequence_rows,
                batch.block_tables,
                batch.block_offsets,
                batch.logit_rows,
                batch.block_ops,
                sampling.scalars,
                sampling.position,
                sampling.edits,
                want_logits,
            )
        except ValueError:
            self._usable()  # another thread may have closed it in the meantime: then that is the error
            raise
        return result

    def export_block(self, block: int) -> bytes:
        data: bytes = self._usable().export_block(block)
        return data

    def import_block(self, block: int, data: bytes) -> None:
        self._usable().import_block(block, data)

    def close(self) -> None:
        """Waits for a step that another thread has begun; whoever comes later gets EngineClosedError."""
        native, self._native = self._native, None
        if native is not None and os.getpid() == self._pid:
            native.close()

    def _usable(self) -> Any:
        if os.getpid() != self._pid:
            raise EngineClosedError("an engine can't be used after fork(): make a new one in the child process")
        if self._native is None:
            raise EngineClosedError("the engine is closed")
        return self._native


class _Packing:
    """Packs tensors into kernel layouts, each once."""

    def __init__(self, tensors: Mapping[str, Tensor], weights: str, threads: int) -> None:
        self._tensors = tensors
        self.formats = kernel_formats(tensors, weights)
        self._threads = threads
        self._packed: dict[Packed, Any] = {}
        self.nbytes = 0
        self.used_formats: dict[str, int] = {}  # kernel format → bytes

    def matrix(self, packed: Packed) -> Any:
        if packed not in self._packed:
            parts = []
            for name in packed.tensors:
                t = self._tensors[name]
                parts.append((t.data, t.encoding, t.shape[0], t.shape[1], t.row_order))
            format = self.formats[packed.tensors[0]]
            weight = _native.pack(parts, format, packed.interleave, self._threads)
            self._packed[packed] = weight
            self.nbytes += weight.nbytes
            self.used_formats[format] = self.used_formats.get(format, 0) + weight.nbytes
        return self._packed[packed]

    def vector(self, name: str) -> F32:
        return np.ascontiguousarray(dequantise(self._tensors[name]).reshape(-1), dtype=np.float32)


def _build_plan(lowered: Lowered, packing: _Packing) -> Any:
    plan = _native.Plan()
    where, buffers = assign_buffers(lowered)
    for width, quantised in buffers:
        plan.buffer(width, quantised)
    for rope in lowered.ropes:
        frequencies = _native.rope_frequencies(rope.theta, rope.rotary_dim)
        plan.rope_table(np.array(scale_frequencies(frequencies, rope), dtype=np.float64))
    for instruction in lowered.instructions:
        args = instruction.args
        reads = [where[value] for value in instruction.reads]
        writes = [where[value] for value in instruction.writes]
        match instruction.kind:
            case "embed":
                plan.embed(packing.matrix(args["table"]), writes[0])
            case "rms_norm":
                dst, qdst = (-1, writes[0]) if args["quantise"] else (writes[0], -1)
                plan.rms_norm(reads[0], packing.vector(args["weight"]), args["heads"], args["eps"], dst, qdst)
            case "quantise":
                plan.quantise(reads[0], writes[0])
            case "linear":
                parts = [
                    (packing.matrix(weight), None if bias is None else packing.vector(bias), where[output])
                    for weight, bias, output in args["parts"]
                ]
                src, qsrc = (-1, reads[0]) if instruction.reads[0] in lowered.quantised else (reads[0], -1)
                residual = -1 if args["residual"] is None else where[args["residual"]]
                plan.linear(src, qsrc, parts, args["epilogue"], residual)
            case "rope" | "rope_store":
                targets = [(where[value], heads) for value, heads in args["targets"]]
                if instruction.kind == "rope":
                    plan.rope(targets, args["head_dim"], args["rope"])
                else:
                    k, v = where[args["k"]], where[args["v"]]
                    plan.rope_store(targets, args["head_dim"], args["rope"], k, v, args["layer"])
            case "kv_store":
                plan.kv_store(where[args["k"]], where[args["v"]], args["layer"])
            case "attention":
                plan.attention(
                    reads[0], writes[0], args["layer"], args["heads"], args["scale"], args["window"], args["soft_cap"]
                )
            case "add":
                plan.add(reads[0], reads[1], writes[0])
            case "silu_mul":
                plan.silu_mul(reads[0], reads[1], writes[0])
            case "select":
                plan.select(reads[0], writes[0])
    plan.logits(where[lowered.output])
    return plan
