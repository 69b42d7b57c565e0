"""A tokenizer's vocabulary as llguidance wants it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from octavo.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class Vocabulary:
    """The bytes of each of `width` ids, control tokens apart, and the ids that may end an output.

    width: of a row of logits; ids that the tokenizer does not know are never allowed. Made once a model: it takes some
    tenths of a second, during which other threads of the process stand still.
    """

    def __init__(self, tokenizer: Tokenizer, width: int, eos_ids: Collection[int]) -> None:
        from llguidance import LLTokenizer, TokenizerWrapper

        self.width = width
        self.token_bytes = [tokenizer.token_bytes(i) if i < tokenizer.vocab_size else b"" for i in range(width)]
        self.eos_ids = frozenset(i for i in eos_ids if 0 <= i < width)
        # Where the model names no end there is one behind the last id, which no mask shows.
        ends = sorted(self.eos_ids) or [width]
        size = max(width, ends[0] + 1)
        control = sorted(tokenizer.special_ids | self.eos_ids)
        pieces = _Pieces(tokenizer, [*self.token_bytes, b"<end>"][:size], control, ends[0])
        self.tokens: LLTokenizer = LLTokenizer(TokenizerWrapper(pieces), n_vocab=size, eos_token=ends)
        pieces.greedy = self.tokens.greedy_tokenize
        self.mask_words = (size + 31) // 32


class _Pieces:
    """The attributes and the call that llguidance reads."""

    bos_token_id = None

    greedy: Callable[[str], list[int]] | None = None

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], special_ids: list[int], eos: int) -> None:
        self._tokenizer = tokenizer
        self.tokens = tokens
        self.special_token_ids = special_ids if eos in special_ids else [*special_ids, eos]
        self.eos_token_id = eos

    def __call__(self, text: Any) -> list[int]:
        """The ids of a text inside an output: as the tokenizer would, where that says the same bytes.

        It does not if it puts a space before each text, or knows more ids than the model has logits.
        """
        data = text.encode() if isinstance(text, str) else bytes(text)
        ids = self._tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        known = self.tokens
        if self.greedy is None or b"".join(known[i] if i < len(known) else b"" for i in ids) == data:
            return ids
        return self._up_to_a_gap(self.greedy(data.decode("utf-8", "replace")), data)

    def _up_to_a_gap(self, ids: list[int], data: bytes) -> list[int]:
        """Those that spell the beginning of the data: what the vocabulary has no token for would be left out."""
        at = 0
        for count, token_id in enumerate(ids):
            piece = self.tokens[token_id]
            if not data.startswith(piece, at):
                return ids[:count]
            at += len(piece)
        return ids
