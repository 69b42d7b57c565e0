"""What sampling must remember of one output: a fold over its token ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.errors import RequestFailedError
from octavo.executor.interface import F32, I32, U32
from octavo.grammar import Constraint
from octavo.sampling.resolve import ResolvedParams
from octavo.sampling.rows import RowEdits, pack_scalars, pack_target


class SeenTokens:
    """Distinct ids and how often the output has each, in arrays that grow by doubling."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        first = list(dict.fromkeys(prompt_ids))
        self._slots = {token_id: slot for slot, token_id in enumerate(first)}
        self._ids: I32 = np.zeros(max(64, 2 * len(first)), dtype=np.int32)
        self._ids[: len(first)] = first
        self._counts: I32 = np.zeros(len(self._ids), dtype=np.int32)

    def append(self, token_id: int) -> None:
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token_id
        self._counts[slot] += 1

    def arrays(self) -> tuple[I32, I32]:
        """Views of ids and counts; the next append changes them."""
        size = len(self._slots)
        return self._ids[:size], self._counts[:size]


class BadWords:
    """Which ids would complete a forbidden sequence; sequences match output ids only."""

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        self._single = tuple(word[0] for word in words if len(word) == 1)
        self._by_previous: dict[int, list[tuple[list[int], int]]] = {}
        for word in words:
            if len(word) > 1:
                self._by_previous.setdefault(word[-2], []).append((list(word[:-1]), word[-1]))

    def banned(self, output_ids: list[int]) -> tuple[int, ...]:
        candidates = self._by_previous.get(output_ids[-1]) if output_ids else None
        if not candidates:
            return self._single
        completing = [last for before, last in candidates if output_ids[-len(before) :] == before]
        return self._single + tuple(completing)


class SamplerState:
    """How one output's tokens are drawn: always with the same `scalars`, and, if it `edits_logits`, also with `edits`,
    which may depend on the ids before. Rebuilt by appending the same ids again.

    constraint: the grammar of the output, kept up with by `append`.
    """

    def __init__(
        self,
        resolved: ResolvedParams,
        prompt_token_ids: Sequence[int],
        n_index: int,
        constraint: Constraint | None = None,
    ) -> None:
        self._resolved = resolved
        self.scalars = pack_scalars(resolved, n_index)
        self._count = 0
        self._until_min = tuple(sorted(resolved.eos_ids | resolved.stop_token_ids)) if resolved.min_tokens > 0 else ()
        self._bad_words = BadWords(resolved.bad_words) if resolved.bad_words else None
        self._output_ids: list[int] = []  # kept only for bad words
        self._bias: tuple[I32, F32] | None = None
        if resolved.logit_bias:
            ids, values = zip(*resolved.logit_bias)
            self._bias = np.array(ids, dtype=np.int32), np.array(values, dtype=np.float32)
        allowed = resolved.allowed_token_ids
        self._mask = None if allowed is None else _bitmap(allowed, resolved.vocab_size)
        # Prompt ids matter to the repetition penalty alone: their output count is 0.
        repeated = resolved.repetition_penalty != 1.0
        penalised = repeated or resolved.presence_penalty != 0.0 or resolved.frequency_penalty != 0.0
        self._seen = SeenTokens(prompt_token_ids if repeated else ()) if penalised else None
        self.constraint = constraint
        self._never = tuple(sorted(resolved.eos_ids)) if constraint is not None and resolved.ignore_eos else ()
        parts = (self._bad_words, self._bias, self._mask, self._seen, constraint)
        self.edits_logits = bool(self._until_min) or any(part is not None for part in parts)

    def append(self, token_id: int) -> None:
        """Needed only if it `edits_logits`."""
        self._count += 1
        if self._bad_words is not None:
            self._output_ids.append(token_id)
        if self._seen is not None:
            self._seen.append(token_id)
        if self.constraint is not None:
            self.constraint.append(token_id)

    def _banned(self) -> tuple[int, ...]:
        banned: tuple[int, ...] = self._never
        if self._bad_words is not None:
            banned += self._bad_words.banned(self._output_ids)
        if self._count < self._resolved.min_tokens:
            banned += self._until_min
        return banned

    def edits(self, grammar_mask: U32 | None = None) -> RowEdits:
        """What is done to the logits of the next token.

        grammar_mask: what the constraint, once it has begun, allows; it is narrowed in place. RequestFailedError when
        nothing is left.
        """
        banned = self._banned()
        seen = None if self._seen is None else self._seen.arrays()
        if self.constraint is None:
            return RowEdits(banned, self._bias, seen, self._mask)
        if grammar_mask is None:
            return RowEdits(banned + self.constraint.banned, self._bias, seen, self._mask)
        self.constraint.check()
        if self._mask is not None:
            grammar_mask &= self._mask
        for token_id in banned:
            grammar_mask[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
        if not grammar_mask.any():
            raise RequestFailedError(
                "the grammar leaves no token to draw here: allowed_token_ids, bad_words, min_tokens and ignore_eos "
                "rule out all that it allows, or the model's vocabulary lacks the bytes it wants"
            )
        return RowEdits((), self._bias, seen, grammar_mask)

    def forced(self) -> int | None:
        """The token that is drawn next whatever the logits are, if the grammar forces one and nothing rules it out."""
        token_id = None if self.constraint is None else self.constraint.forced
        if token_id is None or token_id in self._banned():
            return None
        allowed = self._mask is None or int(self._mask[token_id >> 5]) >> (token_id & 31) & 1
        return token_id if allowed else None

    @property
    def complete(self) -> bool:
        """Whether the grammar's text is complete and nothing can follow, so that the output ends here."""
        return self.constraint is not None and self.constraint.done and self._count >= self._resolved.min_tokens

    def prompt_scalars(self, token_id: int) -> bytes:
        """Those of a row that draws nothing, and reports the logprob of the prompt token that follows it."""
        return pack_target(token_id, self._resolved.prompt_logprobs or 0)

    def forced_scalars(self, token_id: int) -> bytes:
        """The same for a token of the output that was not drawn."""
        return pack_target(token_id, self._resolved.logprobs or 0)


def _bitmap(ids: Sequence[int], vocab_size: int) -> U32:
    """Bit i % 32 of word i // 32 is set for each id."""
    bits = np.zeros((vocab_size + 31) // 32 * 32, dtype=np.uint8)
    bits[np.asarray(ids)] = 1
    packed: U32 = np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
    return packed
