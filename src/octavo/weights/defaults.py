"""What a checkpoint says beside its weights: tokenizer assets, end tokens, sampling defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from octavo import limits
from octavo.errors import ModelFileError
from octavo.weights.assets import TokenizerAssets
from octavo.weights.fields import shown
from octavo.weights.gguf import GGUFFile
from octavo.weights.strict_json import read_bytes, read_object_if_present

_HF_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty")
_GGUF_DEFAULTS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def hf_assets(folder: Path) -> TokenizerAssets:
    config_path = folder / "tokenizer_config.json"
    config = read_object_if_present(config_path)
    for key, value in read_object_if_present(folder / "special_tokens_map.json").items():
        config.setdefault(key, value)
    tokenizer_path = folder / "tokenizer.json"
    return TokenizerAssets(
        kind="hf",
        tokenizer_json=read_bytes(tokenizer_path) if tokenizer_path.exists() else None,
        config=config,
        chat_template=_hf_chat_template(folder, config_path, config),
    )


def _hf_chat_template(folder: Path, config_path: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config.json's chat_template: a string, or named ones of which "default"."""
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            return _bounded_template(file, read_bytes(file, 4 * limits.MAX_TEMPLATE_CHARS).decode("utf-8"))
        except UnicodeDecodeError:
            raise ModelFileError(file, "is not valid UTF-8") from None
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict) and _hashable(item)}
        value = named.get("default") or (next(iter(named.values())) if len(named) == 1 else None)
    if value is None:
        return None
    return _bounded_template(config_path, value)


def _hashable(item: Mapping[str, Any]) -> bool:
    return isinstance(item.get("name"), str)


def _bounded_template(path: Path, value: object) -> str:
    if not isinstance(value, str):
        raise ModelFileError(path, f"chat_template={shown(value)} is not allowed: a string")
    if len(value) > limits.MAX_TEMPLATE_CHARS:
        most = limits.MAX_TEMPLATE_CHARS
        raise ModelFileError(path, f"has a chat template of {len(value)} characters, at most {most} are allowed")
    return value


def gguf_assets(file: GGUFFile) -> TokenizerAssets:
    config = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
    for key, value in config.items():
        _check_kind(file.path, key, value)
    template = config.get("tokenizer.chat_template")
    return TokenizerAssets(
        kind="gguf",
        tokenizer_json=None,
        config=config,
        chat_template=None if template is None else _bounded_template(file.path, template),
    )


def _check_kind(path: Path, key: str, value: object) -> None:
    """That a tokenizer's entry is of the kind its key stands for; the tokenizer itself checks what it says."""
    name = key.removeprefix("tokenizer.ggml.")
    if name in ("tokens", "merges"):
        fits, allowed = isinstance(value, list), "an array of strings"
    elif name == "token_type":
        fits, allowed = isinstance(value, np.ndarray) and value.dtype.kind in "iu", "an array of integers"
    elif name == "scores":
        fits, allowed = isinstance(value, np.ndarray) and value.dtype.kind == "f", "an array of floats"
    elif name in ("model", "pre"):
        fits, allowed = isinstance(value, str), "a string"
    elif name.endswith("_token_id"):
        fits, allowed = type(value) is int, "a token id"
    elif name.startswith("add_") or name == "remove_extra_whitespaces":
        fits, allowed = isinstance(value, bool), "a boolean"
    else:
        return
    if not fits:
        raise ModelFileError(path, f"{key}={shown(value)} is not allowed: {allowed}")


def hf_token_ids(
    sources: Sequence[tuple[Path, Mapping[str, Any]]], vocab_size: int
) -> tuple[frozenset[int], int | None]:
    """(all end tokens, the begin token of the first source that names one). Ids outside the vocabulary never occur."""
    eos: set[int] = set()
    bos: int | None = None
    for path, values in sources:
        value = values.get("eos_token_id")
        for item in value if isinstance(value, list) else [value]:
            token = _token_id(path, "eos_token_id", item, vocab_size)
            if token is not None:
                eos.add(token)
        if bos is None:
            bos = _token_id(path, "bos_token_id", values.get("bos_token_id"), vocab_size)
    return frozenset(eos), bos


def gguf_token_ids(file: GGUFFile, vocab_size: int) -> tuple[frozenset[int], int | None]:
    """End of sequence, of turn and of message all end an answer."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, (list, np.ndarray)) and len(tokens) > vocab_size:
        raise ModelFileError(file.path, f"has {len(tokens)} tokens but an embedding of only {vocab_size} rows")
    ids: dict[str, int | None] = {}
    for name in ("bos", "eos", "eot", "eom"):
        key = f"tokenizer.ggml.{name}_token_id"
        ids[name] = _token_id(file.path, key, file.metadata.get(key), vocab_size)
    ends = (ids["eos"], ids["eot"], ids["eom"])
    return frozenset(token for token in ends if token is not None), ids["bos"]


def _token_id(path: Path, key: str, value: object, vocab_size: int) -> int | None:
    if value is None:
        return None
    if type(value) is not int:
        raise ModelFileError(path, f"{key}={shown(value)} is not allowed: a token id")
    return value if 0 <= value < vocab_size else None


def hf_generation_defaults(path: Path, values: Mapping[str, Any]) -> dict[str, float | int]:
    """Empty when the model asks for greedy decoding by do_sample=false: its other values then have no effect."""
    if values.get("do_sample") is False:
        penalty = values.get("repetition_penalty")
        return {} if penalty is None else {"repetition_penalty": _plain_number(path, "repetition_penalty", penalty)}
    return {key: _plain_number(path, key, values[key]) for key in _HF_DEFAULTS if values.get(key) is not None}


def gguf_generation_defaults(file: GGUFFile) -> dict[str, float | int]:
    return {
        name: _plain_number(file.path, key, file.metadata[key])
        for key, name in _GGUF_DEFAULTS.items()
        if key in file.metadata
    }


def _plain_number(path: Path, key: str, value: object) -> float | int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e9:
        raise ModelFileError(path, f"{key}={shown(value)} is not allowed: a number")
    return value
