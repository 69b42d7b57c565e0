"""From the options of an engine to an engine, in whatever process it is to run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.engine.core import Engine, EngineConfig
from octavo.engine.loader import LoadedModel, load_model
from octavo.engine.memory import MemoryPlan, plan_memory
from octavo.errors import InvalidParameterError
from octavo.executor.native import KV_DTYPES, NativeExecutor, kv_block_bytes


@dataclass(frozen=True, slots=True)
class OpenedEngine:
    model: LoadedModel
    memory: MemoryPlan
    executor: NativeExecutor
    engine: Engine

    def info(self) -> dict[str, Any]:
        """What runs here: CPU, kernels, model facts, memory plan."""
        from octavo import _native

        config, executor = self.model.checkpoint.config, self.executor
        macs_per_token, macs_per_logits = self.model.program.macs()
        return {
            "model": self.model.name,
            "path": str(self.model.path),
            "architecture": config.architecture,
            "layers": config.layers,
            "hidden_size": config.hidden_size,
            "heads": config.heads,
            "kv_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "vocab_size": config.vocab_size,
            "context": config.context,
            "macs_per_token": macs_per_token,  # multiply-adds of the matrices, see Program.macs
            "macs_per_logits": macs_per_logits,
            "weights": dict(executor.weight_formats),
            "weight_bytes": executor.weight_bytes,
            "kv_dtype": executor.kv_dtype,
            "kv_memory": self.memory.describe(),
            "num_blocks": self.memory.num_blocks,
            "block_bytes": self.memory.block_bytes,
            "max_model_len": self.memory.max_model_len,
            "threads": executor.threads,
            "kernels": executor.kernels,
            "arithmetic": executor.arithmetic,
            "cpu": _native.cpu_features(),
        }


def open_engine(
    model: str,
    *,
    revision: str | None,
    weights: str,
    kv_dtype: str,
    kv_memory: int | str | None,
    max_model_len: int | None,
    threads: int | None,
    kernels: str,
    fusion: bool,
    cascade: bool,
    policy: str,
    max_num_seqs: int,
    inter_token_target: float,
    chunk_size: int | None,
    jump_forward: bool = True,
    enable_prefix_caching: bool = True,
) -> OpenedEngine:
    """The arguments are `LLM`'s. Raises what loading a model raises, InvalidParameterError and CapacityError."""
    if kv_dtype not in KV_DTYPES:
        raise InvalidParameterError("kv_dtype", kv_dtype, "f16, f32 or int8")
    loaded = load_model(model, revision=revision)
    checkpoint, program = loaded.checkpoint, loaded.program
    memory = plan_memory(
        kv_block_bytes(program, kv_dtype),
        checkpoint.config.context,
        weight_bytes=sum(tensor.data.nbytes for tensor in checkpoint.tensors.values()),
        kv_memory=kv_memory,
        max_model_len=max_model_len,
    )
    executor = NativeExecutor(
        program,
        checkpoint.tensors,
        num_blocks=memory.num_blocks,
        weights=weights,
        kv_dtype=kv_dtype,
        threads=threads,
        kernels=kernels,
        fusion=fusion,
        cascade=cascade,
    )
    checkpoint.release_pages()  # all weights are packed: their file need not stay in memory
    config = EngineConfig(
        max_model_len=memory.max_model_len,
        max_num_seqs=max_num_seqs,
        max_rows=executor.max_rows,
        policy=policy,
        inter_token_target=inter_token_target,
        chunk_size=chunk_size,
        jump_forward=jump_forward,
        enable_prefix_caching=enable_prefix_caching,
    )
    return OpenedEngine(loaded, memory, executor, Engine(executor, loaded.tokenizer, loaded.eos_token_ids, config))
