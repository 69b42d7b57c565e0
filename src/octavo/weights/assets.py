"""What a checkpoint carries for its tokenizer, handed to `octavo.tokenizer` as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class TokenizerAssets:
    """`kind` says where the tokenizer comes from, and so what the other fields hold.

    "hf": `tokenizer_json` is the bytes of tokenizer.json (None: the folder has none); `config` is
    tokenizer_config.json ({} if absent), with the keys of special_tokens_map.json added where it lacks them.
    "gguf": `tokenizer_json` is None; `config` is every `tokenizer.*` metadata entry by its full key: strings as str,
    arrays of strings as lists, arrays of numbers as NumPy arrays ({} if the file has none).
    `chat_template` is the model's Jinja source: chat_template.jinja before tokenizer_config.json's "default".
    What an entry is (a list of strings, an integer, …) is checked when it is read; the tokenizer checks what it says.
    """

    kind: Literal["hf", "gguf"]
    tokenizer_json: bytes | None
    config: Mapping[str, Any]
    chat_template: str | None
