"""A model as it lies on disk, checked whole: config, weights by canonical name, tokenizer assets, defaults."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from octavo.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from octavo.models.config import ModelConfig
from octavo.models.registry import build_program
from octavo.weights.assets import TokenizerAssets
from octavo.weights.defaults import (
    gguf_assets,
    gguf_generation_defaults,
    gguf_token_ids,
    hf_assets,
    hf_generation_defaults,
    hf_token_ids,
)
from octavo.weights.gguf import ENCODINGS, read_gguf
from octavo.weights.gguf_config import parse_gguf_config
from octavo.weights.hf_config import parse_hf_config
from octavo.weights.mapped import release_pages
from octavo.weights.names import (
    EMBEDDING,
    HEAD,
    ROPE_FACTORS,
    canonical_name,
    is_harmless,
    rotary_row_order,
)
from octavo.weights.safetensors import read_safetensors_folder
from octavo.weights.strict_json import read_object, read_object_if_present
from octavo.weights.tensor import Tensor

_ENCODINGS = frozenset(encoding for encoding, _, _ in ENCODINGS.values())
_FLOAT = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class Checkpoint:
    """`tensors` holds exactly the weights `config` calls for, by Hugging Face name, each with the shape it must have.

    Tied embeddings: there is no lm_head.weight, the head is model.embed_tokens.weight. `generation_defaults`: the
    model's own sampling values under their SamplingParams names, unchecked but numbers.
    """

    path: Path
    source: str  # what it is, for people: "GGUF v3 (q4_1)" or "safetensors (bf16)"
    config: ModelConfig
    tensors: Mapping[str, Tensor]
    tokenizer: TokenizerAssets
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    generation_defaults: Mapping[str, float | int]

    @property
    def chat_template(self) -> str | None:
        return self.tokenizer.chat_template

    def release_pages(self) -> None:
        """Gives back the memory that the weights' mapped files take; call once the weights are packed."""
        release_pages(tensor.data for tensor in self.tensors.values())

    @cached_property
    def digest(self) -> str:
        """SHA-256 over config and all weights, as hex: equal for equal models, however they are split in files.

        Reads every byte (0.1 to 0.3 s for 100 MB), so it is computed when first asked for.
        """

        def one(name: str) -> bytes:
            tensor = self.tensors[name]
            inner = hashlib.sha256(f"{name}\n{tensor.encoding}\n{tensor.shape}\n".encode())
            if tensor.row_order is not None:
                inner.update(tensor.row_order.astype("<i4").tobytes())
            inner.update(tensor.data.data)
            return inner.digest()

        whole = hashlib.sha256(repr(self.config).encode())
        with ThreadPoolExecutor(2) as pool:
            for part in pool.map(one, sorted(self.tensors)):
                whole.update(part)
        return whole.hexdigest()


def load_checkpoint(path: str | Path) -> Checkpoint:
    """A .gguf file, or a folder with config.json and safetensors (or with a single .gguf).

    Raises ModelNotFoundError (no such path), ModelFileError (damaged), UnsupportedModelError (refused by name).
    """
    path = Path(path)
    try:
        return _load(path)
    except OSError as error:
        raise ModelFileError(path, f"cannot be read: {error.strerror or error}") from None


def _load(path: Path) -> Checkpoint:
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if (path / "config.json").exists() or not ggufs:
            return _load_hf(path)
        if len(ggufs) > 1:
            names = ", ".join(file.name for file in ggufs[:8])
            raise ModelFileError(path, f"holds several GGUF files, name one of them: {names}")
        path = ggufs[0]
    elif not path.exists():
        raise ModelNotFoundError(f"{path}: no such file or folder")
    elif path.suffix in (".safetensors", ".json"):
        raise ModelFileError(path, f"is one file of a Hugging Face model; give its folder, {path.parent}")
    return _load_gguf(path)


def _load_gguf(path: Path) -> Checkpoint:
    file = read_gguf(path)
    config = parse_gguf_config(file)
    tensors: dict[str, Tensor] = {}
    for name, tensor in file.tensors.items():
        canonical = canonical_name(name)
        if canonical is None:
            if name != ROPE_FACTORS and not is_harmless(name):
                raise UnsupportedModelError(f"{path}: tensor {name!r:.200} is not used by {config.architecture}")
            continue
        if canonical in tensors:
            raise ModelFileError(path, f"tensor {name!r:.200} occurs twice under different spellings")
        tensors[canonical] = Tensor(canonical, tensor.encoding, tensor.shape, tensor.data)
    tensors = _check_tensors(path, config, tensors)
    if config.architecture == "llama":
        tensors = _unpermuted(config, tensors)
    assets = gguf_assets(file)
    eos, bos = gguf_token_ids(file, config.vocab_size)
    return Checkpoint(
        path=path,
        source=f"GGUF v{file.version} ({_main_encoding(tensors)})",
        config=config,
        tensors=tensors,
        tokenizer=assets,
        eos_token_ids=eos,
        bos_token_id=bos,
        generation_defaults=gguf_generation_defaults(file),
    )


def _load_hf(folder: Path) -> Checkpoint:
    config_path = folder / "config.json"
    if not config_path.exists():
        raise ModelFileError(folder, "has neither a config.json nor a .gguf file")
    raw = read_object(config_path)
    config = parse_hf_config(raw, config_path)
    tensors = _check_tensors(folder, config, read_safetensors_folder(folder))
    generation_path = folder / "generation_config.json"
    generation = read_object_if_present(generation_path)
    eos, bos = hf_token_ids([(config_path, raw), (generation_path, generation)], config.vocab_size)
    return Checkpoint(
        path=folder,
        source=f"safetensors ({_main_encoding(tensors)})",
        config=config,
        tensors=tensors,
        tokenizer=hf_assets(folder),
        eos_token_ids=eos,
        bos_token_id=bos,
        generation_defaults=hf_generation_defaults(generation_path, generation),
    )


def _check_tensors(path: Path, config: ModelConfig, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Exactly the expected tensors, each of the expected shape and of an encoding that is read."""
    found = {name: tensor for name, tensor in found.items() if not is_harmless(name)}
    # A config may claim a thousand layers: their shapes are listed only when the file could hold that many tensors.
    if 9 * config.layers > len(found):
        raise ModelFileError(path, f"has {len(found)} tensors, too few for {config.layers} layers")
    if config.tie_embeddings and HEAD in found:
        head, table = found.pop(HEAD), found.get(EMBEDDING)
        if table is None or head.encoding != table.encoding or not np.array_equal(head.data, table.data):
            raise UnsupportedModelError(f"{path}: {HEAD} differs from {EMBEDDING} though the config ties them")
    shapes = build_program(config).weight_shapes()
    for name, shape in shapes.items():
        tensor = found.get(name)
        if tensor is None:
            raise ModelFileError(path, f"lacks tensor {name!r:.200} of shape {shape}")
        if tensor.shape != shape:
            raise ModelFileError(path, f"tensor {name!r:.200} has shape {tensor.shape}, {shape} is expected")
        allowed = _ENCODINGS if len(shape) == 2 else _FLOAT
        if tensor.encoding not in allowed:
            names = " ".join(sorted(allowed))
            raise UnsupportedModelError(f"{path}: tensor {name!r:.200} is {tensor.encoding}; supported here: {names}")
    for name in found:
        if name not in shapes:
            raise UnsupportedModelError(
                f"{path}: tensor {name!r:.200} of shape {found[name].shape} is not used by "
                f"{config.architecture} with this config; ignoring it would change the result"
            )
    return {name: found[name] for name in shapes}


def _unpermuted(config: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    orders = {
        "q_proj": rotary_row_order(config.heads, config.head_dim),
        "k_proj": rotary_row_order(config.kv_heads, config.head_dim),
    }
    result = dict(tensors)
    for name, tensor in tensors.items():
        order = orders.get(name.split(".")[-2])
        if order is not None:
            result[name] = Tensor(name, tensor.encoding, tensor.shape, tensor.data, order)
    return result


def _main_encoding(tensors: Mapping[str, Tensor]) -> str:
    """The encoding that holds the most bytes outside the embedding."""
    sizes: dict[str, int] = {}
    for name, tensor in tensors.items():
        if name not in (EMBEDDING, HEAD):
            sizes[tensor.encoding] = sizes.get(tensor.encoding, 0) + tensor.data.size
    return max(sorted(sizes), key=lambda encoding: sizes[encoding])
