"""Encoding with a SentencePiece-style vocabulary: pieces, their scores, and bytes for what has no piece.

The rule is llama.cpp's: start from single characters; of all neighbours whose joined text is a piece, join the pair
with the highest score, the leftmost when scores are equal, until none is left. Ranked merges, which the `tokenizers`
package offers, cannot say "leftmost of equals" (pieces added later often share one score), and making them from scores
takes longer than loading the model; so the rule is written out here.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Mapping, Sequence

from octavo.errors import ModelFileError
from octavo.tokenizer.token_bytes import SPACE_MARK

_CACHED_WORDS = 1 << 15
_CACHED_WORD_CHARS = 32


class SentencePieceEncoder:
    """`pieces` maps the text of every piece that merging may produce to (id, score); `byte_ids` maps byte values to
    ids; a character with neither a piece nor all its bytes becomes `unknown_id`."""

    def __init__(
        self, pieces: Mapping[str, tuple[int, float]], byte_ids: Mapping[int, int], unknown_id: int | None
    ) -> None:
        if unknown_id is None and len(byte_ids) < 256:
            raise ModelFileError(
                "tokenizer metadata", "the vocabulary has neither an unknown token nor all 256 byte tokens"
            )
        self._pieces = pieces
        self._byte_ids = byte_ids
        self._unknown_id = unknown_id
        # No piece joins the end of a word to the next word's mark in most vocabularies: then words are independent,
        # and the cut changes nothing.
        joins_words = any(SPACE_MARK in piece.lstrip(SPACE_MARK) for piece in pieces)
        self._words = re.compile(".+" if joins_words else f"{SPACE_MARK}*[^{SPACE_MARK}]+|{SPACE_MARK}+", re.DOTALL)
        self._cache: dict[str, Sequence[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Ids of plain text whose spaces are already written as the space mark."""
        ids: list[int] = []
        cache = self._cache
        for word in self._words.findall(text):
            found = cache.get(word)
            if found is None:
                found = self._encode_word(word)
                if len(word) <= _CACHED_WORD_CHARS:
                    if len(cache) >= _CACHED_WORDS:
                        cache.clear()
                    cache[word] = found
            ids += found
        return ids

    def _encode_word(self, word: str) -> list[int]:
        pieces = self._pieces
        count = len(word)
        symbols: list[str] = list(word)  # "" once joined into the symbol on its left
        left = list(range(-1, count - 1))
        right = [*range(1, count), -1]
        queue: list[tuple[float, int, int, int]] = []

        def offer(a: int, b: int) -> None:
            if a >= 0 and b >= 0:
                joined = symbols[a] + symbols[b]
                found = pieces.get(joined)
                if found is not None:
                    heapq.heappush(queue, (-found[1], a, b, len(joined)))

        for i in range(1, count):
            offer(i - 1, i)
        while queue:
            _, a, b, length = heapq.heappop(queue)
            # A symbol only grows, and a dead one is empty, so an outdated pair has another length.
            if not symbols[a] or not symbols[b] or len(symbols[a]) + len(symbols[b]) != length:
                continue
            symbols[a] += symbols[b]
            symbols[b] = ""
            right[a] = right[b]
            if right[a] >= 0:
                left[right[a]] = a
            offer(left[a], a)
            offer(a, right[a])
        return [token_id for symbol in symbols if symbol for token_id in self._ids_of(symbol)]

    def _ids_of(self, symbol: str) -> Sequence[int]:
        found = self._pieces.get(symbol)
        if found is not None:
            return (found[0],)
        try:
            return [self._byte_ids[byte] for byte in symbol.encode("utf-8")]
        except KeyError:
            assert self._unknown_id is not None  # by the constructor
            return (self._unknown_id,)
