"""What every kind of tokenizer offers below `Tokenizer`, as plain facts and two functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

# Control tokens that end a turn whatever the model's "eos" says: a chat model often has two (one for its turn, one for
# the text), and its files name only one of them. The spellings are those llama.cpp stops at.
END_OF_TURN = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<｜end▁of▁sentence｜>",
    }
)


@dataclass(frozen=True)
class TokenFacts:
    """`special_ids`: control and unknown tokens, left out of decoded text unless asked for.

    `texts`: bos_token, eos_token, unk_token and pad_token as spelled, those that exist (chat templates use them).
    `strips_leading_space`: decoded text loses one leading space, the one encoding had put before the first word.
    """

    size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    special_ids: frozenset[int]
    texts: Mapping[str, str]
    strips_leading_space: bool


class Backend(Protocol):
    facts: TokenFacts

    def encode(self, text: str, add_special_tokens: bool, parse_special: bool) -> list[int]:
        """`text` holds no lone surrogates."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """0 <= token_id < facts.size; b"" for an unused id."""
        ...


def end_ids(declared: Iterable[int | None], control_tokens: Iterable[tuple[int, str]]) -> tuple[int, ...]:
    """The ids that end generation: those the files declare, then control tokens known to end a turn."""
    found = dict.fromkeys(i for i in declared if i is not None)
    found.update(dict.fromkeys(i for i, text in control_tokens if text in END_OF_TURN))
    return tuple(found)
