"""The Jinja environment of chat templates: sandboxed, immutable, and metered (see template_meter.py)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, cast

from jinja2 import nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import _PassArg

from octavo.tokenizer.template_costs import (
    CHEAP_FILTERS,
    FILTER_CHECKS,
    pay_for_method,
    pay_for_product,
    pay_for_walk,
    printable_size,
)
from octavo.tokenizer.template_meter import METER_KEY, Meter, TemplateLimitError
from octavo.tokenizer.template_rewrite import CONCAT, CONTAINS, ENTER, WEIGH, WEIGH_TOP, rewrite

_MAX_RANGE = 100_000
_MAX_DATE_FORMAT_CHARS = 256

# What templates of released models use, less what is random, prints addresses, or pads without bound.
_FILTERS = frozenset(
    {"abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "format"}
    | {"groupby", "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min", "reject"}
    | {"rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr", "sort", "string", "sum", "title"}
    | {"tojson", "trim", "truncate", "unique", "upper", "urlencode", "wordcount"}
)
_COSTLY_TESTS = frozenset(
    {"eq", "==", "equalto", "ne", "!=", "lt", "<", "lessthan", "le", "<=", "gt", ">", "greaterthan", "ge", ">="}
    | {"lower", "upper"}
)
_METHODS: Mapping[type, frozenset[str]] = {
    str: frozenset(
        {"capitalize", "casefold", "center", "count", "endswith", "expandtabs", "find", "format", "format_map", "index"}
        | {"isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric"}
        | {"isprintable", "isspace", "istitle", "isupper", "join", "ljust", "lower", "lstrip", "partition"}
        | {"removeprefix", "removesuffix", "replace", "rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip"}
        | {"split", "splitlines", "startswith", "strip", "swapcase", "title", "upper", "zfill"}
    ),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    int: frozenset(),
    float: frozenset({"is_integer"}),
    bytes: frozenset(),
}


class ChatTemplateRaised(Exception):
    """The template called raise_exception: the conversation does not suit it."""


class _Generation(Extension):
    """{% generation %} marks what the assistant said, for training; here it only groups statements."""

    tags = {"generation"}  # noqa: RUF012  # Jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Renders need `METER_KEY: Meter()` among their variables."""

    intercepted_binops = frozenset({"+", "-", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # folding constants would run them unmetered
            extensions=[_Generation, loopcontrols],
            finalize=_printed,
            cache_size=0,
        )
        kept = {name: self.filters[name] for name in _FILTERS}
        self.filters.clear()
        for name, function in kept.items():
            self.filters[name] = _metered_filter(self, name, _tojson if name == "tojson" else function)
        self.filters.update({ENTER: _enter, WEIGH: _weigh, WEIGH_TOP: _weigh_top, CONCAT: _concat, CONTAINS: _contains})
        for name in _COSTLY_TESTS:
            self.tests[name] = _metered_test(cast(Callable[..., bool], self.tests[name]))
        self.tests["in"] = _contains
        del self.globals["lipsum"]
        self.globals["range"] = _range
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return rewrite(super()._parse(source, name, filename))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, allowed in _METHODS.items():
            if isinstance(obj, kind):
                return attr in allowed
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None

        @pass_context
        def formatted(context: Context, /, *args: Any, **kwargs: Any) -> str:
            formatter = _MeteredFormatter(self, _meter(context))
            if value.__name__ == "format_map":
                (kwargs,) = args
                args = ()
            return formatter.vformat(value.__self__, args, kwargs)

        return formatted

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        meter = _meter(context)
        meter.spend(4 + len(args) + len(kwargs))
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, (str, list, tuple, dict)):
            args = pay_for_method(meter, owner, obj.__name__, args, kwargs)
        elif not isinstance(obj, (Macro, BlockReference)):  # those only hand their arguments on
            for argument in (*args, *kwargs.values()):
                meter.weigh(argument)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = _meter(context)
        if operator == "*":
            pay_for_product(meter, left, right)
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int):
                meter.integer(left.bit_length() * abs(right))
        elif operator == "%" and isinstance(left, str):
            meter.percent_format(left, right)
        elif isinstance(left, int) and isinstance(right, int):
            meter.integer(max(left.bit_length(), right.bit_length()))
        elif isinstance(left, str) and isinstance(right, str):
            meter.make(len(left) + len(right))
        elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
            meter.spend((len(left) + len(right)) // 8)
        else:
            meter.weigh(left)
            meter.weigh(right)
        return super().call_binop(context, operator, left, right)


class _MeteredFormatter(SandboxedFormatter):
    def __init__(self, environment: TemplateEnvironment, meter: Meter) -> None:
        super().__init__(environment)
        self._meter = meter

    def convert_field(self, value: Any, conversion: Any) -> Any:
        self._meter.make(self._meter.weigh(value))
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        self._meter.width(format_spec)
        # Every field is written into one string, so together they count as writing.
        self._meter.write(self._meter.weigh(value) + len(format_spec))
        return super().format_field(value, format_spec)


def _meter(context: Context) -> Meter:
    meter: Meter = context.parent[METER_KEY]
    return meter


@pass_context
def _enter(context: Context, steps: int, chars: int) -> bool:
    _meter(context).enter(steps, chars)
    return True


@pass_context
def _weigh(context: Context, value: Any) -> Any:
    _meter(context).weigh(value)
    return value


@pass_context
def _weigh_top(context: Context, value: Any) -> Any:
    _meter(context).weigh_top(value)
    return value


@pass_context
def _concat(context: Context, parts: Sequence[Any]) -> str:
    meter = _meter(context)
    meter.make(sum(printable_size(meter, part) for part in parts))
    return "".join([str(part) for part in parts])


@pass_context
def _contains(context: Context, item: Any, container: Any) -> bool:
    meter = _meter(context)
    if isinstance(container, str) and isinstance(item, str):
        meter.search(container, item)
    else:
        meter.weigh(item)
        if not isinstance(container, Mapping):  # looked up by hash
            meter.weigh(container)
    return item in container


@pass_context
def _printed(context: Context, value: Any) -> str:
    """What {{ … }} writes."""
    meter = _meter(context)
    meter.write(printable_size(meter, value))
    return str(value)


def _metered_filter(environment: TemplateEnvironment, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    passed = _PassArg.from_obj(function)

    @pass_context
    def metered(context: Context, value: Any, /, *args: Any, **kwargs: Any) -> Any:
        meter = _meter(context)
        meter.spend(6)
        if name not in CHEAP_FILTERS:
            meter.weigh(value)
        for argument in (*args, *kwargs.values()):
            meter.weigh(argument)
        value = pay_for_walk(meter, name, value, args, kwargs)
        check = FILTER_CHECKS.get(name)
        if check is not None:
            check(meter, value, args, kwargs)
        if passed is _PassArg.context:
            result = function(context, value, *args, **kwargs)
        elif passed is _PassArg.eval_context:
            result = function(context.eval_ctx, value, *args, **kwargs)
        elif passed is _PassArg.environment:
            result = function(environment, value, *args, **kwargs)
        else:
            result = function(value, *args, **kwargs)
        return meter.ticking(result) if isinstance(result, Iterator) else result

    return metered


def _metered_test(function: Callable[..., bool]) -> Callable[..., bool]:
    @pass_context
    def metered(context: Context, *operands: Any) -> bool:
        meter = _meter(context)
        for operand in operands:
            meter.weigh(operand)
            meter.classify(operand)
        return function(*operands)

    return metered


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As transformers defines it for chat templates: no HTML escapes, keys in their order."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _range(*bounds: int) -> range:
    numbers = range(*bounds)
    if len(numbers[: _MAX_RANGE + 1]) > _MAX_RANGE:
        raise TemplateLimitError(f"it asks for a range of more than {_MAX_RANGE}")
    return numbers


def _raise_exception(message: Any) -> NoReturn:
    raise ChatTemplateRaised(str(message))


def _strftime_now(date_format: str) -> str:
    if len(date_format) > _MAX_DATE_FORMAT_CHARS:
        raise TemplateLimitError(f"it formats a date with more than {_MAX_DATE_FORMAT_CHARS} characters")
    return datetime.now().strftime(date_format)
