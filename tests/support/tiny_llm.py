"""A whole tiny model in a Hugging Face folder, which answers in milliseconds: random Llama weights, 131 tokens.

Ids: 0 <unk>, 1 <s>, 2 </s>, then one byte each: a newline, printable ASCII, and the bytes of é, € and some emoji, so
that what it writes is often broken UTF-8 and sometimes a character of several tokens.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

WEIGHTS = Path(__file__).parent.parent / "parity" / "golden" / "llama"
VOCAB = 131
SPECIAL = ("<unk>", "<s>", "</s>")
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_tiny_llm(folder: Path, *, template: str | None = TEMPLATE, generation: dict[str, Any] | None = None) -> Path:
    """`generation`: contents of generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(WEIGHTS / name, folder / name)
    (folder / "tokenizer.json").write_text(_tokenizer_json())
    config = {"eos_token": "</s>", "bos_token": "<s>"} | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def _tokenizer_json() -> str:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    raw = b"\n" + bytes(range(0x20, 0x7F)) + "é€".encode() + bytes([0xF0, 0x9F, 0x98, *range(0x80, 0x99)])
    raw = bytes(dict.fromkeys(raw))[: VOCAB - len(SPECIAL)]
    vocab = {text: i for i, text in enumerate(SPECIAL)}
    vocab |= {_letter(byte): i for i, byte in enumerate(raw, len(SPECIAL))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return tokenizer.to_str()


def _letter(byte: int) -> str:
    """How a byte is spelled in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    hidden = [other for other in range(256) if other not in printable]
    return chr(256 + hidden.index(byte))
