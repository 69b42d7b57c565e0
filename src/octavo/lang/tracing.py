"""Runs a program without a model, with stand-ins for its arguments: shows what it writes, finds its constant prefix."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NoReturn

from octavo.lang.expressions import (
    Expression,
    Gen,
    Joined,
    ScopeBegin,
    ScopeEnd,
    Select,
    SetVariable,
    Turn,
    TurnBegin,
    TurnEnd,
)
from octavo.lang.feed import Feed
from octavo.lang.place import Place
from octavo.lang.prompt import Prompt
from octavo.lang.run import Run
from octavo.lang.transcript import Transcript

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"  # noncharacters: no text has them
_STAND_IN = re.compile(f"{_OPEN}(.*?){_CLOSE}", re.DOTALL)


class TraceEnd(BaseException):
    """The program asks what only a run can tell. Not an Exception: the program must not catch it."""


class Argument(str):
    """Stands for an argument or for what the model will have written. As text it is a mark; else the trace ends."""

    _name: str

    def __new__(cls, name: str) -> Argument:
        made = super().__new__(cls, f"{_OPEN}{name}{_CLOSE}")
        made._name = name
        return made

    def __str__(self) -> str:
        return f"{_OPEN}{self._name}{_CLOSE}"

    def __repr__(self) -> str:
        return str(self)

    def __format__(self, spec: str) -> str:
        return str(self)

    def __getitem__(self, key: Any) -> Argument:
        return Argument(f"{self._name}[{key!r}]")

    def __getattr__(self, name: str) -> NoReturn:
        raise TraceEnd


def _unknown(*_: Any, **__: Any) -> NoReturn:
    raise TraceEnd


for _method in (
    *(name for name in dir(str) if not name.startswith("_")),
    *("__bool__", "__len__", "__iter__", "__contains__", "__hash__", "__int__", "__float__", "__index__", "__call__"),
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__mul__", "__rmul__", "__mod__"),
):
    setattr(Argument, _method, _unknown)


@dataclass(frozen=True, slots=True)
class Node:
    """One thing a program does: kind "text", "gen", "select", "begin", "end" or "set"."""

    kind: str
    text: str
    place: Place


@dataclass(slots=True)
class Trace:
    """nodes: as far as the program goes without answers. prefix: what it writes before anything that may differ."""

    nodes: list[Node]
    prefix: Prompt
    complete: bool


class Tracer:
    """Executes expressions by writing them down. only_prefix: ends the trace at the first thing that may differ."""

    def __init__(self, run: Run, transcript: Transcript, *, only_prefix: bool) -> None:
        self.run = run
        self.transcript = transcript
        self.path = ""
        self.feed: Feed | None = None
        self.nodes: list[Node] = []
        self.prefix: Prompt | None = None
        self._only_prefix = only_prefix

    def child_path(self) -> NoReturn:
        raise TraceEnd

    def execute(self, item: str | Expression, place: Place) -> None:
        if isinstance(item, str):
            self._text(str(item), place)
        elif isinstance(item, Joined):
            for each in item.items:
                self.execute(each, item.place)
        elif isinstance(item, Turn):
            self.execute(TurnBegin(role=item.role, place=item.place), place)
            self.execute(item.content, item.place)
            self.execute(TurnEnd(role=item.role, place=item.place), place)
        elif isinstance(item, (Gen, Select)):
            self.transcript.before_content(generates=True)
            self._end_prefix()
            self._node("gen" if isinstance(item, Gen) else "select", item.name or "", item.place)
            self.transcript.write(str(Argument(item.name or "")))
            self.transcript.set(item.name, Argument(item.name or ""), {})
        elif isinstance(item, TurnBegin):
            self._node("begin", item.role, item.place)
            self.transcript.begin_turn(item.role)
        elif isinstance(item, TurnEnd):
            self._node("end", item.role, item.place)
            self.transcript.end_turn(item.role)
        elif isinstance(item, SetVariable):
            self._node("set", item.name, item.place)
            self.transcript.set(item.name, item.value, {})
        elif isinstance(item, ScopeBegin):
            self.transcript.begin_scope(item.name)
        elif isinstance(item, ScopeEnd):
            self.transcript.end_scope(item.name)

    def _node(self, kind: str, text: str, place: Place) -> None:
        self.nodes.append(Node(kind, _STAND_IN.sub(r"{\1}", text), place))

    def _text(self, text: str, place: Place) -> None:
        self._node("text", text, place)
        if text:
            self.transcript.before_content(generates=False)
        known, mark, rest = text.partition(_OPEN)
        self.transcript.write(known)
        if mark:
            self._end_prefix()
            self.transcript.write(mark + rest)

    def _end_prefix(self) -> None:
        if self.prefix is None:
            self.prefix = self.transcript.prompt()
            if self._only_prefix:
                raise TraceEnd

    def trace(self, complete: bool) -> Trace:
        return Trace(self.nodes, self.transcript.prompt() if self.prefix is None else self.prefix, complete)
