"""The golden vocabularies of tests/golden/tokenizer, as the metadata a GGUF file would carry. No import of octavo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "golden" / "tokenizer"
PRE_TOKENIZERS = ["smollm", "gpt-2", "llama-bpe", "qwen2", "default"]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def load(name: str) -> Any:
    return json.loads((FOLDER / name).read_text())


def byte_level_metadata(pre: str) -> dict[str, Any]:
    """The vocabulary of byte_level.json under one of the pre-tokenizers."""
    tokenizer = load("byte_level.json")
    added = {token["content"]: token for token in tokenizer["added_tokens"]}
    texts = {i: text for text, i in tokenizer["model"]["vocab"].items()}
    texts |= {token["id"]: token["content"] for token in added.values()}
    tokens = [texts[i] for i in range(len(texts))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            (CONTROL if added[t]["special"] else USER_DEFINED) if t in added else NORMAL for t in tokens
        ],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def sentencepiece_metadata(add_space_prefix: bool) -> dict[str, Any]:
    pieces = load("sentencepiece_pieces.json")["pieces"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece for piece, _, _ in pieces],
        "tokenizer.ggml.scores": [float(score) for _, score, _ in pieces],
        "tokenizer.ggml.token_type": [kind for _, _, kind in pieces],
        "tokenizer.ggml.add_space_prefix": add_space_prefix,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def gguf_vocabularies() -> dict[str, dict[str, Any]]:
    named = {f"gguf_{pre}": byte_level_metadata(pre) for pre in PRE_TOKENIZERS}
    named["gguf_sentencepiece"] = sentencepiece_metadata(True)
    named["gguf_sentencepiece_no_prefix"] = sentencepiece_metadata(False)
    return named
