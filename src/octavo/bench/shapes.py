"""The shapes whose kernels are measured: those of a model as the executor runs it, or SmolLM2-135M's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.executor.lowering import lower
from octavo.limits import MAX_STEP_ROWS
from octavo.program.program import Program
from octavo.weights.precision import kernel_formats
from octavo.weights.tensor import Tensor

HEAD_ROWS = 64  # kHeadRows of native/executor.cpp


@dataclass(frozen=True, slots=True)
class Matrix:
    """n outputs, k inputs. count: how many the model has of it. format: None for shapes without weights. most_rows: how
    many the executor multiplies at once."""

    name: str
    n: int
    k: int
    count: int = 1
    format: str | None = None
    most_rows: int = MAX_STEP_ROWS


@dataclass(frozen=True, slots=True)
class Shapes:
    name: str
    matrices: tuple[Matrix, ...]
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int


SMOLLM2 = Shapes(
    "SmolLM2-135M's shapes",
    (
        Matrix("q+k+v", 960, 576, 30),
        Matrix("o", 576, 576, 30),
        Matrix("gate+up", 3072, 576, 30),
        Matrix("down", 576, 1536, 30),
        Matrix("lm_head", 49_152, 576, 1, most_rows=HEAD_ROWS),
    ),
    hidden=576,
    heads=9,
    kv_heads=3,
    head_dim=64,
    vocab_size=49_152,
)


def shapes_of(name: str, program: Program, tensors: Mapping[str, Tensor], weights: str = "auto") -> Shapes:
    """What one step of the model multiplies by: matrices that are run together count as one."""
    formats = kernel_formats(tensors, weights)
    found: Counter[Matrix] = Counter()
    heads, most_rows = 0, MAX_STEP_ROWS
    for instruction in lower(program, formats, fusion=True).instructions:
        if instruction.kind == "linear":
            packed = [part[0] for part in instruction.args["parts"]]
            names = [tensor for weight in packed for tensor in weight.tensors]
            k = tensors[names[0]].shape[1]
            n = sum(tensors[tensor].shape[0] for tensor in names)
            found[Matrix("+".join(map(_short, names)), n, k, format=formats[names[0]], most_rows=most_rows)] += 1
        elif instruction.kind == "attention":
            heads = instruction.args["heads"]
        elif instruction.kind == "select":
            most_rows = HEAD_ROWS
    matrices = tuple(replace(matrix, count=count) for matrix, count in found.items())
    hidden = program.widths[program.ops[0].output]
    return Shapes(name, matrices, hidden, heads, program.kv_heads, program.head_dim, program.vocab_size)


def _short(tensor: str) -> str:
    """q of model.layers.0.self_attn.q_proj.weight."""
    module = tensor.removesuffix(".weight").rpartition(".")[2]
    return "lm_head" if module == "embed_tokens" else module.removesuffix("_proj")
