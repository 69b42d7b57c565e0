"""What a program adds to its state: expressions, which do nothing until a state runs them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from octavo import limits
from octavo.errors import InvalidParameterError
from octavo.lang.place import Place, caller
from octavo.lang.sampling import gen_params
from octavo.lang.typed import DTYPES, constraint

ROLES = ("system", "user", "assistant")

# How a select picks; see lang/choices.py.
token_length_normalized = "token_length_normalized"
greedy_token_selection = "greedy_token_selection"
unconditional_likelihood_normalized = "unconditional_likelihood_normalized"
_METHODS = (token_length_normalized, greedy_token_selection, unconditional_likelihood_normalized)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expression:
    """`place`: the line of the program that made it. Texts and expressions are joined with +."""

    place: Place

    def __add__(self, other: Any) -> Joined:
        if not isinstance(other, (str, Expression)):
            return NotImplemented
        return Joined(items=(*_items(self), *_items(other)), place=self.place)

    def __radd__(self, other: Any) -> Joined:
        if not isinstance(other, str):
            return NotImplemented
        return Joined(items=(other, *_items(self)), place=self.place)


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined(Expression):
    items: tuple[str | Expression, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gen(Expression):
    """params: what was given, as arguments of SamplingParams."""

    name: str | None
    params: dict[str, Any]
    dtype: type | None = None

    def __str__(self) -> str:
        return f"gen({self.name!r})" if self.name is not None else "gen()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Select(Expression):
    name: str | None
    choices: tuple[str, ...]
    method: str

    def __str__(self) -> str:
        return f"select({self.name!r})" if self.name is not None else "select()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn(Expression):
    """A whole turn of a conversation."""

    role: str
    content: str | Expression


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnBegin(Expression):
    role: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnd(Expression):
    role: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetVariable(Expression):
    name: str
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeBegin(Expression):
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeEnd(Expression):
    name: str


def _items(item: str | Expression) -> tuple[str | Expression, ...]:
    return item.items if isinstance(item, Joined) else (item,)


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    n: int | None = None,
    stop: str | list[str] | None = None,
    temperature: float | None = None,
    regex: str | None = None,
    json_schema: dict[str, Any] | str | None = None,
    choices: Iterable[str] | None = None,
    choices_method: str | None = None,
    dtype: type | None = None,
    **sampling: Any,
) -> Expression:
    """Has the model write, and keeps what it wrote as `state[name]`.

    sampling: every other argument of SamplingParams, also under SGLang's names (max_new_tokens, return_logprob …);
    what is not given comes from `run`. n: state[name] is then a list, and the program goes on behind the first.
    regex, json_schema, dtype (int, float, bool, str), choices (then it is a `select`): at most one. With a dtype
    state[name] has that type; the text of a str is a JSON string. Raises InvalidParameterError.
    """
    _check_name(name)
    forms = {"regex": regex, "json_schema": json_schema, "choices": choices, "dtype": dtype}
    forms["structured"] = sampling.pop("structured", None)
    given = [form for form, value in forms.items() if value is not None]
    if len(given) > 1:
        raise InvalidParameterError(given[1], forms[given[1]], f"at most one constraint; there is {given[0]} already")
    params = gen_params(max_tokens=max_tokens, n=n, stop=stop, temperature=temperature, **sampling)
    if choices is not None:
        return select(name, choices, choices_method=choices_method or _METHODS[0])
    if choices_method is not None:
        raise InvalidParameterError("choices_method", choices_method, "given only with choices")
    if dtype is not None and dtype not in DTYPES:
        raise InvalidParameterError("dtype", dtype, "int, float, bool or str")
    structured = constraint(regex, json_schema, dtype, forms["structured"])
    if structured is not None:
        params["structured"] = structured
    return Gen(name=name, params=params, dtype=dtype, place=caller())


def gen_int(name: str | None = None, max_tokens: int | None = None, **sampling: Any) -> Expression:
    """gen(dtype=int)"""
    return gen(name, max_tokens, dtype=int, **sampling)


def gen_string(name: str | None = None, max_tokens: int | None = None, **sampling: Any) -> Expression:
    """gen(dtype=str)"""
    return gen(name, max_tokens, dtype=str, **sampling)


def select(
    name: str | None = None,
    choices: Iterable[str] | None = None,
    *,
    choices_method: str = _METHODS[0],
) -> Expression:
    """Goes on with the choice that the model finds most likely, and keeps it as `state[name]`.

    choices_method: token_length_normalized, greedy_token_selection or unconditional_likelihood_normalized, which are
    texts; see lang/choices.py. Raises InvalidParameterError.
    """
    _check_name(name)
    if choices is None or isinstance(choices, str):
        raise InvalidParameterError("choices", choices, "a list of texts")
    listed = tuple(choices)
    if not 1 <= len(listed) <= limits.MAX_SELECT_CHOICES:
        raise InvalidParameterError("choices", f"{len(listed)} choices", f"1 to {limits.MAX_SELECT_CHOICES}")
    for choice in listed:
        if not isinstance(choice, str) or not choice:
            raise InvalidParameterError("choices", choice, "texts that are not empty")
    if choices_method not in _METHODS:
        raise InvalidParameterError("choices_method", choices_method, f"one of {', '.join(_METHODS)}")
    return Select(name=name, choices=listed, method=choices_method, place=caller())


def _check_name(name: Any) -> None:
    if name is not None and (not isinstance(name, str) or not name):
        raise InvalidParameterError("name", name, "a text that is not empty, or None")


def set_var(name: str, value: Any) -> Expression:
    """Makes `value` the program's variable `name`."""
    _check_name(name)
    return SetVariable(name=name, value=value, place=caller())


def turn(role: str, content: Any) -> Expression:
    if not isinstance(content, (str, Expression)):
        raise InvalidParameterError(role, content, "a text or an expression")
    return Turn(role=role, content=content, place=caller())


def system(content: str | Expression) -> Expression:
    """A system turn: `s += system("You are …")`."""
    return turn("system", content)


def user(content: str | Expression) -> Expression:
    """A user's turn."""
    return turn("user", content)


def assistant(content: str | Expression) -> Expression:
    """The model's turn: `s += assistant(gen("answer"))`."""
    return turn("assistant", content)


def system_begin() -> Expression:
    return TurnBegin(role="system", place=caller())


def system_end() -> Expression:
    return TurnEnd(role="system", place=caller())


def user_begin() -> Expression:
    return TurnBegin(role="user", place=caller())


def user_end() -> Expression:
    return TurnEnd(role="user", place=caller())


def assistant_begin() -> Expression:
    return TurnBegin(role="assistant", place=caller())


def assistant_end() -> Expression:
    return TurnEnd(role="assistant", place=caller())
