"""The compiler did not undo the work: hot loops of the kernels keep their vectors in registers.

Reads the disassembly of the installed development build, which keeps its symbols. What may lie on the stack, and why,
is listed; anything else fails, and so does a loop that can't be found.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from octavo import _native
from tests.support.disassembly import HotLoop, compiler_of, functions, hot_loops

MODULE = Path(_native.__file__)
TABLES = [name for name in _native.kernel_names() if name != "scalar" and not name.startswith("faulty-")]
# Of an instruction set's namespace, or a template over it. Exponentials (soften_span) are not among them: their many
# constants may well be read from the stack.
INSTRUCTION_SET = re.compile(r"octavo::(avx2|avx512|amx)::")
KERNEL = re.compile(
    r"::(linear|linear_in|one_row|many_rows|(unpacked_)?tile|pair|score\w*|add_values\w*|update_\w+|attention)[<(]"
)

# (function, most multiply-adds in the loop, most stores in it, reason); everything else: none.
ACCEPTED = (
    (
        r"avx2::.*(tile<\(octavo::Format\)4, [34], 1>|linear\()",
        160,
        76,
        "GCC reads the activations of a block early; rolled loops need none of it, and are a quarter slower",
    ),
    (
        r"avx2::.*tile<\(octavo::Format\)3, [1-4], [14]>",
        264,
        14,
        "twice as many integer sums as outputs fit no 16 registers; once a block of 64 inputs",
    ),
    (
        r"amx::.*pair<",
        36,
        35,
        "no spills: 32 rows of sums are more than there are registers, so they are kept in memory",
    ),
)
_UNKNOWN_COMPILER_STORES = 0.25  # for each multiply-add


def accepted_stores(loop: HotLoop) -> int:
    return max(
        (
            stores
            for pattern, multiply_adds, stores, _ in ACCEPTED
            if re.search(pattern, loop.function) and loop.multiply_adds <= multiply_adds
        ),
        default=0,
    )


@pytest.fixture(scope="module")
def loops() -> list[HotLoop]:
    if shutil.which("objdump") is None:
        pytest.fail("objdump is missing; it comes with binutils, which every compiler here brings")
    found = [
        loop
        for name, body in functions(MODULE)
        if INSTRUCTION_SET.search(name) and KERNEL.search(name)
        for loop in hot_loops(name, body)
    ]
    if TABLES and not found:
        pytest.fail(f"{MODULE} names no kernels: it is not a development build, or it was stripped (see the Makefile)")
    return found


def test_hot_loops_of_every_table_are_found(loops: list[HotLoop]) -> None:
    def largest(table: str, kernel: str) -> int:
        mine = [loop for loop in loops if re.search(rf"octavo::{table}::.*({kernel})", loop.function)]
        return max((loop.multiply_adds for loop in mine), default=0)

    for table in TABLES:
        assert largest(table, "tile|pair|linear|rows") >= 8, table
    if "avx2" in TABLES:
        assert largest("avx2", "score|update|attention") >= 8
        assert largest("avx2", "add_values|update|attention") >= 8


def test_hot_loops_keep_their_vectors_in_registers(loops: list[HotLoop]) -> None:
    """Of GCC, for whose code the list was made, loop by loop; of another compiler, that no loop spills much."""
    compiler = compiler_of(MODULE)
    if compiler.startswith("GCC"):
        bad = [loop for loop in loops if loop.spills > accepted_stores(loop)]
    else:
        bad = [loop for loop in loops if loop.spills > _UNKNOWN_COMPILER_STORES * loop.multiply_adds]
    assert not bad, f"built by {compiler}:\n" + "\n".join(map(str, bad))


def test_every_exception_is_still_needed(loops: list[HotLoop]) -> None:
    if not compiler_of(MODULE).startswith("GCC"):
        return  # the list was made for GCC's code
    for pattern, multiply_adds, stores, reason in ACCEPTED:
        mine = [loop for loop in loops if re.search(pattern, loop.function) and loop.multiply_adds <= multiply_adds]
        assert max((loop.spills for loop in mine), default=0) == stores, f"{pattern}: {reason}"


SOURCE = """
#include <immintrin.h>
extern "C" void kernel(const float* w, const float* x, float* y, long n) {{
  __m256 acc[{accumulators}];
  #pragma GCC unroll 32
  for (int i = 0; i < {accumulators}; ++i) acc[i] = _mm256_setzero_ps();
  for (long k = 0; k < n; ++k, w += 8, x += {accumulators}) {{
    const __m256 v = _mm256_loadu_ps(w);
    #pragma GCC unroll 32
    for (int i = 0; i < {accumulators}; ++i) acc[i] = _mm256_fmadd_ps(v, _mm256_broadcast_ss(x + i), acc[i]);
  }}
  #pragma GCC unroll 32
  for (int i = 0; i < {accumulators}; ++i) _mm256_storeu_ps(y + 8 * i, acc[i]);
}}
"""


@pytest.mark.skipif("avx2" not in TABLES, reason="the controls are written for AVX2")
def test_spills_are_seen_where_there_must_be_some_and_only_there(tmp_path: Path) -> None:
    """20 accumulators do not fit 16 registers; 8 do."""
    spills = {}
    for accumulators in (8, 20):
        source, binary = tmp_path / "kernel.cpp", tmp_path / f"kernel{accumulators}.o"
        source.write_text(SOURCE.format(accumulators=accumulators))
        compiler = os.environ.get("CXX", "c++").split()
        subprocess.run([*compiler, "-O3", "-mavx2", "-mfma", "-c", str(source), "-o", str(binary)], check=True)
        (body,) = [body for name, body in functions(binary) if name == "kernel"]
        (loop,) = [loop for loop in hot_loops("kernel", body) if loop.multiply_adds >= accumulators]
        spills[accumulators] = loop.spills
    assert spills[8] == 0
    assert spills[20] >= 4
