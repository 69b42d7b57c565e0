"""What a model writes, split into content, reasoning and tool calls while it comes.

The parser is a fold over the text: how the text is cut into pieces changes nothing but the cuts between events. It
looks at each character a bounded number of times and holds back only what may still turn out to be a marker or the head
of a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import NamedTuple

from octavo.chat.formats import ARGS, CALL_ID, ReasoningFormat, ToolFormat
from octavo.chat.json_scan import WHITESPACE, JsonScanner, skip_blank
from octavo.limits import MAX_TOOL_CALL_HEAD_CHARS, MAX_TOOL_NAME_CHARS


class Content(NamedTuple):
    text: str


class Reasoning(NamedTuple):
    text: str


class CallStart(NamedTuple):
    """The `call`-th call of the answer begins."""

    call: int
    id: str
    name: str


class Arguments(NamedTuple):
    """More of the arguments' JSON text, as the model wrote it."""

    call: int
    text: str


Event = Content | Reasoning | CallStart | Arguments
Wait = Generator[None, None, bool]  # its value: whether it came to what it waited for
Sink = Callable[[str], None]

_ARGUMENT_KEYS = ("arguments", "parameters")
_NO_ARGUMENTS = "{}"
_MAX_BLANK = 64  # whitespace before a marker that is held back, to be dropped with it
_NAME = rf"[^\s\[\]{{}}\"]{{1,{MAX_TOOL_NAME_CHARS}}}"
_NAMED_HEAD = re.compile(rf"({_NAME})\s*(?:{re.escape(CALL_ID)}[\w-]{{0,64}}\s*)?(?:{re.escape(ARGS)}\s*)?")
_MAX_NAMED_HEAD = MAX_TOOL_NAME_CHARS + 128


class ChatParser:
    """`push` takes the next piece of text, `finish` says that there is no more; both return what is certain now.

    thinking: the text begins inside the thoughts. names: in the bare format only calls of these are calls, as any JSON
    may stand there. call_id: the id of the call of an index.

    A call starts once its name is known and its arguments begin as an object does. Text that looked like a call and is
    none before that is content, whole; arguments that stop being JSON end there, and what follows is content.
    Whitespace around calls and thoughts is dropped. A call inside thoughts is thought.
    """

    def __init__(
        self,
        tools: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        *,
        thinking: bool = False,
        names: frozenset[str] = frozenset(),
        call_id: Callable[[int], str] = str,
    ) -> None:
        self.thinking = thinking and reasoning is not None
        self.calls = 0  # started so far
        self._tools = tools
        self._reasoning = reasoning
        self._names = names
        self._call_id = call_id
        self._text = ""
        self._at = 0  # in _text: what is before it has been read
        self._ended = False
        # Read, but not yet known to be a call: in _held, and in _text from _held_from on. None: nothing is.
        self._held: list[str] | None = None
        self._held_chars = 0
        self._held_from = 0
        self._events: list[Event] = []
        self._machine = self._read()

    def push(self, text: str) -> list[Event]:
        if self._held is not None:
            self._held.append(self._text[self._held_from : self._at])
            self._held_chars += self._at - self._held_from
            self._held_from = 0
        self._text = self._text[self._at :] + text
        self._at = 0
        return self._resume()

    def finish(self) -> list[Event]:
        self._ended = True
        return self._resume()

    def _resume(self) -> list[Event]:
        next(self._machine, None)
        events, self._events = self._events, []
        return events

    # The machine. `yield` waits for the next piece.

    def _read(self) -> Generator[None, None, None]:
        reasoning = self._reasoning
        if reasoning is not None:
            opened = yield from self._marker(reasoning.opener)  # some repeat what the prompt ended with
            self.thinking = self.thinking or opened
            if self.thinking:
                yield from self._skip_blank()
                yield from self._until(reasoning.closer, self._emit_reasoning)
                self._held = None
                self.thinking = False
                yield from self._skip_blank()
        if self._tools is not None and self._tools.style == "bare" and (yield from self._ahead("{")):
            self._hold("")
            yield from self._bare_calls()
        opener = "" if self._tools is None else self._tools.opener
        while (yield from self._until(opener, self._emit_content)):
            assert self._tools is not None
            if self._tools.style == "tagged":
                yield from self._tagged_call(self._tools.closer)
            elif self._tools.style == "bare":
                yield from self._bare_calls()
            elif (yield from self._next()) == "[":
                yield from self._listed_calls()
            else:
                yield from self._named_call()

    def _tagged_call(self, closer: str) -> Wait:
        if not (yield from self._object()):
            return False
        if not (yield from self._marker(closer)):
            rest = self._text[self._at : self._at + _MAX_BLANK + len(closer)].lstrip(WHITESPACE)
            if not self._ended or not closer.startswith(rest):
                return False
            self._at = len(self._text)  # cut off inside the closer
        return (yield from self._skip_blank())

    def _bare_calls(self) -> Wait:
        while (yield from self._object(self._names)):
            self._hold("")
            if (yield from self._next()) not in (";", ","):
                break
            self._at += 1
            if (yield from self._next()) != "{":
                break
        return self._give_up()

    def _listed_calls(self) -> Wait:
        self._at += 1
        while (yield from self._object()):
            self._hold("")
            separator = yield from self._next()
            if separator == "]":
                self._at += 1
                self._held = None
                return (yield from self._skip_blank())
            if separator != ",":
                break
            self._at += 1
        return self._give_up()

    def _named_call(self) -> Wait:
        while True:
            window = self._text[self._at : self._at + _MAX_NAMED_HEAD]
            brace = window.find("{")
            if brace >= 0 or len(window) == _MAX_NAMED_HEAD or not (yield from self._more()):
                break
        head = _NAMED_HEAD.fullmatch(window, 0, max(brace, 0))
        if head is None:
            return self._give_up()
        self._at += brace
        if not (yield from self._value(self._starts(head[1]))):
            return self._give_up()
        return (yield from self._skip_blank())

    def _object(self, names: frozenset[str] | None = None) -> Wait:
        """A call as `{"name": …, "arguments": {…}}` with its members in any order; others are skipped.

        Where it is none, or stops being one, what is held becomes content. names: no other is a call, nor is one
        without arguments.
        """
        name: str | None = None
        early: list[str] | None = None  # arguments that came before the name
        if (yield from self._next()) != "{":
            return self._give_up()
        self._at += 1
        closes = (yield from self._next()) == "}"
        while not closes:
            if (yield from self._next()) != '"' or (key := (yield from self._string())) is None:
                return self._give_up()
            if (yield from self._next()) != ":":
                return self._give_up()
            self._at += 1
            first = yield from self._next()
            if key == "name" and name is None:
                name = (yield from self._string()) if first == '"' else None
                if name is None or not _can_be_a_name(name) or (names is not None and name not in names):
                    return self._give_up()
                if early is not None:
                    self._start(name)
                    self._emit_arguments("".join(early))
            elif key in _ARGUMENT_KEYS and early is None and self._held is not None:
                if first not in ("{", "n"):
                    return self._give_up()
                early = []
                if name is not None and first == "{":
                    if not (yield from self._value(self._starts(name))):
                        return self._give_up()
                elif not (yield from self._value(early.append if first == "{" else _ignore)):
                    return self._give_up()
                elif first == "n":
                    early = [_NO_ARGUMENTS]
                    if name is not None:
                        self._start(name)
                        self._emit_arguments(_NO_ARGUMENTS)
            elif not (yield from self._value(_ignore)):
                return self._give_up()
            separator = yield from self._next()
            if separator not in (",", "}"):
                return self._give_up()
            closes = separator == "}"
            self._at += not closes
        self._at += 1
        if self._held is not None:
            if name is None or names is not None:
                return self._give_up()
            self._start(name)
            self._emit_arguments(_NO_ARGUMENTS)
        return True

    # What may be a call

    def _hold(self, marker: str) -> None:
        self._held = [marker]
        self._held_chars = 0
        self._held_from = self._at

    def _start(self, name: str) -> None:
        self._held = None
        self._events.append(CallStart(self.calls, self._call_id(self.calls), name))
        self.calls += 1

    def _starts(self, name: str) -> Sink:
        """A sink for arguments that starts the call as soon as more than a brace of them is there."""
        begun: list[str] = []

        def sink(text: str) -> None:
            if self._held is None:
                self._emit_arguments(text)
                return
            more = text if begun else text[1:]
            begun.append(text)
            if more.strip(WHITESPACE):
                self._start(name)
                self._emit_arguments("".join(begun))

        return sink

    def _give_up(self) -> bool:
        """What is held is content; whitespace at the very end belongs to the calls before it."""
        if self._held is not None:
            text = "".join(self._held) + self._text[self._held_from : self._at]
            self._held = None
            if not (self._ended and self._at == len(self._text) and not text.strip()):
                self._emit_content(text)
        return False

    # Reading

    def _more(self) -> Wait:
        """Waits for more text; False where there is none to come."""
        if self._ended:
            return False
        yield
        return True

    def _end(self) -> int:
        """Where reading must stop for now: at the end of the text, or where a held call becomes too long to be one."""
        if self._held is None:
            return len(self._text)
        return min(len(self._text), self._held_from + MAX_TOOL_CALL_HEAD_CHARS - self._held_chars)

    def _next(self) -> Generator[None, None, str]:
        """The next character that is no whitespace, not consumed; "" where there is none."""
        while True:
            end = self._end()
            self._at = skip_blank(self._text, self._at, end)
            if self._at < end:
                return self._text[self._at]
            if end < len(self._text) or not (yield from self._more()):
                return ""

    def _value(self, sink: Sink, most: int | None = None) -> Wait:
        """Reads a JSON value into `sink`, of no more than `most` characters."""
        scanner = JsonScanner()
        while True:
            end = self._end() if most is None else min(self._end(), self._at + most)
            if self._at == end < len(self._text):
                return False
            stop = scanner.scan(self._text, self._at, end)
            if stop > self._at:
                sink(self._text[self._at : stop])
            if most is not None:
                most -= stop - self._at
            self._at = stop
            if scanner.done or scanner.failed:
                return scanner.done
            if stop == len(self._text) and not (yield from self._more()):
                return False

    def _string(self) -> Generator[None, None, str | None]:
        pieces: list[str] = []
        if not (yield from self._value(pieces.append, MAX_TOOL_CALL_HEAD_CHARS)):
            return None
        text: str = json.loads("".join(pieces), strict=False)
        return text

    def _skip_blank(self) -> Wait:
        while True:
            self._at = skip_blank(self._text, self._at, len(self._text))
            if self._at < len(self._text) or not (yield from self._more()):
                return True

    def _ahead(self, marker: str) -> Wait:
        """Whether the text goes on with this, behind some whitespace. Nothing is consumed."""
        while True:
            start = skip_blank(self._text, self._at, len(self._text))
            found = self._text[start : start + len(marker)]
            if start - self._at > _MAX_BLANK or not marker.startswith(found):
                return False
            if found == marker:
                return True
            if not (yield from self._more()):
                return False

    def _marker(self, marker: str) -> Wait:
        """As _ahead, but what was found is consumed."""
        found = yield from self._ahead(marker)
        if found:
            self._at = self._text.index(marker, self._at) + len(marker)
        return found

    def _until(self, marker: str, emit: Sink) -> Wait:
        """Hands on the text up to the marker, which is consumed and held with the whitespace before it.

        False: there is none, and all was handed on. Without a marker it is all text.
        """
        while True:
            found = self._text.find(marker, self._at) if marker else -1
            end = len(self._text) - self._overlap(marker) if found < 0 else found
            kept = end
            if marker:
                first = max(self._at, end - _MAX_BLANK)
                while kept > first and self._text[kept - 1] in WHITESPACE:
                    kept -= 1
            emit(self._text[self._at : kept])
            self._at = kept
            if found >= 0:
                blank = self._text[kept:found]
                self._at = found + len(marker)
                self._hold(blank + marker)
                return True
            if not (yield from self._more()):
                emit(self._text[self._at :])
                self._at = len(self._text)
                return False

    def _overlap(self, marker: str) -> int:
        """How many characters at the end of the text may be the beginning of the marker."""
        if not marker:
            return 0
        start = self._text.find(marker[0], max(self._at, len(self._text) - len(marker) + 1))
        while start >= 0 and not marker.startswith(self._text[start:]):
            start = self._text.find(marker[0], start + 1)
        return len(self._text) - start if start >= 0 else 0

    # Telling

    def _emit_content(self, text: str) -> None:
        if text:
            last = self._events[-1] if self._events else None
            if isinstance(last, Content):
                self._events[-1] = Content(last.text + text)
            else:
                self._events.append(Content(text))

    def _emit_reasoning(self, text: str) -> None:
        if text:
            self._events.append(Reasoning(text))

    def _emit_arguments(self, text: str) -> None:
        self._events.append(Arguments(self.calls - 1, text))


def _can_be_a_name(text: str) -> bool:
    """Escapes in JSON can spell half a character, which no answer can hold."""
    return 0 < len(text) <= MAX_TOOL_NAME_CHARS and not any("\ud800" <= char <= "\udfff" for char in text)


def _ignore(text: str) -> None:
    pass
