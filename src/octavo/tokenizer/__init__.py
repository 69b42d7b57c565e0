"""Text to token ids and back: tokenizers from tokenizer.json or GGUF metadata, streaming decode, chat templates."""

from __future__ import annotations

from octavo.tokenizer.detokenizer import IncrementalDetokenizer
from octavo.tokenizer.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer", "Tokenizer"]
