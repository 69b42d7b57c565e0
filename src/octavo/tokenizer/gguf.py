"""A tokenizer rebuilt from GGUF metadata, giving the ids that llama.cpp gives.

Two families: "gpt2" is byte-level BPE with merges and a named pre-tokenizer; "llama" is SentencePiece-style with scores
and byte fallback. Control tokens never come out of plain text: only their exact spelling, and only when
`parse_special` asks for it, gives their id.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from octavo.errors import ModelFileError, UnsupportedModelError
from octavo.limits import MAX_VOCABULARY
from octavo.tokenizer.backend import END_OF_TURN, TokenFacts, end_ids
from octavo.tokenizer.sentencepiece import SentencePieceEncoder
from octavo.tokenizer.token_bytes import SPACE_MARK, byte_fallback_value, byte_level_bytes, sentencepiece_bytes

if TYPE_CHECKING:
    import tokenizers

log = logging.getLogger(__name__)

_WHERE = "tokenizer metadata"


class Kind(IntEnum):
    """tokenizer.ggml.token_type, as the GGUF specification numbers it."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Each name's regular expressions cut the text one after the other; matches and the gaps between them stay apart.
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3_WORDS = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_DEFAULT_WORDS = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")
PRE_TOKENIZERS: Mapping[str, tuple[str, ...]] = {
    "smollm": (r"\p{N}", _GPT2_WORDS),
    "gpt-2": (_GPT2_WORDS,),
    "llama-bpe": (_LLAMA3_WORDS,),
    "qwen2": (_QWEN2_WORDS,),
    "default": _DEFAULT_WORDS,
}
_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "falcon3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}


class GgufTokens:
    """The vocabulary as the file lists it, checked. `control` and `user` map ids to spellings."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        self.texts = self._strings("tokenizer.ggml.tokens")
        count = len(self.texts)
        if not 0 < count <= MAX_VOCABULARY:
            raise ModelFileError(_WHERE, f"{count} tokens, allowed are 1 to {MAX_VOCABULARY}")
        self.ids = {text: i for i, text in enumerate(self.texts)}
        if len(self.ids) != count:
            twice = next(text for i, text in enumerate(self.texts) if self.ids[text] != i)
            raise ModelFileError(_WHERE, f"the token {twice[:40]!r} is listed twice")
        self.kinds = self._numbers("tokenizer.ggml.token_type") or [Kind.NORMAL] * count
        ends = (self.token_id("eos"), self.token_id("eot"), self.token_id("eom"))
        marked = {i for i in (self.token_id("bos"), *ends) if i is not None}
        marked.update(self.ids[text] for text in END_OF_TURN if text in self.ids)
        # A file without token types still names its control tokens, in these keys or by their well-known spelling.
        self.control = {i: self.texts[i] for i, kind in enumerate(self.kinds) if kind == Kind.CONTROL or i in marked}
        self.user = {i: self.texts[i] for i, kind in enumerate(self.kinds) if kind == Kind.USER_DEFINED}
        self.unknown = {i: self.texts[i] for i, kind in enumerate(self.kinds) if kind == Kind.UNKNOWN}
        self.end_ids = end_ids(ends, self.control.items())

    def token_id(self, name: str, default: int | None = None) -> int | None:
        """tokenizer.ggml.<name>_token_id, or the default where the file has none; None if outside the vocabulary."""
        key = f"tokenizer.ggml.{name}_token_id"
        value = self.metadata.get(key, default)
        if value is None:
            return None
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise ModelFileError(_WHERE, f"{key}={value!r:.60} is not an integer")
        return int(value) if 0 <= value < len(self.texts) else None

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, bool):
            raise ModelFileError(_WHERE, f"tokenizer.ggml.{key}={value!r:.60} is not true or false")
        return value

    def facts(self, bos_id: int | None, strips_leading_space: bool) -> TokenFacts:
        named = {
            "bos_token": bos_id,
            "eos_token": self.token_id("eos"),
            "unk_token": self.token_id("unknown"),
            "pad_token": self.token_id("padding"),
        }
        return TokenFacts(
            size=len(self.texts),
            bos_id=bos_id,
            eos_ids=self.end_ids,
            special_ids=frozenset(self.control) | frozenset(self.unknown),
            texts={name: self.texts[i] for name, i in named.items() if i is not None},
            strips_leading_space=strips_leading_space,
        )

    def _strings(self, key: str) -> list[str]:
        value = self.metadata.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ModelFileError(_WHERE, f"{key} is missing or not a list of strings")
        return value

    def _numbers(self, key: str) -> list[Any]:
        """A list as long as the vocabulary, or [] if the file has none."""
        value = self.metadata.get(key)
        if value is None:
            return []
        numbers = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(numbers, list) or not all(isinstance(number, (int, float)) for number in numbers):
            raise ModelFileError(_WHERE, f"{key} is not a list of numbers")
        if len(numbers) != len(self.texts):
            raise ModelFileError(_WHERE, f"{key} has {len(numbers)} entries for {len(self.texts)} tokens")
        return numbers

    def merges(self) -> list[tuple[str, str]]:
        pairs = [tuple(line.split(" ")) for line in self._strings("tokenizer.ggml.merges")]
        bad = next((pair for pair in pairs if len(pair) != 2), None)
        if bad is not None:
            raise ModelFileError(_WHERE, f"the merge {' '.join(bad)[:60]!r} is not two pieces with one space between")
        return pairs  # type: ignore[return-value]  # just checked

    def scores(self) -> list[float]:
        return self._numbers("tokenizer.ggml.scores") or [0.0] * len(self.texts)


def split_special(text: str, tokens: Iterable[tuple[str, int]]) -> list[str | int]:
    """Cuts `text` at every spelling in `tokens`, each in its turn over the whole text: pieces of text, and ids."""
    parts: list[str | int] = [text]
    for spelling, token_id in tokens:
        if spelling not in text:
            continue
        cut: list[str | int] = []
        for part in parts:
            if isinstance(part, int) or spelling not in part:
                cut.append(part)
                continue
            for i, between in enumerate(part.split(spelling)):
                if i:
                    cut.append(token_id)
                if between:
                    cut.append(between)
        parts = cut
    return parts


class _GgufBackend(ABC):
    """Both families: special tokens are cut out first, longest spelling first; BOS and EOS go around the rest."""

    def __init__(self, tokens: GgufTokens, bos_id: int | None, strips_leading_space: bool, adds_bos: bool) -> None:
        self._tokens = tokens
        self.facts = tokens.facts(bos_id, strips_leading_space)
        always = [(text, i) for i, text in tokens.user.items() if i not in tokens.control and text]
        parsed = [(text, i) for i, text in (tokens.control | tokens.unknown).items() if text]
        self._user_spellings = sorted(always, key=_longest_first)
        self._all_spellings = sorted(always + parsed, key=_longest_first)
        self._prefix = self._border("bos", bos_id, adds_bos)
        self._suffix = self._border("eos", tokens.token_id("eos"), False)

    def _border(self, name: str, token_id: int | None, default: bool) -> list[int]:
        if not self._tokens.flag(f"add_{name}_token", default):
            return []
        if token_id is None:
            raise ModelFileError(_WHERE, f"add_{name}_token is true, but there is no valid {name}_token_id")
        return [token_id]

    def encode(self, text: str, add_special_tokens: bool, parse_special: bool) -> list[int]:
        parts = split_special(text, self._all_spellings if parse_special else self._user_spellings) if text else []
        ids = list(self._prefix) if add_special_tokens else []
        after_special = True
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
                after_special = True
            else:
                ids += self._encode_plain(part, after_special)
                after_special = False
        return ids + self._suffix if add_special_tokens else ids

    @abstractmethod
    def _encode_plain(self, text: str, after_special: bool) -> Sequence[int]:
        """Ids of a text without special tokens."""

    def token_bytes(self, token_id: int) -> bytes:
        kind = self._tokens.kinds[token_id]
        text = self._tokens.texts[token_id]
        if token_id in self.facts.special_ids or kind == Kind.USER_DEFINED:
            return text.encode("utf-8", "replace")
        if kind == Kind.BYTE:
            value = byte_fallback_value(text)
            return b"" if value is None else bytes([value])
        if kind == Kind.NORMAL:
            return self._normal_bytes(text)
        return b""

    @abstractmethod
    def _normal_bytes(self, text: str) -> bytes:
        """What the spelling of a normal token stands for."""


def _longest_first(spelled: tuple[str, int]) -> tuple[int, int]:
    return -len(spelled[0].encode("utf-8", "replace")), spelled[1]


class ByteLevelBackend(_GgufBackend):
    def __init__(self, metadata: Mapping[str, Any]) -> None:
        tokens = GgufTokens(metadata)
        pre = metadata.get("tokenizer.ggml.pre", "default")
        name = _ALIASES.get(pre, pre) if isinstance(pre, str) else ""
        if name not in PRE_TOKENIZERS:
            raise UnsupportedModelError(
                f"tokenizer.ggml.pre={pre!r} is not supported; known are {', '.join(sorted(PRE_TOKENIZERS))}"
            )
        if name == "default":
            log.warning("the GGUF file names no pre-tokenizer; its token ids, and so its answers, may be worse")
        whole_words = name == "llama-bpe"
        super().__init__(tokens, tokens.token_id("bos"), strips_leading_space=False, adds_bos=name == "llama-bpe")
        self._bpe = _build_bpe(tokens, PRE_TOKENIZERS[name], whole_words)

    def _encode_plain(self, text: str, after_special: bool) -> Sequence[int]:
        ids: list[int] = self._bpe.encode(text, add_special_tokens=False).ids
        return ids

    def _normal_bytes(self, text: str) -> bytes:
        return byte_level_bytes(text)


def _build_bpe(tokens: GgufTokens, expressions: Sequence[str], whole_words: bool) -> tokenizers.Tokenizer:
    """`whole_words`: a word that is itself a piece becomes that piece without merging."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    vocabulary = dict(tokens.ids)
    # A byte-level text holds no NUL, so a control token renamed to start with one cannot come out of plain text.
    for token_id, text in (tokens.control | tokens.user | tokens.unknown).items():
        del vocabulary[text]
        vocabulary["\0" + text] = token_id
    merges = tokens.merges()
    try:
        model = models.BPE(vocabulary, merges, ignore_merges=whole_words)
    except Exception:  # it has one type for all; the cause is a merge whose pieces are not in the vocabulary
        kept = [(a, b) for a, b in merges if a in vocabulary and b in vocabulary and a + b in vocabulary]
        log.warning("%d merges of the GGUF tokenizer name pieces that it lacks; left out", len(merges) - len(kept))
        try:
            model = models.BPE(vocabulary, kept, ignore_merges=whole_words)
        except Exception as error:
            raise ModelFileError(_WHERE, f"its vocabulary cannot be used: {error!s:.200}") from error
    tokenizer = Tokenizer(model)
    cuts = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, letters])
    return tokenizer


class SentencePieceBackend(_GgufBackend):
    def __init__(self, metadata: Mapping[str, Any]) -> None:
        tokens = GgufTokens(metadata)
        self._adds_space = tokens.flag("add_space_prefix", True)
        super().__init__(tokens, tokens.token_id("bos", 1), self._adds_space, adds_bos=True)
        hidden = self.facts.special_ids
        byte_ids: dict[int, int] = {}
        pieces: dict[str, tuple[int, float]] = {}
        for token_id, (text, kind, score) in enumerate(zip(tokens.texts, tokens.kinds, tokens.scores())):
            if kind == Kind.BYTE:
                value = byte_fallback_value(text)
                if value is not None:
                    byte_ids[value] = token_id
            elif token_id not in hidden:
                pieces[text] = (token_id, score)
        self._encoder = SentencePieceEncoder(pieces, byte_ids, tokens.token_id("unknown", 0))

    def _encode_plain(self, text: str, after_special: bool) -> Sequence[int]:
        if self._adds_space and after_special:
            text = " " + text
        return self._encoder.encode(text.replace(" ", SPACE_MARK))

    def _normal_bytes(self, text: str) -> bytes:
        return sentencepiece_bytes(text)


def open_gguf(metadata: Mapping[str, Any]) -> ByteLevelBackend | SentencePieceBackend:
    """`metadata`: every tokenizer.* entry by its full key.

    Raises UnsupportedModelError for a model or pre-tokenizer we do not know, ModelFileError for inconsistent lists.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        return ByteLevelBackend(metadata)
    if model == "llama":
        return SentencePieceBackend(metadata)
    raise UnsupportedModelError(f"tokenizer.ggml.model={model!r} is not supported; known are 'gpt2' and 'llama'")
