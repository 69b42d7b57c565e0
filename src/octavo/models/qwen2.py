"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases on q, k and v."""

from __future__ import annotations

from octavo.models.config import ModelConfig
from octavo.program.graph import Graph
from octavo.program.program import Program


def qwen2(config: ModelConfig) -> Program:
    g = Graph()
    q_width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
    x = g.embed("model.embed_tokens", config.vocab_size, config.hidden_size)
    for layer in range(config.layers):
        w = f"model.layers.{layer}"
        h = g.rms_norm(x, f"{w}.input_layernorm", config.norm_eps)
        q = g.linear(h, f"{w}.self_attn.q_proj", q_width, bias=True)
        k = g.linear(h, f"{w}.self_attn.k_proj", kv_width, bias=True)
        v = g.linear(h, f"{w}.self_attn.v_proj", kv_width, bias=True)
        q, k = g.rope(q, config.heads, config.rope), g.rope(k, config.kv_heads, config.rope)
        a = g.attention(q, k, v, layer=layer, heads=config.heads, kv_heads=config.kv_heads)
        x = g.add(x, g.linear(a, f"{w}.self_attn.o_proj", config.hidden_size))

        h = g.rms_norm(x, f"{w}.post_attention_layernorm", config.norm_eps)
        gate = g.linear(h, f"{w}.mlp.gate_proj", config.intermediate_size)
        up = g.linear(h, f"{w}.mlp.up_proj", config.intermediate_size)
        x = g.add(x, g.linear(g.silu_mul(gate, up), f"{w}.mlp.down_proj", config.hidden_size))
    x = g.rms_norm(g.select(x), "model.norm", config.norm_eps)
    return g.output(g.linear(x, "model.embed_tokens" if config.tie_embeddings else "lm_head", config.vocab_size))
