"""What a ChatParser made of a text, put together again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from octavo.chat.formats import ReasoningFormat, ToolFormat
from octavo.chat.parser import Arguments, CallStart, ChatParser, Content, Event, Reasoning


@dataclass
class Heard:
    """calls: name and arguments' text of each; ids of the calls in their order."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> Heard:
        for event in events:
            if isinstance(event, Content):
                assert event.text
                self.content += event.text
            elif isinstance(event, Reasoning):
                assert event.text
                self.reasoning += event.text
            elif isinstance(event, CallStart):
                assert event.call == len(self.calls)
                self.calls.append([event.name, ""])
                self.ids.append(event.id)
            else:
                assert isinstance(event, Arguments)
                assert event.text
                assert event.call == len(self.calls) - 1
                self.calls[-1][1] += event.text
        return self


def parse(
    pieces: str | Iterable[str], tools: ToolFormat | None, reasoning: ReasoningFormat | None = None, **options: Any
) -> Heard:
    parser = ChatParser(tools, reasoning, **options)
    heard = Heard()
    for piece in [pieces] if isinstance(pieces, str) else pieces:
        heard.add(parser.push(piece))
    return heard.add(parser.finish())
