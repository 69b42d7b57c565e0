"""Names of the weights: how GGUF's map to Hugging Face's, and the order of rotated rows."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
ROPE_FACTORS = "rope_freqs.weight"

_GGUF_TOP = {"token_embd.weight": EMBEDDING, "output_norm.weight": "model.norm.weight", "output.weight": HEAD}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_BLOCK = re.compile(r"blk\.(\d{1,4})\.([a-z_]+)\.(weight|bias)")
# Tables of rotary frequencies that old exporters wrote; they are computed from the config instead.
_HARMLESS = re.compile(r"(model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq)|(blk\.\d+\.attn_rot_embd\.weight)")


def canonical_name(gguf_name: str) -> str | None:
    """GGUF's name as Hugging Face's; None when there is no such weight in the supported models."""
    if gguf_name in _GGUF_TOP:
        return _GGUF_TOP[gguf_name]
    match = _GGUF_BLOCK.fullmatch(gguf_name)
    if match is None or match[2] not in _GGUF_LAYER:
        return None
    return f"model.layers.{int(match[1])}.{_GGUF_LAYER[match[2]]}.{match[3]}"


def is_harmless(name: str) -> bool:
    """Whether a tensor that no page reads may be ignored."""
    return _HARMLESS.fullmatch(name) is not None


def rotary_row_order(heads: int, head_dim: int) -> npt.NDArray[np.int32]:
    """GGUF's llama q and k rows are interleaved for a pairwise rotation; a rotation of halves needs them back.

    The converter wrote row (head, half, i) at (head, i, half); model row r is file row `result[r]`. Shape
    (heads * head_dim,).
    """
    order = np.arange(heads * head_dim, dtype=np.int32).reshape(heads, head_dim // 2, 2)
    return np.ascontiguousarray(order.swapaxes(1, 2)).reshape(-1)
