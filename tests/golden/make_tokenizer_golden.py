"""Remakes tests/golden/tokenizer: small vocabularies, texts, and the ids that reference tokenizers give them.

References: the `tokenizers` package for tokenizer.json; llama.cpp (inside cyllama, from PyPI) for vocabularies in GGUF.
Needs a venv of its own:  pip install cyllama==0.2.18 gguf tokenizers sentencepiece
Run, in the repository:  python -m tests.golden.make_tokenizer_golden PATH/TO/SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import io
import json
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import sentencepiece
from cyllama.llama.llama_cpp import LlamaModel, LlamaModelParams
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.support.tokenizer_golden import (
    BYTE,
    CONTROL,
    FOLDER,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    gguf_vocabularies,
)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

PLAIN_TEXTS = [
    "",
    " ",
    "Hello, world!",
    " leading and trailing ",
    "The quick brown fox jumps over a lazy dog. It's what they'll say: we've done it, haven't we? I'D, YOU'LL, WE'RE.",
    "def fib(n: int) -> int:\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n\n\nprint([fib(i) for i in (1,)])\n",
    "#include <vector>\nint main() {\n\tstd::vector<int> v{1, 2, 3};\n\treturn v[0] == 1 ? 0x1F : -1;  // note\n}\r\n",
    '{"name": "octavo", "sizes": [1, 22, 333, 4444, 55555], "nested": {"a": null, "b": true, "c": 1.5e-10}}',
    "🙂 👩‍👩‍👧‍👦 🇩🇪 ✈️ 🏳️‍🌈 plain ☕ again 🙂🙂🙂",
    "今天天气很好，我们去公园散步吧。東京タワーは高いです。한국어 문장도 있습니다.",
    "שלום עולם! مرحبا بالعالم، كيف حالك؟ ١٢٣ טקסט mixed עם English",
    "Привет, мир! Ελληνικά, café, naïve, Ångström, ﬁne, ½, Ⅷ, ²³, e\u0301, ǅ, ß, İ, ſ 'ſ 'S",
    "one  two   three    four     five" + " " * 40 + "end" + " " * 17,
    "tabs\tand\t\tnewlines\n\n\n  indented\n\t\n \n\r\n\rdone\x0b\x0c\x85\u2028\u3000 \u00a0nbsp",
    "0 1 12 123 1234 12345 123456 1234567 3.14159 1,000,000 007 2024-12-31T23:59:59Z",
    "!!! ??? ... --- === *** ((())) [[[]]] {{{}}} $$$ %%% ^^^ &&& @@@ ~~~ ``` ||| \\\\\\ ///",
    "aaaaaaaaaaaaaaaaa abababababab abcabcabcabc ------------- ======= haahaahaa",
    "a\x00b\x01c\x1b[0m\x7f",
    "\ufeffBOM \u200bzero\u200dwidth \ufffd replaced \U0010ffff last",
    "ไทยภาษา हिन्दी नमस्ते தமிழ் বাংলা",
    "snake_case camelCase PascalCase SCREAMING_CASE kebab-case x1y2z3 C++ C# .NET e.g. i.e.",
]
BROKEN_BYTES = [
    b"ok \xff\xfe broken",
    b"\xe4\xbd\x00 cut \xf0\x9f\x99",
    b"\xc3\x28 \xa0\xa1 \xed\xa0\x80 \xf5\x80\x80\x80 end\xc3",
]
SPECIAL_TEXTS = [
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "a<|endoftext|>b <|endoftext|> c<|endoftext|><|endoftext|>",
    "<|im_start <|im_end|> |im_end|> <|im_end|",
    "<s> text </s> <unk> [INST] <0x0A> <tool> x<tool>y",
]
ALPHABETS = [
    "ab ",
    "ab  \n\t",
    "it's WE'LL 12",
    " 0123456789.,",
    "é你🙂 א1",
    "<|im_end|>x ",
    "aA1 _-'\n\r",
    "\u00a0\u2003 \nx!",
]


def texts() -> list[str]:
    chooser = random.Random(7)
    random_texts = ["".join(chooser.choices(a, k=chooser.randint(1, 40))) for a in ALPHABETS for _ in range(12)]
    return PLAIN_TEXTS + [b.decode("utf-8", "replace") for b in BROKEN_BYTES] + SPECIAL_TEXTS + random_texts


def byte_level_tokenizer() -> Tokenizer:
    """Its merges run across words, digits and spaces, so that a wrong pre-tokenizer changes the ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(".{1,24}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        min_frequency=1,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(PLAIN_TEXTS * 2, trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return tokenizer


def sentencepiece_model() -> bytes:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(PLAIN_TEXTS[2:] * 3),
        model_writer=out,
        model_type="bpe",
        vocab_size=1000,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=False,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    return out.getvalue()


def sentencepiece_vocabulary() -> list[tuple[str, float, int]]:
    """(piece, score, kind) by id, with a token from a converter's "added tokens" at the end."""
    model = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
    pieces = []
    for i in range(model.get_piece_size()):
        kind = (
            UNKNOWN if model.is_unknown(i) else CONTROL if model.is_control(i) else BYTE if model.is_byte(i) else NORMAL
        )
        pieces.append((model.id_to_piece(i), model.get_score(i), kind))
    return [*pieces, ("<tool>", 0.0, USER_DEFINED), ("<unused>", 0.0, UNUSED)]


def sentencepiece_tokenizer(pieces: list[tuple[str, float, int]]) -> Tokenizer:
    """The same pieces as a tokenizer.json, in the way transformers converts a Llama 2 tokenizer."""
    ids = {piece: i for i, (piece, _, _) in enumerate(pieces)}
    merges = []
    for piece, score, kind in pieces:
        if kind == NORMAL:
            splits = [(piece[:i], piece[i:]) for i in range(1, len(piece)) if piece[:i] in ids and piece[i:] in ids]
            merges += [(score, pair) for pair in sorted(splits, key=lambda pair: (ids[pair[0]], ids[pair[1]]))]
    ranked = [pair for _, pair in sorted(merges, key=lambda merge: -merge[0])]
    tokenizer = Tokenizer(models.BPE(ids, ranked, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", ids["<s>"])])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def ids_by(encode: Callable[[str, bool, bool], list[int]], some: list[str]) -> dict[str, list[list[int]]]:
    return {
        "parsed": [encode(text, True, True) for text in some],
        "plain": [encode(text, False, False) for text in some],
    }


def hugging_face_ids(tokenizer: Tokenizer, some: list[str]) -> dict[str, Any]:
    def encode(text: str, add_special: bool, parse_special: bool) -> list[int]:
        tokenizer.encode_special_tokens = not parse_special
        return tokenizer.encode(text, add_special_tokens=add_special).ids

    ids = ids_by(encode, some)
    decoded = [tokenizer.decode(i, skip_special_tokens=skip) for skip in (True, False) for i in ids["parsed"]]
    return {**ids, "decoded": decoded}


def llama_cpp_ids(path: Path, some: list[str]) -> dict[str, Any]:
    model = LlamaModel(str(path), LlamaModelParams())
    return ids_by(model.get_vocab().tokenize, some)


def write_gguf(path: Path, metadata: dict[str, Any]) -> None:
    """A model of one layer with weights of zero around the vocabulary: cyllama loads nothing smaller."""
    width = 32
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(width)
    writer.add_block_count(1)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    square = np.zeros((width, width), np.float32)
    writer.add_tensor("token_embd.weight", np.zeros((len(metadata["tokenizer.ggml.tokens"]), width), np.float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", square[0])
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", square)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def dump(name: str, value: Any) -> None:
    lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}" for k, v in value.items())
    (FOLDER / name).write_text("{\n" + lines + "\n}\n")


def main() -> None:
    some = texts()
    FOLDER.mkdir(exist_ok=True)
    byte_level = byte_level_tokenizer()
    pieces = sentencepiece_vocabulary()
    by_pieces = sentencepiece_tokenizer(pieces)
    (FOLDER / "byte_level.json").write_text(byte_level.to_str())
    (FOLDER / "sentencepiece.json").write_text(by_pieces.to_str())
    dump("sentencepiece_pieces.json", {"pieces": pieces})
    dump("texts.json", {"texts": some})

    expected: dict[str, Any] = {
        "hf_byte_level": hugging_face_ids(byte_level, some),
        "hf_sentencepiece": hugging_face_ids(by_pieces, some),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, entries in gguf_vocabularies().items():
            path = Path(folder) / "vocabulary.gguf"
            write_gguf(path, entries)
            expected[name] = llama_cpp_ids(path, some)
    expected["smollm2"] = llama_cpp_ids(Path(sys.argv[1]), some)
    for name, values in expected.items():
        dump(f"ids_{name}.json", values)


if __name__ == "__main__":
    main()
