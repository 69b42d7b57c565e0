"""Finds where a constraint begins: behind the first appearance of a text, at the end of a token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Marker:
    """A text that tokens may spell in many ways.

    The token that ends it must end with it, so that the constraint covers every byte behind it: at each point,
    `overruns` are the tokens that would carry more. Made once; the state is the number of bytes matched.
    """

    def __init__(self, text: str, token_bytes: Sequence[bytes]) -> None:
        self._text = text.encode()
        self._bytes = token_bytes
        self._borders = _borders(self._text)
        self._sorted = sorted((data, i) for i, data in enumerate(token_bytes) if data)
        inside = (i for i, data in enumerate(token_bytes) if -1 < data.find(self._text) < len(data) - len(self._text))
        self._whole = frozenset(inside)
        self._overruns: dict[int, tuple[int, ...]] = {}

    def push(self, matched: int, token_id: int) -> int | None:
        """The state behind a token; None when the text was found in it (at its end, unless it is an overrun)."""
        for byte in self._bytes[token_id]:
            while matched > 0 and self._text[matched] != byte:
                matched = self._borders[matched - 1]
            matched += self._text[matched] == byte
            if matched == len(self._text):
                return None
        return matched

    def overruns(self, matched: int) -> tuple[int, ...]:
        """The ids that end the text in their midst, so that bytes would lie behind it."""
        found = self._overruns.get(matched)
        if found is None:
            ids = set(self._whole)
            k = matched
            while k > 0:  # every beginning of the text that the bytes so far end with
                ids.update(self._longer_than(self._text[k:]))
                k = self._borders[k - 1]
            found = self._overruns[matched] = tuple(sorted(ids))
        return found

    def _longer_than(self, prefix: bytes) -> list[int]:
        ids = []
        for at in range(bisect_left(self._sorted, (prefix, len(self._bytes))), len(self._sorted)):
            data, token_id = self._sorted[at]
            if not data.startswith(prefix):
                break
            ids.append(token_id)
        return ids


def _borders(text: bytes) -> list[int]:
    """Of text[: i + 1], the length of its longest proper suffix that begins it (Knuth, Morris and Pratt 1977)."""
    borders = [0] * len(text)
    k = 0
    for i in range(1, len(text)):
        while k > 0 and text[i] != text[k]:
            k = borders[k - 1]
        k += text[i] == text[k]
        borders[i] = k
    return borders
