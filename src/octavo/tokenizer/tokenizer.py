"""`Tokenizer`: the one object other rooms use for text, whatever file it came from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo.errors import ChatTemplateError, InvalidParameterError, UnsupportedModelError
from octavo.tokenizer.backend import Backend

if TYPE_CHECKING:
    from octavo.tokenizer.chat_template import ChatTemplate
    from octavo.weights.assets import TokenizerAssets

_LONE_SURROGATES = re.compile("[\ud800-\udfff]")


def _is_integer(value: object) -> bool:
    """Also NumPy's integers, but not True and False."""
    return type(value) is int or (hasattr(value, "__index__") and not isinstance(value, bool))


class Tokenizer:
    """Token ids from text and text from token ids. Safe to use from several threads.

    `vocab_size` is the number of ids the tokenizer knows. A model's logits are often wider; ids up to
    `logits_width` decode to nothing instead of being refused.
    """

    def __init__(self, backend: Backend, chat_template: str | None = None, logits_width: int = 0) -> None:
        self._backend = backend
        facts = backend.facts
        self.vocab_size = facts.size
        self.bos_id = facts.bos_id
        self.eos_ids = facts.eos_ids
        self.special_ids = facts.special_ids
        self.special_texts = facts.texts
        self.strips_leading_space = facts.strips_leading_space
        self.chat_template = chat_template
        self._template: ChatTemplate | None = None
        self._bytes: list[bytes | None] = [None] * max(facts.size, logits_width)

    @classmethod
    def from_assets(cls, assets: TokenizerAssets, logits_width: int = 0) -> Tokenizer:
        """Raises UnsupportedModelError or ModelFileError when the files describe no tokenizer we can honour."""
        if assets.kind == "gguf":
            from octavo.tokenizer.gguf import open_gguf

            return cls(open_gguf(assets.config), assets.chat_template, logits_width)
        if assets.tokenizer_json is None:
            raise UnsupportedModelError("the model has no tokenizer.json; slow tokenizers are not supported")
        from octavo.tokenizer.hugging_face import HuggingFaceBackend

        backend = HuggingFaceBackend(assets.tokenizer_json, assets.config)
        return cls(backend, assets.chat_template, logits_width)

    def encode(self, text: str | bytes, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`. Bytes are read as UTF-8; what is broken, and lone surrogates, become U+FFFD.

        `add_special_tokens`: put the tokens around it that the model's files ask for (often BOS).
        `parse_special`: the spelling of a control token becomes that token; otherwise it is plain text.
        """
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        elif isinstance(text, str):
            text = _LONE_SURROGATES.sub("\ufffd", text)
        else:
            raise InvalidParameterError("text", text, "a str or bytes")
        return self._backend.encode(text, add_special_tokens, parse_special)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; control tokens give their spelling, unused ids nothing."""
        if not _is_integer(token_id) or not 0 <= token_id < len(self._bytes):
            raise InvalidParameterError("token id", token_id, f"an integer from 0 to {len(self._bytes) - 1}")
        found = self._bytes[token_id]
        if found is None:
            found = self._backend.token_bytes(token_id) if token_id < self.vocab_size else b""
            self._bytes[token_id] = found
        return found

    def token_text(self, token_id: int) -> str:
        """One token as text, for log-probability entries; bytes that are no whole character show as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True, at_start: bool = True) -> str:
        """The text of `ids`: their bytes joined and read as UTF-8, U+FFFD for what is broken.

        `at_start`: the ids begin a text, so the space that encoding put before its first word is dropped again (only
        tokenizers that do so); False where they continue one.
        """
        hidden = self.special_ids if skip_special_tokens else frozenset()
        joined = b"".join([data for i in ids if (data := self.token_bytes(i)) and i not in hidden])
        text = joined.decode("utf-8", "replace")
        return text[1:] if at_start and self.strips_leading_space and text.startswith(" ") else text

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The conversation as the model's own template writes it; `variables` (tools, …) are passed to the template.

        Raises InvalidParameterError for malformed messages, ChatTemplateError if there is no template or it fails.
        """
        if self._template is None:
            if self.chat_template is None:
                raise ChatTemplateError("the model has no chat template: use plain prompts, or a model made for chat")
            from octavo.tokenizer.chat_template import ChatTemplate

            self._template = ChatTemplate(self.chat_template, self.special_texts)
        return self._template.render(messages, add_generation_prompt=add_generation_prompt, **variables)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of the rendered conversation. Templates write BOS and the like themselves, so none is added."""
        text = self.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False)
