"""Lowers a `Program` to the native executor's plan: which buffers, which instructions, which weights packed together.

With fusion, operations that touch the same data are done in one pass (norm + quantise, linears that share their input,
gate and up + SiLU, the residual addition, rope + KV store). Without it every operation is an instruction of its own.
The bits are the same: no sum changes its order (docs/arithmetic.md), and tests hold it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.errors import UnsupportedModelError
from octavo.program.program import Op, Program, Rope

QUANTISED = frozenset({"q8", "q4"})


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight of the plan: the tensors packed into it, in order; gate and up interleaved when `interleave`."""

    tensors: tuple[str, ...]
    interleave: bool = False


@dataclass(slots=True)
class Instruction:
    """One native instruction over value numbers (buffers are assigned later)."""

    kind: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    in_place: tuple[int, ...] = ()  # read values that, when they die here, may give their buffer to the output
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lowered:
    instructions: list[Instruction]
    widths: dict[int, int]  # of every value
    quantised: frozenset[int]  # the values that are quantised activations
    ropes: list[Rope]
    output: int


def lower(program: Program, formats: Mapping[str, str], *, fusion: bool) -> Lowered:
    """`formats`: the kernel format of each matrix by tensor name (f32 f16 bf16 q8 q4)."""
    return _Lowering(program, formats, fusion).run()


class _Lowering:
    def __init__(self, program: Program, formats: Mapping[str, str], fusion: bool) -> None:
        self.program = program
        self.formats = formats
        self.fusion = fusion
        self.producer = {op.output: op for op in program.ops}
        self.consumers: dict[int, list[Op]] = {}
        for op in program.ops:
            for value in op.inputs:
                self.consumers.setdefault(value, []).append(op)
        self.out: list[Instruction] = []
        self.widths = dict(enumerate(program.widths))
        self.quantised: dict[int, int] = {}  # value → its quantised twin
        self.alias: dict[int, int] = {}  # value computed in place → the value whose buffer holds it
        self.ropes: list[Rope] = []
        self.done: set[int] = set()  # outputs already emitted, or folded into another instruction

    def run(self) -> Lowered:
        if self.fusion:
            self._fold()
        for op in self.program.ops:
            if op.output not in self.done:
                getattr(self, f"_{op.kind}")(op)
        twins = frozenset(self.quantised.values())
        return Lowered(self.out, self.widths, twins, self.ropes, self._at(self.program.output))

    # What fusion folds away: operations done inside a later instruction.
    def _fold(self) -> None:
        for op in self.program.ops:
            if op.kind == "silu_mul" and self._interleaves(op):
                self.done.update(op.inputs)
            elif op.kind == "add" and self._adds_linear(op):
                self.done.add(op.inputs[1])
            elif op.kind == "rope" and self._goes_to_attention(op):
                self.done.add(op.output)

    def _interleaves(self, op: Op) -> bool:
        gate, up = (self.producer[value] for value in op.inputs)
        return (
            self.widths[op.output] % 8 == 0  # gate and up fill a panel, 8 outputs each
            and gate is not up
            and gate.kind == up.kind == "linear"
            and gate.inputs == up.inputs
            and self.formats[gate.weights[0]] == self.formats[up.weights[0]]
            and len(gate.weights) == len(up.weights) == 1
            and all(len(self.consumers[value]) == 1 for value in op.inputs)
        )

    def _adds_linear(self, op: Op) -> bool:
        a, b = op.inputs
        return a != b and self.producer[b].kind == "linear" and len(self.consumers[b]) == 1

    def _goes_to_attention(self, op: Op) -> bool:
        users = self.consumers[op.output]
        return len(users) == 1 and users[0].kind == "attention"

    # One method an operation.
    def _embed(self, op: Op) -> None:
        self._emit("embed", (), (op.output,), table=Packed(op.weights))

    def _rms_norm(self, op: Op) -> None:
        (x,) = op.inputs
        args = {"weight": op.weights[0], "eps": op.attrs["eps"], "heads": op.attrs["heads"]}
        if self.fusion and not op.attrs["heads"] and self._only_quantised_linears(op.output):
            self._emit("rms_norm", (x,), (self._twin(op.output),), quantise=True, **args)
        else:
            self._emit("rms_norm", (x,), (op.output,), in_place=(x,), quantise=False, **args)

    def _only_quantised_linears(self, value: int) -> bool:
        return all(
            user.kind == "linear" and self.formats[user.weights[0]] in QUANTISED for user in self.consumers[value]
        )

    def _linear(self, op: Op) -> None:
        siblings = [op]
        if self.fusion:
            siblings = [
                user
                for user in self.consumers[op.inputs[0]]
                if user.kind == "linear"
                and user.output not in self.done
                and self._is_quantised(user) == self._is_quantised(op)
            ]
        self._emit_linear(siblings, "store")
        self.done.update(user.output for user in siblings)

    def _silu_mul(self, op: Op) -> None:
        if op.inputs[0] in self.done and self.fusion and self._interleaves(op):
            gate, up = (self.producer[value] for value in op.inputs)
            weight = Packed((gate.weights[0], up.weights[0]), interleave=True)
            source = self._source(gate)
            self._emit(
                "linear", (source,), (op.output,), epilogue="silu_mul", parts=[(weight, None, op.output)], residual=None
            )
        else:
            self._emit("silu_mul", op.inputs, (op.output,), in_place=op.inputs)

    def _add(self, op: Op) -> None:
        if self.fusion and self._adds_linear(op):
            linear = self.producer[op.inputs[1]]
            self._emit_linear([linear], "add", residual=op.inputs[0], output=op.output)
        else:
            self._emit("add", op.inputs, (op.output,), in_place=op.inputs)

    def _rope(self, op: Op) -> None:
        self._rotate_in_place(op)
        target = (self._at(op.output), op.attrs["heads"])
        self._emit(
            "rope", (op.inputs[0],), (), targets=[target], head_dim=op.attrs["head_dim"], rope=self._rope_index(op)
        )

    def _attention(self, op: Op) -> None:
        q, k, v = op.inputs
        ropes = [self.producer[value] for value in (q, k) if self.producer[value].kind == "rope" and value in self.done]
        if ropes and self.fusion:
            if len({self._rope_index(rope) for rope in ropes}) != 1:
                raise UnsupportedModelError("queries and keys with different rotary embeddings")
            for rope in ropes:
                self._rotate_in_place(rope)
            targets = [(self._at(rope.output), rope.attrs["heads"]) for rope in ropes]
            self._emit(
                "rope_store", (q, k, v), (), targets=targets, head_dim=op.attrs["head_dim"],
                rope=self._rope_index(ropes[0]), k=self._at(k), v=self._at(v), layer=op.attrs["layer"],
            )  # fmt: skip
        else:
            self._emit("kv_store", (k, v), (), k=self._at(k), v=self._at(v), layer=op.attrs["layer"])
        names = ("layer", "heads", "scale", "window", "soft_cap")
        self._emit("attention", (q,), (op.output,), **{name: op.attrs[name] for name in names})

    def _select(self, op: Op) -> None:
        self._emit("select", op.inputs, (op.output,))

    # Helpers of the above.
    def _emit_linear(
        self, ops: list[Op], epilogue: str, residual: int | None = None, output: int | None = None
    ) -> None:
        source = self._source(ops[0])
        parts = []
        for op in ops:
            bias = op.weights[1] if len(op.weights) > 1 else None
            parts.append((Packed(op.weights[:1]), bias, op.output if output is None else output))
        reads = (source,) if residual is None else (source, residual)
        self._emit(
            "linear", reads, tuple(part[2] for part in parts), in_place=() if residual is None else (residual,),
            epilogue=epilogue, parts=parts, residual=None if residual is None else self._at(residual),
        )  # fmt: skip

    def _is_quantised(self, op: Op) -> bool:
        return self.formats[op.weights[0]] in QUANTISED

    def _source(self, op: Op) -> int:
        """The input of a linear in the form its weight wants; quantised at its first such use."""
        (value,) = op.inputs
        if not self._is_quantised(op):
            return value
        if value not in self.quantised:
            self._emit("quantise", (value,), (self._twin(value),))
        return self.quantised[value]

    def _twin(self, value: int) -> int:
        twin = len(self.widths)
        self.widths[twin] = self.widths[value]
        self.quantised[value] = twin
        return twin

    def _rotate_in_place(self, op: Op) -> None:
        if len(self.consumers[op.inputs[0]]) != 1:
            raise UnsupportedModelError("a value is used both before and after its rotary embedding")
        self.alias[op.output] = op.inputs[0]

    def _rope_index(self, op: Op) -> int:
        rope = op.attrs["rope"]
        if rope not in self.ropes:
            self.ropes.append(rope)
        return self.ropes.index(rope)

    def _at(self, value: int) -> int:
        while value in self.alias:
            value = self.alias[value]
        return value

    def _emit(
        self, kind: str, reads: tuple[int, ...], writes: tuple[int, ...], in_place: tuple[int, ...] = (), **args: Any
    ) -> None:
        reads, in_place = tuple(map(self._at, reads)), tuple(map(self._at, in_place))
        self.out.append(Instruction(kind, reads, writes, in_place, args))


def assign_buffers(lowered: Lowered) -> tuple[dict[int, int], list[tuple[int, bool]]]:
    """Gives each value a buffer; values that never live at the same time share one of equal width.

    Returns (value → buffer, [(width, quantised)]). The logits keep a buffer to themselves.
    """
    last_use: dict[int, int] = {}
    for index, instruction in enumerate(lowered.instructions):
        for value in (*instruction.reads, *instruction.writes):
            last_use[value] = index
    last_use[lowered.output] = len(lowered.instructions)

    buffers: list[tuple[int, bool]] = []
    free: list[int] = []
    where: dict[int, int] = {}
    for index, instruction in enumerate(lowered.instructions):
        dying = [value for value in dict.fromkeys(instruction.reads) if last_use[value] == index]
        free.extend(where[value] for value in dying if value in instruction.in_place)
        for value in instruction.writes:
            spec = (lowered.widths[value], value in lowered.quantised)
            reusable = [buffer for buffer in free if buffers[buffer] == spec and value != lowered.output]
            if reusable:
                where[value] = reusable[0]
                free.remove(reusable[0])
            else:
                where[value] = len(buffers)
                buffers.append(spec)
        free.extend(where[value] for value in dying if value not in instruction.in_place)
        free.extend(where[value] for value in instruction.writes if last_use[value] == index)
    return where, buffers
