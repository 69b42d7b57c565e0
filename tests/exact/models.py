"""The models of the exactness suite: the real one, and tiny ones for the formats and architectures it does not have."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from pathlib import Path

import numpy as np

from octavo.tokenizer import Tokenizer
from octavo.weights.assets import TokenizerAssets
from octavo.weights.checkpoint import load_checkpoint
from octavo.weights.sources import resolve_model

from .machine import Model

GOLDEN = Path(__file__).parent.parent / "parity" / "golden"


@lru_cache
def smollm2(kv_dtype: str = "f16") -> Model:
    checkpoint = load_checkpoint(resolve_model("smollm2"))
    tokenizer = Tokenizer.from_assets(checkpoint.tokenizer, checkpoint.config.vocab_size)
    eos = checkpoint.eos_token_ids | frozenset(tokenizer.eos_ids)
    return Model(f"smollm2-{kv_dtype}", checkpoint, tokenizer, kv_dtype=kv_dtype, eos=eos)


def tiny(name: str, *, weights: str = "f32", kv_dtype: str = "f16") -> Model:
    """A random model of tests/parity/golden; its tokenizer is one byte a token."""
    checkpoint = load_checkpoint(GOLDEN / name)
    return Model(f"{name}-{weights}-{kv_dtype}", checkpoint, byte_tokenizer(), weights, kv_dtype, frozenset({0}))


def as_bf16(model: Model) -> Model:
    """The same model with its weights rounded to bf16."""
    tensors = {}
    for name, tensor in model.checkpoint.tensors.items():
        upper = tensor.data.view(np.uint16)[1::2]
        tensors[name] = dataclasses.replace(tensor, encoding="bf16", data=np.ascontiguousarray(upper).view(np.uint8))
    checkpoint = dataclasses.replace(model.checkpoint, tensors=tensors)
    return dataclasses.replace(model, name=model.name + "-bf16", checkpoint=checkpoint)


@lru_cache(maxsize=1)
def byte_tokenizer() -> Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    assets = TokenizerAssets(kind="hf", tokenizer_json=backend.to_str().encode(), config={}, chat_template=None)
    return Tokenizer.from_assets(assets, 4096)
