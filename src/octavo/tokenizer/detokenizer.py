"""Text from a growing list of token ids."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.tokenizer.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The deltas pushed out so far plus `flush()` are `tokenizer.decode(ids)`, for every list of ids.

    Bytes that may still become a character are held back, so no U+FFFD appears that the whole text lacks. The state
    is a fold over the ids: pushing the same ids into a new object rebuilds it. `push` costs the same at any length.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        at_start: bool = True,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        """shown_ids: special tokens that are not skipped."""
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids - shown_ids if skip_special_tokens else frozenset()
        self._drops_space = at_start and tokenizer.strips_leading_space
        self._held = b""  # the beginning of a character

    def push(self, token_id: int) -> str:
        """The text that this token makes certain; often "" inside a character of several tokens."""
        data = self._tokenizer.token_bytes(token_id)
        return "" if token_id in self._hidden else self._delta(data, final=False)

    def push_all(self, token_ids: Sequence[int]) -> str:
        """The same as pushing them one by one, at a fraction of the cost."""
        data = [self._tokenizer.token_bytes(i) for i in token_ids if i not in self._hidden]
        return self._delta(b"".join(data), final=False)

    def flush(self) -> str:
        """What is still held back, when no more tokens come."""
        return self._delta(b"", final=True)

    def _delta(self, data: bytes, final: bool) -> str:
        data = self._held + data
        text, used = utf_8_decode(data, "replace", final)
        self._held = data[used:]
        if text and self._drops_space:
            self._drops_space = False
            return text[1:] if text[0] == " " else text
        return text
