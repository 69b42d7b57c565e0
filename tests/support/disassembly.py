"""Reads `objdump -d`: the hot loops of functions, and the vector registers that they keep on the stack.

A loop is what lies between a backward jump and its target. A loop is hot when it multiplies and adds vectors; an
instruction belongs to the smallest loop around it, so a small inner loop (of prefetches, say) does not hide the
spills of the hot one around it.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FUNCTION = re.compile(r"^[0-9a-f]+ <(.+)>:$")
_INSTRUCTION = re.compile(r"^\s+([0-9a-f]+):\t(\S+)\s*(.*)$")
_MULTIPLY_ADD = re.compile(r"^v(fn?m(add|sub)\d+p[sd]|pmadd(ubsw|wd)|pdpbusds?)$|^tdpb[us][us]d$")
_VECTOR = re.compile(r"%[yz]mm\d+")  # xmm may hold a pair of integers, which compilers move so
_TARGET = re.compile(r"^([0-9a-f]+) <")


@dataclass(frozen=True, slots=True)
class Instruction:
    address: int
    mnemonic: str
    operands: str

    @property
    def multiplies(self) -> bool:
        return bool(_MULTIPLY_ADD.match(self.mnemonic))

    def jump_target(self) -> int | None:
        match = _TARGET.match(self.operands) if self.mnemonic.startswith("j") else None
        return int(match.group(1), 16) if match else None


@dataclass(frozen=True, slots=True)
class HotLoop:
    """One loop of a function: its multiply-adds, and vector registers stored to and read from the stack in it."""

    function: str
    begin: int
    end: int
    multiply_adds: int
    spills: int
    reloads: int

    def __str__(self) -> str:
        return (
            f"{self.function} at {self.begin:x}–{self.end:x}: {self.multiply_adds} multiply-adds, "
            f"{self.spills} vector registers stored to the stack, {self.reloads} read from it"
        )


def functions(binary: Path) -> Iterator[tuple[str, list[Instruction]]]:
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", "-M", "att", str(binary)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    name, body = "", []
    for line in text.splitlines():
        if match := _INSTRUCTION.match(line):
            body.append(Instruction(int(match.group(1), 16), match.group(2), match.group(3)))
        elif match := _FUNCTION.match(line):
            if body:
                yield name, body
            name, body = match.group(1), []
    if body:
        yield name, body


def hot_loops(name: str, body: list[Instruction]) -> list[HotLoop]:
    loops = [
        (target, instruction.address)
        for instruction in body
        if (target := instruction.jump_target()) is not None and body[0].address <= target <= instruction.address
    ]
    loops = sorted({(begin, max(e for b, e in loops if b == begin)) for begin, _ in loops}, key=lambda x: x[1] - x[0])
    stack = _stack_operand(body)
    counts: dict[tuple[int, int], list[int]] = {loop: [0, 0, 0] for loop in loops}
    for instruction in body:
        loop = next((loop for loop in loops if loop[0] <= instruction.address <= loop[1]), None)
        if loop is None:
            continue
        count = counts[loop]
        count[0] += instruction.multiplies
        if _VECTOR.search(instruction.operands) and (match := stack.search(instruction.operands)):
            stored = match.end() == len(instruction.operands) and instruction.mnemonic.startswith("vmov")
            count[1 if stored else 2] += 1
    return [HotLoop(name, *loop, *count) for loop, count in counts.items() if count[0] > 0]


def _stack_operand(body: list[Instruction]) -> re.Pattern[str]:
    """rbp is the stack's only where the function makes it the frame pointer; else it may hold any address."""
    framed = any(i.mnemonic == "mov" and i.operands == "%rsp,%rbp" for i in body[:40])
    return re.compile(r"-?(0x[0-9a-f]+)?\(%(rsp|rbp)[^)]*\)" if framed else r"-?(0x[0-9a-f]+)?\(%rsp[^)]*\)")


def compiler_of(binary: Path) -> str:
    """What the compiler wrote into the binary, e.g. "GCC: (Debian 12.2.0-14) 12.2.0"."""
    text = subprocess.run(["readelf", "-p", ".comment", str(binary)], capture_output=True, text=True, check=True).stdout
    return "; ".join(re.findall(r"\]\s+(.+)", text))
