"""What a model page needs to know, the same for every file format."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.program.program import Rope


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: str  # "llama", "qwen2", "qwen3": a page in octavo.models
    vocab_size: int  # rows of the embedding: the width of the logits
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    context: int  # longest sequence the model was made for
    tie_embeddings: bool
    attention_bias: bool = False  # q, k, v have a bias (Qwen2)
    output_bias: bool = False  # o has a bias
    mlp_bias: bool = False
