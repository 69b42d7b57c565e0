"""Native code reads what it is given and nothing beside it, wherever in memory that lies."""

from __future__ import annotations

import subprocess
import sys

from tests.support.llms import environment

# In a process of its own: a byte too far is a segmentation fault.
PROGRAM = """
import ctypes, mmap
import numpy as np
from octavo import _native
from octavo.bench.kernels import FORMATS
from octavo.params import SamplingParams
from octavo.sampling import SamplerState, build_rows, resolve
from octavo.weights.gguf import ENCODINGS

libc = ctypes.CDLL(None, use_errno=True)
PAGE, PAGES = mmap.PAGESIZE, 40


class Fenced:
    '''Memory between two pages that nobody may touch.'''

    def __init__(self):
        self.memory = mmap.mmap(-1, (PAGES + 2) * PAGE)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        for page in (begin, begin + (PAGES + 1) * PAGE):
            assert libc.mprotect(ctypes.c_void_p(page), PAGE, 0) == 0

    def holds(self, data, at_end):
        start = (PAGES + 1) * PAGE - data.nbytes if at_end else PAGE
        found = np.frombuffer(self.memory, data.dtype, data.size, start).reshape(data.shape)
        found[...] = data
        return found


def same(name, run, data):
    wanted = run(data.copy())
    for at_end in (False, True):
        assert run(fenced.holds(data, at_end)) == wanted, (name, at_end)


fenced, source, checked = Fenced(), np.random.default_rng(0), 0
if __import__("sys").argv[1:] == ["overrun"]:
    ctypes.string_at(fenced.holds(np.zeros(8, np.uint8), True).ctypes.data, 9)

for width in (*range(17, 40), 64, 67, 127, 255, 300, 4095, 4097):
    asked = [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_p=0.9, top_k=9, seed=1, logprobs=3)]
    facts = dict(prompt_len=1, vocab_size=width, context_len=64, eos_ids=frozenset(), encode=list)
    states = [SamplerState(resolve(params, **facts), [0], 0) for params in asked]
    rows = build_rows([state.scalars for state in states], [1, 1], [None, None], width)
    logits = source.standard_normal((2, width), dtype=np.float32)
    for kernels in ("scalar", "auto"):
        def draw(logits):
            return [part.tobytes() for part in _native.sample(logits, rows, kernels)]
        same(("sample", width, kernels), draw, logits)
        checked += 1

for encoding, elements, size in ENCODINGS.values():
    for count in (1, 3):
        for columns in {elements, 3 * elements, 32 if elements == 1 else elements, 96 if elements == 1 else elements}:
            if columns % 32:
                continue
            data = source.integers(0, 60, count * columns // elements * size).astype(np.uint8)
            for format in FORMATS:
                def pack(data):
                    return _native.pack([(data, encoding, count, columns, None)], format).unpack().tobytes()
                try:
                    pack(data)
                except ValueError:  # not every encoding goes into every format
                    continue
                same(("pack", encoding, format, count, columns), pack, data)
                checked += 1
print(checked)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment())


def test_i16_bits_do_not_depend_on_where_a_buffer_lies_and_nothing_beside_it_is_read() -> None:
    """Logits and weights of a file, which other code hands in; `make sanitize` is for the buffers between kernels."""
    ran = run()
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) > 100


def test_i16_the_fences_of_this_test_are_closed() -> None:
    assert run("overrun").returncode < 0
