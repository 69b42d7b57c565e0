"""A tokenizer from tokenizer.json: encoding is the `tokenizers` package's own; decoding is ours, byte by byte."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from octavo.errors import ModelFileError, UnsupportedModelError
from octavo.limits import MAX_JSON_BYTES, MAX_VOCABULARY
from octavo.tokenizer.backend import TokenFacts, end_ids
from octavo.tokenizer.token_bytes import SPACE_MARK, byte_fallback_value, byte_level_bytes, sentencepiece_bytes

if TYPE_CHECKING:
    import tokenizers


class HuggingFaceBackend:
    def __init__(self, tokenizer_json: bytes, config: Mapping[str, Any]) -> None:
        self._tokenizer = _parse(tokenizer_json)
        # Truncation and padding are the training set-up's; a server that cut prompts silently would lie.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._plain: tokenizers.Tokenizer | None = None
        self._is_byte_level, strips = _decoder_family(self._tokenizer.decoder)
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        special = {token_id: token.content for token_id, token in added.items() if token.special}
        texts = {
            name: text
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if (text := _token_content(name, config.get(name))) is not None
        }
        named = {name: self._tokenizer.token_to_id(text) for name, text in texts.items()}
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        size = max(ids, default=-1) + 1
        if not 0 < size <= MAX_VOCABULARY:
            raise ModelFileError("tokenizer.json", f"{size} token ids, allowed are 1 to {MAX_VOCABULARY}")
        self.facts = TokenFacts(
            size=size,
            bos_id=named.get("bos_token"),
            eos_ids=end_ids([named.get("eos_token")], special.items()),
            special_ids=frozenset(special) | {i for i in named.values() if i is not None},
            texts=texts,
            strips_leading_space=strips,
        )

    def encode(self, text: str, add_special_tokens: bool, parse_special: bool) -> list[int]:
        tokenizer = self._tokenizer if parse_special else self._without_special()
        ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def _without_special(self) -> tokenizers.Tokenizer:
        """A copy that takes the spelling of a special token as plain text. Made when first asked for: few ask, and
        the switch belongs to the whole object, which other threads are using."""
        if self._plain is None:
            plain = copy.deepcopy(self._tokenizer)
            plain.encode_special_tokens = True
            self._plain = plain
        return self._plain

    def token_bytes(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return added.encode("utf-8", "replace")
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._is_byte_level:
            return byte_level_bytes(piece)
        value = byte_fallback_value(piece)
        return sentencepiece_bytes(piece) if value is None else bytes([value])


def _parse(tokenizer_json: bytes) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer

    if len(tokenizer_json) > MAX_JSON_BYTES:
        raise ModelFileError("tokenizer.json", f"{len(tokenizer_json)} bytes, allowed are {MAX_JSON_BYTES}")
    try:
        return Tokenizer.from_buffer(tokenizer_json)
    except Exception as error:  # the package raises bare Exception
        raise ModelFileError("tokenizer.json", f"cannot be read: {error}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # how a Rust panic arrives; it is no Exception
            raise
        raise ModelFileError("tokenizer.json", f"cannot be read: {error}") from error


def _token_content(name: str, value: Any) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    if value is None or isinstance(value, str):
        return value
    raise ModelFileError("tokenizer_config.json", f"{name} is neither a string nor an object with a content string")


def _decoder_family(decoder: object) -> tuple[bool, bool]:
    """(byte-level?, strips one leading space?) of a tokenizer.json decoder.

    Decoding is done here rather than by the package so that streamed and whole text have one definition; a decoder
    that is neither byte-level nor SentencePiece-style with byte fallback is refused by name.
    """
    if decoder is None:
        raise UnsupportedModelError("tokenizer.json has no decoder; known are ByteLevel and SentencePiece-style ones")
    steps = list(_steps(json.loads(decoder.__getstate__())))  # type: ignore[attr-defined]  # its JSON, as bytes
    names = [step["type"] for step in steps]
    if names == ["ByteLevel"]:
        return True, False
    marks = strips = False
    for step in steps:
        match step["type"]:
            case "Replace" if step["pattern"] == {"String": SPACE_MARK} and step["content"] == " ":
                marks = True
            case "Metaspace" if step["replacement"] == SPACE_MARK:
                marks = True
                strips = strips or step.get("prepend_scheme", "always") != "never"
            case "ByteFallback" | "Fuse":
                pass
            case "Strip" if step["content"] == " " and step["stop"] == 0 and step["start"] in (0, 1):
                strips = strips or step["start"] == 1
            case _:
                raise UnsupportedModelError(f"the decoder {json.dumps(step)[:200]} of tokenizer.json is not supported")
    if not marks:
        raise UnsupportedModelError(f"the decoder {'+'.join(names)} of tokenizer.json is not supported")
    return False, strips


def _steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _steps(step)
    else:
        yield decoder
