"""The bytes a vocabulary piece stands for, in the two families of tokenizers we know."""

from __future__ import annotations

SPACE_MARK = "▁"  # U+2581, SentencePiece's visible space


def _byte_level_alphabet() -> dict[int, int]:
    """GPT-2's alphabet, as code point of the letter → byte: printable bytes stand for themselves, the other 68 for
    U+0100 onwards in increasing order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return {**{byte: byte for byte in printable}, **{256 + i: byte for i, byte in enumerate(hidden)}}


_LETTER_TO_BYTE = _byte_level_alphabet()


def byte_level_bytes(piece: str) -> bytes:
    """A piece of a byte-level BPE. One with a letter outside the alphabet is plain text, as `tokenizers` decodes it."""
    try:
        return bytes([_LETTER_TO_BYTE[ord(letter)] for letter in piece])
    except KeyError:
        return piece.encode("utf-8", "replace")


def byte_fallback_value(piece: str) -> int | None:
    """The byte that a piece like <0x0A> stands for, or None."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return int(piece[3:5], 16)
        except ValueError:
            return None
    return None


def sentencepiece_bytes(piece: str) -> bytes:
    """A normal (not byte-fallback) piece of a SentencePiece vocabulary."""
    return piece.replace(SPACE_MARK, " ").encode("utf-8", "replace")
