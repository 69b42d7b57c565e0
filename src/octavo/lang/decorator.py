"""`@function`: a program, and the ways to run it."""

from __future__ import annotations

import asyncio
import inspect
import secrets
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from typing import Any, overload

from octavo.errors import InvalidParameterError, OctavoError, ProgramError
from octavo.lang.backends.choose import backend_for
from octavo.lang.backends.interface import Backend
from octavo.lang.batch import run_all, stream_all
from octavo.lang.cancellation import Cancellation
from octavo.lang.expressions import Expression
from octavo.lang.feed import Feed
from octavo.lang.interpreter import Interpreter
from octavo.lang.place import caller, raised_at
from octavo.lang.run import Crew, Run, derived_seed
from octavo.lang.sampling import NAMES, run_defaults
from octavo.lang.state import ProgramState, current_state
from octavo.lang.tracing import Argument, Trace, TraceEnd, Tracer
from octavo.lang.transcript import Transcript
from octavo.limits import MIN_CACHED_PREFIX_CHARS

_RESERVED = frozenset({"backend", "stream", "seed"})


class Function:
    """A program: a Python function whose first parameter, `s`, is its state; or one without `s` that returns its text.

    The second kind builds a text and expressions with +, and returns it; it runs when the function has returned.
    Called inside of a program, `f(s, …)` goes on with the state s, `f(…)` runs as a program of its own, and one
    without `s` gives its text and expressions, to be added to a state. Called elsewhere it is `run`.
    """

    def __init__(self, function: Callable[..., Any], bound: Mapping[str, Any] | None = None) -> None:
        self._function = function
        self._bound = dict(bound or {})
        self.__name__ = getattr(function, "__name__", "program")
        self.__doc__ = function.__doc__
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            allowed = "a plain function; `run_async` runs it beside an event loop"
            raise InvalidParameterError("function", self.__name__, allowed)
        parameters = list(inspect.signature(function).parameters.values())
        self.takes_state = bool(parameters) and parameters[0].name == "s"
        self._signature = inspect.Signature(parameters[1:] if self.takes_state else parameters)
        taken = _RESERVED & set(self._signature.parameters)
        if taken:
            raise InvalidParameterError("parameter", min(taken), "another name: `run` has an argument of this one")
        unknown = set(self._bound) - set(self._signature.parameters)
        if unknown:
            raise InvalidParameterError("bind", min(unknown), f"a parameter of {self.__name__}")

    def bind(self, **arguments: Any) -> Function:
        """The program with some of its arguments given."""
        return Function(self._function, {**self._bound, **arguments})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        within = current_state.get()
        if self.takes_state and args and isinstance(args[0], ProgramState):
            return self._function(*args, **{**self._bound, **kwargs})
        if within is not None and not self.takes_state:
            arguments = self._arguments(args, kwargs)
            return self._function(*arguments.args, **arguments.kwargs)
        return self.run(*args, **kwargs)

    # Running

    def run(
        self, *args: Any, backend: Any = None, stream: bool = False, seed: int | None = None, **kwargs: Any
    ) -> ProgramState:
        """Runs the program; raises what goes wrong in it. What is no parameter of it is a default for its gens.

        stream: returns at once, and the state tells its text as it comes; errors are raised by whoever reads it.
        seed: the same seed and arguments have the same answers, bit for bit; None: a fresh one, or inside of another
        program one derived from its.
        """
        state, call = self._prepared(args, kwargs, backend, stream=stream, seed=seed)
        if stream:
            threading.Thread(target=_run_quietly, args=(call,), name="octavo-program", daemon=True).start()
        else:
            call()
        return state

    async def run_async(self, *args: Any, backend: Any = None, seed: int | None = None, **kwargs: Any) -> ProgramState:
        """`run` beside an event loop. When the task is cancelled, the program ends."""
        state, call = self._prepared(args, kwargs, backend, seed=seed)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def work() -> None:
            try:
                call()
            except BaseException as error:
                _tell(loop, done, error)
            else:
                _tell(loop, done, None)

        threading.Thread(target=work, name="octavo-program", daemon=True).start()
        try:
            await done
        except asyncio.CancelledError:
            state._interpreter.run.cancellation.cancel()
            raise
        return state

    def run_batch(
        self,
        batch_kwargs: Iterable[Any],
        *,
        backend: Any = None,
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        precache: bool = True,
        seed: int | None = None,
        **defaults: Any,
    ) -> list[ProgramState] | Generator[ProgramState, None, None]:
        """Runs the program on each of a list of dicts (or of tuples, in the order of its parameters) side by side.

        Returns a state for each, in order; an item that failed has its own error(), which reading it raises.
        generator_style: an iterator over the states instead, which runs no further ahead than there are threads.
        precache: the text that all items begin with is computed first; it is found by running the program once with
        stand-ins for the arguments that differ, up to where it asks about them. seed: of the batch; each item's own
        is derived from it and told by state.seed. Ctrl-C ends all items.
        """
        items = [self._item(item) for item in batch_kwargs]
        chosen = backend_for(backend, self._parent())
        parent = self._parent()
        if seed is None and parent is not None:
            seed = derived_seed(parent.seed, parent._interpreter.child_path())
        base = _seed(seed)
        run_defaults(**defaults)  # what is wrong for all is raised here, not told by each
        if precache and len(items) > 1:
            self._warm(chosen, items)
        crew = Crew()

        def prepared(i: int) -> tuple[ProgramState, Callable[[], None]]:
            state, call = self._prepared(
                (), {**defaults, **items[i]}, chosen, seed=derived_seed(base, f"item {i}"), crew=crew
            )
            return state, lambda: _run_quietly(call)

        if generator_style:
            return stream_all(prepared, len(items), num_threads, crew)
        return run_all(prepared, len(items), num_threads, crew, progress_bar=progress_bar)

    def trace(self, *, backend: Any = None, **kwargs: Any) -> Trace:
        """What the program does up to where it depends on an answer; arguments that are not given are stand-ins."""
        return self._trace(backend_for(backend, self._parent()), kwargs, only_prefix=False)

    def cache(self, backend: Any = None) -> None:
        """Has the backend's prefix cache hold the program's constant beginning."""
        chosen = backend_for(backend, self._parent())
        prefix = self._trace(chosen, {}, only_prefix=True).prefix
        if prefix.text:
            chosen.warm(prefix)

    # How

    def _parent(self) -> ProgramState | None:
        return current_state.get()

    def _arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        return self._signature.bind(*args, **{**self._left(args), **kwargs})

    def _left(self, args: tuple[Any, ...]) -> dict[str, Any]:
        """The bound arguments that are not given by place."""
        by_place = list(self._signature.parameters)[: len(args)]
        return {name: value for name, value in self._bound.items() if name not in by_place}

    def _split(self, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The program's own arguments, and defaults for its gens."""
        own = self._signature.parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in own.values())
        defaults = {name: value for name, value in kwargs.items() if name not in own and name in NAMES}
        given = {name: value for name, value in kwargs.items() if name not in defaults}
        if not takes_any:
            for name in given:
                if name not in own:
                    raise TypeError(f"{self.__name__}() has no parameter {name!r}, and it is no sampling argument")
        return given, defaults

    def _item(self, item: Any) -> dict[str, Any]:
        if isinstance(item, Mapping):
            return dict(item)
        names = [name for name in self._signature.parameters if name not in self._bound]
        if isinstance(item, (tuple, list)) and len(item) <= len(names):
            return dict(zip(names, item))
        raise InvalidParameterError("batch_kwargs", item, f"dicts, or tuples of up to {len(names)} arguments")

    def _prepared(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        backend: Any,
        *,
        stream: bool = False,
        seed: int | None = None,
        crew: Crew | None = None,
    ) -> tuple[ProgramState, Callable[[], None]]:
        """A fresh state, and what runs the program on it."""
        parent = self._parent()
        outer = None if parent is None else parent._interpreter
        if isinstance(outer, Tracer):
            raise TraceEnd
        if seed is None and outer is not None:
            seed = derived_seed(outer.run.seed, outer.child_path())
        run = Run(
            backend_for(backend, parent),
            {} if outer is None else outer.run.defaults,
            _seed(seed),
            streams=stream,
            crew=crew,
            parent=None if outer is None else outer.run,
        )
        transcript = Transcript(run.backend.turns)
        state = ProgramState(Interpreter(run, transcript, "", Feed() if stream else None))
        place = caller()

        def call() -> None:
            state.begin()
            cancellation = outer.run.cancellation if outer is not None else Cancellation()
            error: BaseException | None = None
            try:
                given, defaults = self._split(kwargs)
                run.defaults |= run_defaults(**defaults)
                with cancellation.calls(run.cancellation.cancel):
                    token = current_state.set(state)
                    try:
                        arguments = self._arguments(args, given)
                        self._run_on(state, arguments, place)
                    finally:
                        current_state.reset(token)
            except OctavoError as raised:
                error = _with_place(raised)
            except BaseException as raised:
                error = raised
            error = _settled(run, error)
            state.finish(error)
            if error is not None:
                raise error

        return state, call

    def _run_on(self, state: ProgramState, arguments: inspect.BoundArguments, place: Any) -> None:
        if self.takes_state:
            state.value = self._function(state, *arguments.args, **arguments.kwargs)
            return
        made = self._function(*arguments.args, **arguments.kwargs)
        if not isinstance(made, (str, Expression)):
            allowed = "a text with expressions such as gen(…) in it, as the program takes no state `s`"
            raise InvalidParameterError(f"what {self.__name__} returns", made, allowed)
        state._submit(made, place)
        state.value = state._transcript.text()

    def _trace(
        self, backend: Backend, kwargs: Mapping[str, Any], *, only_prefix: bool, varying: Collection[str] = ()
    ) -> Trace:
        """Stand-ins for the arguments that vary, and for those that neither kwargs nor a default gives."""
        run = Run(backend, {}, 0)
        tracer = Tracer(run, Transcript(backend.turns), only_prefix=only_prefix)
        state = ProgramState(tracer)
        state.begin()
        stand_ins = {
            name: Argument(name)
            for name, parameter in self._signature.parameters.items()
            if name in varying or parameter.default is parameter.empty
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        }
        arguments = self._signature.bind_partial(**{**stand_ins, **self._bound, **kwargs})
        token = current_state.set(state)
        complete = False
        try:
            self._run_on(state, arguments, caller())
            complete = True
        except TraceEnd:
            pass
        except Exception:  # a stand-in is no real argument: what that leads to says nothing of the program
            if not only_prefix:
                raise
        finally:
            current_state.reset(token)
        return tracer.trace(complete)

    def _warm(self, backend: Backend, items: list[dict[str, Any]]) -> None:
        given = {name for item in items for name in item if name in self._signature.parameters}
        constants = {name: items[0][name] for name in given if _is_constant(name, items)}
        try:
            prefix = self._trace(backend, constants, only_prefix=True, varying=given - set(constants)).prefix
            if len(prefix.text) > MIN_CACHED_PREFIX_CHARS:
                backend.warm(prefix)
        except OctavoError:  # each item will meet it, and tell it
            return


def _is_constant(name: str, items: list[dict[str, Any]]) -> bool:
    """Whether all items have the very same argument."""
    value = items[0].get(name, items)
    for item in items:
        other = item.get(name, items)
        if other is items:
            return False
        if other is not value and not (isinstance(value, (str, int, float, bool)) and other == value):
            return False
    return True


def _settled(run: Run, error: BaseException | None) -> BaseException | None:
    """Ends the forks after an error, otherwise waits for them; the first error that nobody was told of."""
    if error is not None:
        run.cancellation.cancel()
    try:
        for fork in list(run.forks):
            unseen = fork.unseen_error()
            if error is None and unseen is not None:
                error = unseen
                run.cancellation.cancel()
    except BaseException as interrupt:  # Ctrl-C while waiting
        run.cancellation.cancel()
        error = error or interrupt
    run.close()
    return error


def _with_place(error: OctavoError) -> OctavoError:
    """An error that names the program's line; one raised before anything was run gets the line it came through."""
    if isinstance(error, ProgramError):
        return error
    place = raised_at(error.__traceback__)
    return error if place is None else ProgramError(place.file, place.line, "", error)


def _run_quietly(call: Callable[[], None]) -> None:
    """For where the state tells the error."""
    try:
        call()
    except BaseException:
        return


def _tell(loop: asyncio.AbstractEventLoop, done: asyncio.Future[None], error: BaseException | None) -> None:
    def tell() -> None:
        if not done.done():
            done.set_result(None) if error is None else done.set_exception(error)

    if not loop.is_closed():
        loop.call_soon_threadsafe(tell)


def _seed(seed: int | None) -> int:
    if seed is None:
        return secrets.randbits(53)
    if type(seed) is not int:
        raise InvalidParameterError("seed", seed, "an integer, or None")
    return seed


@overload
def function(func: Callable[..., Any]) -> Function: ...
@overload
def function(func: None = None) -> Callable[[Callable[..., Any]], Function]: ...
def function(func: Callable[..., Any] | None = None) -> Function | Callable[[Callable[..., Any]], Function]:
    """Makes a program of a Python function; see Function."""
    return Function if func is None else Function(func)
