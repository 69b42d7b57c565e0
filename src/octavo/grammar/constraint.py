"""What a grammar allows next: a fold over an output's token ids."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from octavo.errors import RequestFailedError

if TYPE_CHECKING:
    from octavo.grammar.compiler import Grammar


class Constraint:
    """The state of one output's grammar; rebuilt by appending the same ids again.

    At a point where the grammar forces bytes, the tokens that spell them are `forced`, one after the other, up to the
    end of that run: a run is looked for only where none is under way, so it is the same wherever the output was cut
    and whether its tokens are drawn or appended. `begun`: whether the constraint holds yet (see start_after);
    `done`: the text is complete, and nothing can follow it.
    """

    __slots__ = ("_eos_ids", "_forced", "_marker", "_matched", "_use", "begun", "done", "matcher", "vocabulary")

    def __init__(self, grammar: Grammar) -> None:
        self.matcher = grammar.matcher.deep_copy()
        self.vocabulary = grammar.vocabulary
        self._use = grammar.use
        self._eos_ids = grammar.vocabulary.eos_ids
        self._forced: deque[int] = deque()
        self._marker = grammar.marker
        self._matched = 0  # bytes of the marker
        self.begun = grammar.marker is None
        self.done = False
        if self.begun:
            self._look_ahead()

    def append(self, token_id: int) -> None:
        """Raises RequestFailedError for a token that the grammar does not allow, or if it gets too complex."""
        if not self.begun:
            assert self._marker is not None
            matched = self._marker.push(self._matched, token_id)
            if matched is None:
                self.begun = True
                self._look_ahead()
            else:
                self._matched = matched
            return
        if token_id in self._eos_ids:
            return  # the end: nothing may follow
        if self._forced and self._forced.popleft() != token_id:
            self._forced.clear()
        self._use.tokens += 1
        if not self.matcher.consume_token(token_id):
            raise RequestFailedError(f"the grammar does not allow token {token_id} here: {self._problem()}")
        if not self._forced:
            self._look_ahead()

    def _look_ahead(self) -> None:
        if self.matcher.is_stopped():
            self.check()
            self.done = True
        else:
            forced = self.matcher.compute_ff_tokens()
            self.check()
            if forced:  # a vocabulary without all bytes can't spell every text: only as far as it does
                self._forced.extend(forced[: self.matcher.validate_tokens(forced)])

    def check(self) -> None:
        """Raises RequestFailedError if the matcher came upon a limit."""
        if self.matcher.is_error():
            self._use.failed = True
            raise RequestFailedError(f"the grammar can't be followed any further: {self._problem()}")

    def _problem(self) -> str:
        lines = self.matcher.get_error().splitlines()
        if not lines:
            return "the output is already complete"
        return "no token of the vocabulary can come next" if lines[0].startswith("NoExtension") else lines[0][:200]

    @property
    def forced(self) -> int | None:
        """The only token that may come next, if a forced run is under way."""
        return self._forced[0] if self._forced else None

    @property
    def banned(self) -> tuple[int, ...]:
        """Before the constraint has begun: tokens that must not come, among them the end."""
        assert self._marker is not None
        return (*self._eos_ids, *self._marker.overruns(self._matched))
