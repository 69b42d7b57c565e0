"""Environments for real clients whose dependencies do not belong beside ours: made once, kept under build/."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

BUILD = Path(__file__).parents[2] / "build"


def client_python(name: str, *packages: str) -> Path:
    """The Python of an environment that has `packages`; made again if it was left half made or wants others now."""
    folder = BUILD / f"{name}-client"
    found, ready = folder / "bin" / "python", folder / "ready"
    made_for = "\n".join([sys.version, *packages])
    if not ready.exists() or ready.read_text() != made_for:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(found), "-m", "pip", "install", "--disable-pip-version-check", "-q", *packages]
        subprocess.run(pip, check=True)
        ready.write_text(made_for)
    return found
