"""From a model's name to everything an engine needs of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octavo.errors import UnsupportedModelError
from octavo.models.registry import build_program
from octavo.program.program import Program
from octavo.tokenizer import Tokenizer
from octavo.weights.checkpoint import Checkpoint, load_checkpoint
from octavo.weights.known import find_known
from octavo.weights.sources import resolve_model


@dataclass(frozen=True, slots=True)
class LoadedModel:
    name: str
    path: Path
    checkpoint: Checkpoint
    program: Program
    tokenizer: Tokenizer

    @property
    def recommended_sampling(self) -> dict[str, float | int]:
        """The authors' values by SamplingParams names: what the files say, over what is known of a known model."""
        known = find_known(self.name)
        return {**(known.sampling if known is not None else {}), **self.checkpoint.generation_defaults}

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end an output: those the configs name, and the tokenizer's own end-of-turn tokens."""
        return self.checkpoint.eos_token_ids | frozenset(self.tokenizer.eos_ids)


def load_model(name: str, *, revision: str | None = None) -> LoadedModel:
    """Fetches the model if need be, and opens it. Raises the errors of octavo.weights, in plain words."""
    path = resolve_model(name, revision=revision)
    checkpoint = load_checkpoint(path)
    program = build_program(checkpoint.config)
    try:
        tokenizer = Tokenizer.from_assets(checkpoint.tokenizer, checkpoint.config.vocab_size)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{path}: {error}") from None
    return LoadedModel(str(name), path, checkpoint, program, tokenizer)
