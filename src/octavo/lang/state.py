"""The state of a running program: what `s` is."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Protocol

from octavo.errors import InvalidParameterError, OctavoError, ProgramCancelledError
from octavo.lang.expressions import (
    Expression,
    ScopeBegin,
    ScopeEnd,
    SetVariable,
    TurnBegin,
    TurnEnd,
    set_var,
    turn,
)
from octavo.lang.feed import Feed
from octavo.lang.interpreter import Interpreter
from octavo.lang.place import Place, caller
from octavo.lang.run import Run
from octavo.lang.transcript import Transcript
from octavo.limits import MAX_FORKS


class Executes(Protocol):
    """Runs one expression after another on a transcript."""

    run: Run
    transcript: Transcript
    path: str
    feed: Feed | None

    def child_path(self) -> str: ...
    def execute(self, item: str | Expression, place: Place) -> None: ...


class ProgramState:
    """`s += text or expression` runs it; `s[name]` is what a gen, a select or set_var named.

    A program's own state runs each expression before the next line of the program. A fork's runs them behind the
    program's back, in order, on one of the run's threads; whoever reads something of a fork waits for it. An error is
    raised by the line that fails, or for a fork by the first line that touches it afterwards; it is a ProgramError that
    names the line of the expression.
    """

    def __init__(self, interpreter: Executes, *, is_fork: bool = False) -> None:
        self._interpreter = interpreter
        self._transcript = interpreter.transcript
        self._is_fork = is_fork
        self._changed = threading.Condition()
        self._queue: deque[tuple[str | Expression, Place]] = deque()
        self._busy = not is_fork  # a fork: its queue is being run; else: its program runs
        self._program_thread: int | None = None
        self._error: BaseException | None = None
        self._error_seen = False
        self.value: Any = None  # what the program's function returned

    # Writing

    def __iadd__(self, item: Any) -> ProgramState:
        if not isinstance(item, (str, Expression)):
            raise InvalidParameterError("s +=", item, "a text or an expression such as gen(…)")
        self._submit(item, caller())
        return self

    def _submit(self, item: str | Expression, place: Place) -> None:
        if not self._is_fork:
            self._interpreter.execute(item, place)
            with self._changed:
                self._changed.notify_all()
            return
        with self._changed:
            self._raise_error()
            self._queue.append((item, place))
            if self._busy:
                return
            self._busy = True
            self._interpreter.run.forks[self] = None
        self._interpreter.run.crew.submit(self._run_queue)

    def _run_queue(self) -> None:
        while True:
            with self._changed:
                self._changed.notify_all()
                if not self._queue:
                    self._busy = False
                    if self._error is None and self._interpreter.feed is None:
                        self._interpreter.run.forks.pop(self, None)
                    return
                item, place = self._queue.popleft()
            try:
                self._interpreter.execute(item, place)
            except BaseException as error:
                with self._changed:
                    self._error = error.with_traceback(None)
                    self._queue.clear()

    def set_var(self, name: str, value: Any) -> None:
        self._submit(set_var(name, value), caller())

    def var_scope(self, name: str) -> _Block:
        """`with s.var_scope(name):` keeps the text written inside as s[name]."""
        place = caller()
        return _Block(self, ScopeBegin(name=name, place=place), ScopeEnd(name=name, place=place))

    def system(self, content: str | Expression | None = None) -> Any:
        """`s.system(text)`, or `with s.system():` for what is written inside."""
        return self._turn("system", content)

    def user(self, content: str | Expression | None = None) -> Any:
        return self._turn("user", content)

    def assistant(self, content: str | Expression | None = None) -> Any:
        return self._turn("assistant", content)

    def _turn(self, role: str, content: str | Expression | None) -> Any:
        place = caller()
        if content is None:
            return _Block(self, TurnBegin(role=role, place=place), TurnEnd(role=role, place=place))
        self._submit(turn(role, content), place)
        return None

    def system_begin(self) -> None:
        self._mark(TurnBegin, "system")

    def system_end(self) -> None:
        self._mark(TurnEnd, "system")

    def user_begin(self) -> None:
        self._mark(TurnBegin, "user")

    def user_end(self) -> None:
        self._mark(TurnEnd, "user")

    def assistant_begin(self) -> None:
        self._mark(TurnBegin, "assistant")

    def assistant_end(self) -> None:
        self._mark(TurnEnd, "assistant")

    def _mark(self, kind: type[TurnBegin] | type[TurnEnd], role: str) -> None:
        place = caller()
        self._submit(kind(role=role, place=place), place)

    # Reading

    def __getitem__(self, name: str) -> Any:
        """The variable. Waits for it while the program is still under way; KeyError if it never comes."""
        variables = self._transcript.variables
        self._wait(lambda: name in variables)
        if name not in variables:
            self._raise_error()
            raise KeyError(f"no variable {name!r}; there are: {', '.join(variables) or 'none'}")
        return variables[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._submit(set_var(name, value), caller())

    def get_var(self, name: str) -> Any:
        return self[name]

    def __contains__(self, name: str) -> bool:
        self.sync()
        return name in self._transcript.variables

    def get_meta_info(self, name: str) -> dict[str, Any]:
        """What is known beside the text of a gen or select: finish_reason, seed, tokens, logprobs, scores."""
        self[name]
        return self._transcript.meta.get(name, {})

    def text(self) -> str:
        """All that was written, what the chat template puts around turns included."""
        self.sync()
        return self._transcript.text()

    def messages(self) -> list[dict[str, str]]:
        """The finished turns."""
        self.sync()
        return [dict(message) for message in self._transcript.messages]

    def sync(self) -> None:
        """Waits until all that was asked for is done. Raises what went wrong."""
        self._wait(lambda: False)
        self._raise_error()

    def error(self) -> BaseException | None:
        """What ended the program, instead of raising it; for the states of a batch."""
        self._wait(lambda: False)
        self._error_seen = True
        return self._error

    @property
    def seed(self) -> int:
        """`run(seed=…)` with it and the same arguments has the same answers."""
        return self._interpreter.run.seed

    def text_iter(self, var_name: str | None = None) -> Generator[str, None, None]:
        """The text as it comes, of the whole program or of one variable; after run(stream=True)."""
        return (piece.text for piece in self._streamed().read(var_name))

    async def text_async_iter(
        self, var_name: str | None = None, return_meta_data: bool = False
    ) -> AsyncGenerator[Any, None]:
        """Like text_iter; return_meta_data: (text, get_meta_info of its variable as far as it is known)."""
        async for piece in self._streamed().read_async(var_name):
            yield (piece.text, self._transcript.meta.get(piece.name or "", {})) if return_meta_data else piece.text

    def _streamed(self) -> Feed:
        if self._interpreter.feed is None:
            raise InvalidParameterError("stream", False, "true in `run`, for a text that can be read as it comes")
        return self._interpreter.feed

    def _wait(self, until: Callable[[], bool]) -> None:
        if not self._is_fork and threading.get_ident() == self._program_thread:
            return
        with self._changed:
            self._changed.wait_for(lambda: until() or not self._busy)

    def _raise_error(self) -> None:
        if self._error is not None:
            self._error_seen = True
            raise self._error

    # Forks

    def fork(self, size: int = 1) -> ProgramStateGroup:
        """`size` states that go on from here side by side; what is written so far is computed once."""
        if type(size) is not int or not 1 <= size <= MAX_FORKS:
            raise InvalidParameterError("size", size, f"an integer from 1 to {MAX_FORKS}")
        self.sync()
        run, path = self._interpreter.run, self._interpreter.child_path()
        children = []
        for i in range(size):
            feed = Feed() if run.streams else None
            inner = Interpreter(run, self._transcript.copy(), f"{path}.{i}", feed)
            children.append(ProgramState(inner, is_fork=True))
        if run.streams:  # whoever reads them waits for the end of the run
            run.forks.update(dict.fromkeys(children))
        return ProgramStateGroup(children, self)

    def copy(self) -> _Copy:
        """`with s.copy() as other:` is a fork of one, joined at the end."""
        return _Copy(self.fork(1))

    # Beginning and end, for the decorator

    def begin(self) -> None:
        """The program runs on this thread, which waits for nothing of its own."""
        self._program_thread = threading.get_ident()

    def finish(self, error: BaseException | None = None) -> None:
        """The program has ended: nobody waits any more."""
        with self._changed:
            self._error, self._busy = error, False
            self._changed.notify_all()
        self._end_feed()

    def unseen_error(self) -> BaseException | None:
        """Waits for a fork; what ended it, if nobody has been told."""
        self._wait(lambda: False)
        self._end_feed()
        return None if self._error_seen or isinstance(self._error, ProgramCancelledError) else self._error

    def _end_feed(self) -> None:
        feed = self._interpreter.feed
        if feed is not None:
            if self._error is None:
                feed.push(None, self._transcript.pending())
            feed.end(self._error)

    def __repr__(self) -> str:
        return f"ProgramState(variables={list(self._transcript.variables)}, error={self._error!r})"


# The state whose program runs in this context: what a program called inside of another one belongs to.
current_state: ContextVar[ProgramState | None] = ContextVar("current_state", default=None)


class _Block:
    """Two expressions around what a `with` holds."""

    def __init__(self, state: ProgramState, begin: Expression, end: Expression) -> None:
        self._state, self._begin, self._end = state, begin, end

    def __enter__(self) -> ProgramState:
        self._state._submit(self._begin, self._begin.place)
        return self._state

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._state._submit(self._end, self._end.place)
        except OctavoError:
            if value is None:
                raise


class ProgramStateGroup:
    """The states of one fork, in order."""

    def __init__(self, states: Sequence[ProgramState], source: ProgramState) -> None:
        self.states = list(states)
        self._source = source
        self._before = set(source._transcript.variables)

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, index: int) -> ProgramState:
        return self.states[index]

    def __setitem__(self, index: int, state: ProgramState) -> None:
        """What `forks[i] += …` ends with; a fork cannot be another one."""
        if state is not self.states[index]:
            raise InvalidParameterError(f"forks[{index}]", state, "the same fork: `forks[i] += …` is what adds to it")

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self.states)

    def __iadd__(self, other: Any) -> ProgramStateGroup:
        """One expression for all, a list with one for each, or a function of (index, state) that gives one."""
        if callable(other):
            items = [other(i, state) for i, state in enumerate(self.states)]
        elif isinstance(other, (list, tuple)):
            items = list(other)
        else:
            items = [other] * len(self.states)
        if len(items) != len(self.states):
            raise InvalidParameterError("forks +=", f"{len(items)} items", f"one for each of {len(self.states)} forks")
        for i, item in enumerate(items):
            self.states[i] += item
        return self

    def join(self, mode: str = "gather_variable") -> None:
        """Waits for all. Each variable that a fork has set is a list in the state they come from: an entry a fork, in
        order, None where it did not set it. Raises the first fork's error."""
        if mode != "gather_variable":
            allowed = '"gather_variable"; the KV of forks is not joined, as that is another text than was computed'
            raise InvalidParameterError("mode", mode, allowed)
        for state in self.states:
            state.sync()
        found = [state._transcript.variables for state in self.states]
        names = dict.fromkeys(
            name
            for variables in found
            for name in variables
            if name not in self._before or variables[name] is not self._source._transcript.variables.get(name)
        )
        place = caller()
        for name in names:
            values = [variables.get(name) for variables in found]
            self._source._submit(SetVariable(name=name, value=values, place=place), place)


class _Copy:
    def __init__(self, group: ProgramStateGroup) -> None:
        self._group = group

    def __enter__(self) -> ProgramState:
        return self._group[0]

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if value is None:
            self._group.join()
