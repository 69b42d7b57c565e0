"""How commands get an engine. Tests put a scripted one in its place."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from octavo.cli.options import EngineOptions

if TYPE_CHECKING:
    from octavo.engine.llm import LLM


def open_engine(options: EngineOptions) -> LLM:
    """Pulls the model when it is not there yet, and loads it."""
    from octavo.engine.llm import LLM

    return LLM(**{field.name: getattr(options, field.name) for field in fields(options)})
