"""Makes the golden files of tests/parity and tests/quality with transformers (the `parity` extra).

    python -m tests.parity.make_golden [--into FOLDER] [--smollm2 FILE.gguf]

FOLDER (default: tests/parity/golden) gets, for each tiny model: model.safetensors, config.json, model.gguf, golden.npz
(token ids and transformers' logits); blocks.npz (random blocks of every GGUF encoding and their values from the `gguf`
package); smollm2.npz (logits of the real model and its perplexity on tests/quality/text.txt, float32 on its
dequantised weights).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from tests.parity import tiny_models

GOLDEN = Path(__file__).parent / "golden"
TEXT = Path(__file__).parent.parent / "quality" / "text.txt"
TEXT_TOKENS = 4000
COLUMNS = 512  # logits kept of a row of the real model, beside its extremes
ENCODINGS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


def make_tiny(name: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model = tiny_models.build(name)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tiny_models.write_gguf(name, model, folder / "model.gguf")
    ids = tiny_models.token_ids(name)
    np.savez_compressed(folder / "golden.npz", token_ids=ids, logits=tiny_models.logits(model, ids))


def make_blocks(path: Path) -> None:
    """Random bytes decode to every corner of a block format; only the fp16 scales are kept to sane values."""
    import gguf

    rng = np.random.default_rng(7)
    arrays: dict[str, np.ndarray] = {}
    halves = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q6_K": [208]}
    for encoding in ENCODINGS:
        kind = gguf.GGMLQuantizationType[encoding]
        size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        blocks = 4 * (256 // size if size > 1 else 16)
        data = rng.integers(0, 256, (blocks, block_bytes), dtype=np.uint8)
        if size == 1:
            floats = rng.standard_normal((blocks,)).astype(np.float32)
            data = gguf.quants.quantize(floats, kind).view(np.uint8).reshape(blocks, block_bytes)
        for at in halves.get(encoding, [0, 2] if encoding in ("Q4_K", "Q5_K") else []):
            scale = (rng.standard_normal(blocks) * 0.05).astype(np.float16)
            data[:, at : at + 2] = scale.view(np.uint8).reshape(blocks, 2)
        typed = data.reshape(-1).view({"F32": np.float32, "F16": np.float16}.get(encoding, np.uint8))
        arrays[f"{encoding.lower()}.data"] = data.reshape(-1)
        arrays[f"{encoding.lower()}.values"] = gguf.quants.dequantize(typed, kind).reshape(-1)
    np.savez_compressed(path, **arrays)


def make_smollm2(gguf_file: Path, path: Path) -> None:
    import torch
    import transformers

    where = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = np.array(tokenizer(TEXT.read_text(encoding="utf-8"))["input_ids"], dtype=np.int32)[:TEXT_TOKENS]
    if len(ids) < TEXT_TOKENS:
        raise SystemExit(f"{TEXT} has {len(ids)} tokens, {TEXT_TOKENS} are needed")

    logits = tiny_models.logits(model, ids[: tiny_models.TOKENS])
    columns = np.sort(np.random.default_rng(3).choice(logits.shape[1], COLUMNS, replace=False)).astype(np.int32)
    np.savez_compressed(
        path,
        text_ids=ids,
        columns=columns,
        logits=logits[:, columns],
        highest=logits.max(axis=1),
        lowest=logits.min(axis=1),
        best=logits.argmax(axis=1).astype(np.int32),
        perplexity=np.float64(_perplexity(model, ids)),
    )


def _perplexity(model: Any, ids: np.ndarray) -> float:
    """exp of the mean negative log-probability of each token after the first, one sequence, in pieces of 250 rows."""
    import torch

    tokens = torch.from_numpy(ids.astype(np.int64))
    past, total = None, 0.0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, 250):
            stop = min(start + 250, len(ids) - 1)
            out = model(tokens[None, start:stop], past_key_values=past, use_cache=True)
            past = out.past_key_values
            logprobs = torch.log_softmax(out.logits[0].double(), dim=-1)
            total -= float(logprobs[torch.arange(stop - start), tokens[start + 1 : stop + 1]].sum())
    return float(np.exp(total / (len(ids) - 1)))


def make_all(into: Path, smollm2: Path) -> None:
    into.mkdir(parents=True, exist_ok=True)
    for name in tiny_models.MODELS:
        make_tiny(name, into / name)
    make_blocks(into / "blocks.npz")
    make_smollm2(smollm2, into / "smollm2.npz")


def smollm2_file() -> Path:
    from octavo.weights.sources import resolve_model

    return resolve_model("smollm2")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Makes the golden files of tests/parity with transformers.")
    parser.add_argument("--into", type=Path, default=GOLDEN)
    parser.add_argument("--smollm2", type=Path, help="the default model's GGUF (default: pulled by octavo)")
    arguments = parser.parse_args()
    make_all(arguments.into, arguments.smollm2 or smollm2_file())
