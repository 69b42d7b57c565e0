"""When an output ends, and which of its text may be shown: a fold over token ids and text deltas."""

from __future__ import annotations

from octavo.sampling.resolve import ResolvedParams


class _Matcher:
    """Finds one stop string in a stream of characters (Knuth, Morris and Pratt 1977)."""

    __slots__ = ("_borders", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # the longest suffix of the stream that begins `text`, in characters; all of it: found here
        self._borders = [0] * len(text)  # of text[: i + 1]: its longest proper suffix that begins it
        k = 0
        for i in range(1, len(text)):
            while k > 0 and text[i] != text[k]:
                k = self._borders[k - 1]
            k += text[i] == text[k]
            self._borders[i] = k

    def push(self, character: str) -> bool:
        """Whether the stop string ends at this character."""
        k = self.matched
        if k == len(self.text):
            k = self._borders[k - 1]
        while k > 0 and self.text[k] != character:
            k = self._borders[k - 1]
        self.matched = k + 1 if self.text[k] == character else 0
        return self.matched == len(self.text)

    def pending(self) -> int:
        """Characters at the end of the stream that may still become the stop string."""
        return self.matched if self.matched < len(self.text) else self._borders[-1]


class StopChecker:
    """Decides after each token whether the output ends.

    Text is held back while it may be the beginning of a stop string, so that no character of one, nor any after it, is
    ever shown; all else is. Of stop strings the one completed first counts; of several completed by the same
    character, the longest. The text shown does not depend on how it was cut in deltas.
    """

    def __init__(self, resolved: ResolvedParams) -> None:
        self._resolved = resolved
        self._matchers = [_Matcher(text) for text in resolved.stop]
        self._held = ""
        self._count = 0

    def pass_over(self, tokens: int) -> None:
        """Counts tokens in that neither end the output nor, as there are no stop strings, need their text looked at."""
        self._count += tokens

    def push(self, token_id: int, delta: str, complete: bool = False) -> tuple[str, str | None, int | str | None]:
        """Folds one token and the text it adds; returns (text to show, finish_reason, stop_reason).

        finish_reason: None while running, "stop" or "length". stop_reason: the stop string or stop token id; None for
        an end-of-sequence token. The text of a token that ends the output is dropped unless
        include_stop_str_in_output. Nothing may be pushed after the end. complete: nothing can follow this token.
        """
        resolved = self._resolved
        self._count += 1
        ended, stop_id = self._ends_by_token(token_id)
        if ended and not resolved.include_stop_str_in_output:
            delta = ""
        if self._matchers and delta:
            found = self._scan(delta)
            if found is not None:
                return self._finish(), "stop", found
        else:
            self._held += delta
        if ended:
            return self._finish(), "stop", stop_id
        if complete:
            return self._finish(), "stop", None
        if self._count >= resolved.max_tokens:
            return self._finish(), "length", None
        pending = max((matcher.pending() for matcher in self._matchers), default=0)
        shown = len(self._held) - pending
        text, self._held = self._held[:shown], self._held[shown:]
        return text, None, None

    def silences(self, token_id: int) -> bool:
        """Whether this token, if it comes next, ends the output and its own text is not shown."""
        if self._resolved.include_stop_str_in_output or self._count < self._resolved.min_tokens:
            return False
        ends = token_id in self._resolved.eos_ids and not self._resolved.ignore_eos
        return ends or token_id in self._resolved.stop_token_ids

    def _ends_by_token(self, token_id: int) -> tuple[bool, int | None]:
        """min_tokens is of tokens before it: while it is not reached these ids are masked, and ignored if they come."""
        if self._count <= self._resolved.min_tokens:
            return False, None
        if token_id in self._resolved.eos_ids and not self._resolved.ignore_eos:
            return True, None
        if token_id in self._resolved.stop_token_ids:
            return True, token_id
        return False, None

    def _scan(self, delta: str) -> str | None:
        """Takes the delta in up to the first stop string that counts, cuts what must not be shown, and returns it."""
        counts = self._count >= self._resolved.min_tokens
        for i, character in enumerate(delta):
            found = [matcher.text for matcher in self._matchers if matcher.push(character)]
            if found and counts:
                stop = max(found, key=len)
                self._held += delta[: i + 1]
                if not self._resolved.include_stop_str_in_output:
                    self._held = self._held[: -len(stop)]
                return stop
        self._held += delta
        return None

    def _finish(self) -> str:
        text, self._held = self._held, ""
        return text
