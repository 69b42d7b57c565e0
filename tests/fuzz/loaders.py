"""Mutation fuzz of everything that reads a model's files: `python -m tests.fuzz.loaders --seconds 60`.

The promise: a damaged file either loads or gives an OctavoError with a readable message; never another exception, a
crash, a long wait or memory out of proportion. A case is its number: `--case 1234` runs that one again.
"""

from __future__ import annotations

import argparse
import collections
import json
import logging
import random
import struct
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from octavo.errors import OctavoError
from octavo.models.registry import build_program
from octavo.tokenizer import Tokenizer
from octavo.weights.checkpoint import load_checkpoint
from tests.fuzz.mutations import damage_bytes, damage_json, damage_metadata
from tests.support.gguf_writer import gguf_bytes
from tests.support.safetensors_writer import safetensors_bytes
from tests.support.tiny_files import GGUF_METADATA, HF_CONFIG, gguf_tensors, hf_weights

MOST_SECONDS = 5.0  # of CPU, for one case; a case takes some milliseconds
MOST_BYTES = 32 << 20  # of Python and NumPy memory at the peak of one case; the files have some 100 KB

_BYTE_LEVEL = ["!", "a", "b", "c", "ab", "abc", "<s>", "</s>", "Ġ", "Ġa"]


class Broken(Exception):
    """The promise does not hold for this case."""


def _tokenizer_json() -> bytes:
    vocab = {token: i for i, token in enumerate(_BYTE_LEVEL)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": 6, "content": "<s>", **special}, {"id": 7, "content": "</s>", **special}],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocab, "merges": [["a", "b"], ["ab", "c"], ["Ġ", "a"]]},
        }
    ).encode()


def _spm_metadata() -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(32)], "▁", "a", "b", "ab", "▁a"]
    kinds = [2, 3, 3, *[6] * 32, 1, 1, 1, 1, 1]
    return {
        **GGUF_METADATA,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.scores": np.linspace(0, -9, len(tokens), dtype=np.float32),
    }


def _folder() -> dict[str, bytes]:
    config = {
        **HF_CONFIG,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "layer_types": ["full_attention"] * 2,
    }
    names = sorted(hf_weights())
    weight_map = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
    files = {
        "config.json": json.dumps(config).encode(),
        "generation_config.json": json.dumps({"eos_token_id": [2, 3], "temperature": 0.7, "top_k": 20}).encode(),
        "tokenizer.json": _tokenizer_json(),
        "tokenizer_config.json": json.dumps(
            {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ messages[0]['content'] }}"}
        ).encode(),
        "special_tokens_map.json": json.dumps({"unk_token": "!"}).encode(),
        "model.safetensors.index.json": json.dumps({"metadata": {}, "weight_map": weight_map}).encode(),
    }
    for part in range(2):
        files[f"model-{part}.safetensors"] = safetensors_bytes({name: hf_weights()[name] for name in names[part::2]})
    return files


def _damage_safetensors(rng: random.Random, raw: bytes) -> bytes:
    """Half of the time the header stays JSON of the right length, so that what it says is put to the test."""
    (length,) = struct.unpack_from("<Q", raw)
    if rng.random() < 0.5:
        return damage_bytes(rng, raw, 8 + length)
    header = damage_json(rng, raw[8 : 8 + length])
    return struct.pack("<Q", len(header)) + header + raw[8 + length :]


class Corpus:
    """The valid files, made once; `case(n)` damages one of them, always the same way for the same n."""

    def __init__(self) -> None:
        self.tensors = gguf_tensors(hf_weights())
        self.metadata = {"bpe.gguf": GGUF_METADATA, "spm.gguf": _spm_metadata()}
        self.ggufs = {name: gguf_bytes(metadata, self.tensors) for name, metadata in self.metadata.items()}
        self.folder = _folder()
        self.data_bytes = sum(len(raw) for *_, raw in self.tensors)

    def case(self, number: int, place: Path) -> tuple[str, Path]:
        """Writes the case below `place`; returns (what was damaged, the path to load)."""
        rng = random.Random(number)
        if rng.random() < 0.5:
            name = rng.choice(sorted(self.ggufs))
            raw = self.ggufs[name]
            path = place / name
            if rng.random() < 0.5:
                path.write_bytes(damage_bytes(rng, raw, len(raw) - self.data_bytes))
            else:
                name += " metadata"
                path.write_bytes(gguf_bytes(damage_metadata(rng, self.metadata[path.name]), self.tensors))
            return name, path
        name = rng.choice(sorted(self.folder))
        damage: Callable[[random.Random, bytes], bytes] = damage_json
        if name.endswith(".safetensors"):
            damage = _damage_safetensors
        for other, raw in self.folder.items():
            (place / other).write_bytes(damage(rng, raw) if other == name else raw)
        return name, place


def load_everything(path: Path) -> None:
    """What a start does with a model's files, up to the native packing, and a use of the tokenizer."""
    checkpoint = load_checkpoint(path)
    build_program(checkpoint.config)
    _ = checkpoint.digest
    tokenizer = Tokenizer.from_assets(checkpoint.tokenizer, checkpoint.config.vocab_size)
    tokenizer.decode(tokenizer.encode("abc ab é <s>")[:50])


def run_case(corpus: Corpus, number: int) -> tuple[str, str]:
    """(what was damaged, the outcome: "loads" or the error's type). Raises Broken."""
    with tempfile.TemporaryDirectory(prefix="octavo-fuzz-") as folder:
        name, path = corpus.case(number, Path(folder))
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        start = time.process_time()
        outcome = "loads"
        try:
            load_everything(path)
        except OctavoError as error:
            outcome = type(error).__name__
            if not 10 < len(str(error)) < 2000 + len(folder):
                raise Broken(f"case {number} ({name}): the message has {len(str(error))} characters") from error
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            raise Broken(f"case {number} ({name}): {type(error).__name__}: {str(error)[:300]}") from error
        seconds = time.process_time() - start
        grown = tracemalloc.get_traced_memory()[1] - before
    if seconds > MOST_SECONDS:
        raise Broken(f"case {number} ({name}): {seconds:.1f} s, at most {MOST_SECONDS} s are allowed")
    if grown > MOST_BYTES:
        raise Broken(f"case {number} ({name}): {grown >> 20} MiB, at most {MOST_BYTES >> 20} MiB are allowed")
    return name, outcome


def fuzz(numbers: range, seconds: float) -> collections.Counter[tuple[str, str]]:
    """Runs the cases in order until they or the seconds are over; counts (what was damaged, outcome)."""
    corpus = Corpus()
    with tempfile.TemporaryDirectory() as folder:
        for name, raw in corpus.ggufs.items():
            (Path(folder) / name).write_bytes(raw)
            load_everything(Path(folder) / name)
        for name, raw in corpus.folder.items():
            (Path(folder) / name).write_bytes(raw)
        load_everything(Path(folder))
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    deadline = time.monotonic() + seconds
    tracemalloc.start()
    try:
        for number in numbers:
            if time.monotonic() > deadline:
                break
            counts[run_case(corpus, number)] += 1
    finally:
        tracemalloc.stop()
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--case", type=int, help="run this case alone, with its traceback")
    options = parser.parse_args()
    logging.getLogger("octavo").setLevel(logging.ERROR)
    if options.case is not None:
        print(fuzz(range(options.case, options.case + 1), 1e9))
        return
    try:
        counts = fuzz(range(options.start, sys.maxsize), options.seconds)
    except Broken as broken:
        sys.exit(f"{broken}\nagain: python -m tests.fuzz.loaders --case <number>")
    outcomes: collections.Counter[str] = collections.Counter()
    for (_, outcome), count in counts.items():
        outcomes[outcome] += count
    print(f"{sum(outcomes.values())} damaged models: " + ", ".join(f"{n} {name}" for name, n in outcomes.most_common()))


if __name__ == "__main__":
    main()
