"""Which page builds which architecture. To add a model: write its page, name it here."""

from __future__ import annotations

from collections.abc import Callable

from octavo.errors import UnsupportedModelError
from octavo.models.config import ModelConfig
from octavo.models.llama import llama
from octavo.models.qwen2 import qwen2
from octavo.models.qwen3 import qwen3
from octavo.program.program import Program

PAGES: dict[str, Callable[[ModelConfig], Program]] = {"llama": llama, "qwen2": qwen2, "qwen3": qwen3}


def build_program(config: ModelConfig) -> Program:
    """The program of `config`'s architecture; its weights are named as in the Hugging Face checkpoint."""
    page = PAGES.get(config.architecture)
    if page is None:
        known = ", ".join(sorted(PAGES))
        raise UnsupportedModelError(f"architecture {config.architecture!r} is not supported; supported: {known}")
    return page(config)
