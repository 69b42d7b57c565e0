"""What a program has written and found out: text, turns, variables. Knows nothing of how expressions are run."""

from __future__ import annotations

from typing import Any

from octavo.errors import InvalidParameterError
from octavo.lang.prompt import Part, Prompt
from octavo.lang.turns import Turns


class Transcript:
    """turns: what is written around the contents of turns.

    The text before a turn's content is written when the content begins (only then it is known whether the model writes
    it), the text behind it when the next turn begins, or when text follows outside of turns.
    """

    def __init__(self, turns: Turns) -> None:
        self.variables: dict[str, Any] = {}
        self.meta: dict[str, dict[str, Any]] = {}
        self.messages: list[dict[str, str]] = []
        self._turns = turns
        self._parts: list[Part] = []
        self._roles: tuple[str, ...] = ()  # of the turns so far, the open one included once its content has begun
        self._chat = False
        self._open: str | None = None
        self._content: list[str] | None = None  # of the open turn; None before it begins
        self._unclosed = False  # what is behind the last turn is not yet written
        self._scopes: list[tuple[str, list[str]]] = []  # innermost last: the name, and the text inside

    def copy(self) -> Transcript:
        """For a fork; the scopes that are open here stay here."""
        other = Transcript(self._turns)
        other.variables, other.meta = dict(self.variables), dict(self.meta)
        other.messages, other._parts = [dict(message) for message in self.messages], list(self._parts)
        other._roles, other._chat, other._open, other._unclosed = self._roles, self._chat, self._open, self._unclosed
        other._content = None if self._content is None else list(self._content)
        return other

    def text(self) -> str:
        return self.prompt().text + self.pending()

    def pending(self) -> str:
        """What the template puts behind the last turn, as long as nothing follows."""
        return self._turns.closing(self._roles) if self._unclosed else ""

    def prompt(self) -> Prompt:
        return Prompt(list(self._parts), self._chat, list(self.messages), self._open, "".join(self._content or ()))

    def write(self, part: Part) -> None:
        """Text of the program's own, or what the model wrote."""
        if part != "":
            self.before_content(generates=False)
            self._write(part)

    def before_content(self, *, generates: bool) -> str:
        """Writes what the template puts before what comes next, and returns it."""
        if self._open is not None and self._content is None:
            header = self._turns.opening(self._roles, self._open, generates)
            if self._parts:
                if not self._roles:
                    header = header.removeprefix(self._turns.bos())
                elif not self._unclosed:  # text came between the turns
                    header = header.removeprefix(self._turns.closing(self._roles))
            else:
                self._chat = True
            self._roles, self._content, self._unclosed = (*self._roles, self._open), [], False
        elif self._open is None and self._unclosed:
            header, self._unclosed = self._turns.closing(self._roles), False
        else:
            return ""
        if header:
            self._parts.append(header)
        return header

    def _write(self, part: Part) -> None:
        text = part if isinstance(part, str) else part.text
        last = self._parts[-1] if self._parts else None
        if isinstance(part, str) and isinstance(last, str):
            self._parts[-1] = last + part
        else:
            self._parts.append(part)
        if self._content is not None:
            self._content.append(text)
        for _, inside in self._scopes:
            inside.append(text)

    def begin_turn(self, role: str) -> None:
        if self._open is not None:
            raise InvalidParameterError("role", role, f"begun after the end of the {self._open} turn under way")
        self._open = role

    def end_turn(self, role: str) -> None:
        if self._open != role:
            under_way = "there is none" if self._open is None else f"it is {self._open}"
            raise InvalidParameterError("role", role, f"the role of the turn under way; {under_way}")
        self.before_content(generates=False)  # a turn may be empty
        self.messages.append({"role": role, "content": "".join(self._content or ())})
        self._open, self._content, self._unclosed = None, None, True

    def begin_scope(self, name: str) -> None:
        self._scopes.append((name, []))

    def end_scope(self, name: str) -> None:
        found, inside = self._scopes.pop()
        assert found == name
        self.variables[name] = "".join(inside)

    def set(self, name: str | None, value: Any, meta: dict[str, Any]) -> None:
        if name is not None:
            self.meta[name] = meta
            self.variables[name] = value
