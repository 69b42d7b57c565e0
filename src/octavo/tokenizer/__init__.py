"""Text to token ids and back: tokenizers from tokenizer.json or GGUF metadata, streaming decode, chat templates."""

from __future__ import annotations

from .detokenizer import IncrementalDetokenizer
from .tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer", "Tokenizer"]
