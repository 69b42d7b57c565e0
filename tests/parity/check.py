"""`make parity`: remakes the golden files with PyTorch and transformers, compares them with the committed ones, then
runs the parity tests and the quality table on them.

    python -m tests.parity.check
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from octavo.weights.checkpoint import load_checkpoint
from octavo.weights.dequantise import dequantise
from tests.parity.make_golden import GOLDEN, make_all, smollm2_file
from tests.parity.tiny_models import MODELS
from tests.quality import perplexity

LOGITS_BOUND = 5e-6  # of their range: another machine's BLAS adds in another order
PERPLEXITY_BOUND = 1e-4


def compare_model(name: str, fresh: Path) -> list[str]:
    problems = []
    for file in ("", "model.gguf"):
        kept, made = load_checkpoint(GOLDEN / name / file), load_checkpoint(fresh / name / file)
        if kept.config != made.config:
            problems.append(f"{name}/{file}: config {made.config}, kept is {kept.config}")
        for key, tensor in kept.tensors.items():
            if not np.array_equal(dequantise(tensor), dequantise(made.tensors[key])):
                problems.append(f"{name}/{file}: {key} differs")
    return problems


def compare_arrays(file: str, fresh: Path) -> list[str]:
    problems = []
    with np.load(GOLDEN / file) as kept, np.load(fresh / file) as made:
        if kept.files != made.files:
            return [f"{file}: holds {made.files}, kept is {kept.files}"]
        for key in kept.files:
            a, b = kept[key], made[key]
            if key in ("logits", "highest", "lowest"):
                span = kept["logits"].max() - kept["logits"].min()
                equal = a.shape == b.shape and np.abs(a - b).max() <= LOGITS_BOUND * span
            elif key == "perplexity":
                equal = abs(a / b - 1) <= PERPLEXITY_BOUND
            else:
                equal = np.array_equal(a, b)
            if not equal:
                problems.append(f"{file}: {key} differs from the kept array")
    return problems


def main() -> int:
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        make_all(fresh, smollm2_file())
        for name in MODELS:
            problems += compare_model(name, fresh)
        for file in (*(f"{name}/golden.npz" for name in MODELS), "blocks.npz", "smollm2.npz"):
            problems += compare_arrays(file, fresh)
    for problem in problems:
        print(problem)
    print(f"golden files: {'differ' if problems else 'as kept'}", flush=True)
    tests = subprocess.run([sys.executable, "-m", "pytest", str(GOLDEN.parent)], check=False).returncode
    quality = perplexity.main(["--requantise"])
    return int(bool(problems or tests or quality))


if __name__ == "__main__":
    sys.exit(main())
