"""What a program has written so far, as a backend gets it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Output:
    """Text that the model wrote; ids: its tokens, None where a backend does not tell them."""

    text: str
    ids: tuple[int, ...] | None = None


Part = str | Output


@dataclass(slots=True)
class Prompt:
    """parts: in order. chat: it begins with a turn, whose template writes BOS and the like itself.

    messages: finished turns. open_role: of the turn under way, open_content: what is in it.
    """

    parts: list[Part]
    chat: bool = False
    messages: list[dict[str, str]] = field(default_factory=list)
    open_role: str | None = None
    open_content: str = ""

    @property
    def text(self) -> str:
        return "".join(part if isinstance(part, str) else part.text for part in self.parts)
