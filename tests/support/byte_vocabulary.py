"""A vocabulary of the 256 bytes, some longer tokens and control tokens, as llguidance wants it."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

END = "</s>"


class ByteVocabulary:
    """`control`: spellings of control tokens; no text can stand for one. Ids of bytes are the bytes."""

    def __init__(self, control: Sequence[str] = (), words: Sequence[str] = ()) -> None:
        names = [END, *control]
        self.control_ids = {name: 256 + i for i, name in enumerate(names)}
        self.eos_token_id = 256
        self.bos_token_id = None
        self.tokens = [bytes([i]) for i in range(256)] + [name.encode() for name in (*names, *words)]
        self.special_token_ids = list(self.control_ids.values())
        self.tokenizer = LLTokenizer(TokenizerWrapper(self))

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)

    def encode(self, text: str) -> list[int]:
        """Bytes, and control tokens where one is spelled."""
        ids: list[int] = []
        while text:
            name = next((name for name in self.control_ids if text.startswith(name)), None)
            ids += [self.control_ids[name]] if name else list(text[0].encode())
            text = text[len(name or text[0]) :]
        return ids

    def matcher(self, lark: str) -> LLMatcher:
        matcher = LLMatcher(self.tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def takes(self, lark: str, text: str) -> bool:
        """Whether the text is a whole sentence of the grammar."""
        matcher = self.matcher(lark)
        ids = self.encode(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
