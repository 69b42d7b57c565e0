"""What the operations of a chat template pay a `Meter` before they run, and which operations are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jinja2.runtime import Undefined

from octavo.tokenizer.template_meter import Meter, TemplateLimitError

_MAX_STRIPPED_CHARS = 256
_MAX_ATTRIBUTE_DOTS = 8
_MAX_JSON_INDENT = 16

# These look at no more than the container itself; their cost is that of the statement they stand in.
CHEAP_FILTERS = frozenset(
    {"attr", "count", "d", "default", "first", "items", "length", "map", "reject", "rejectattr", "safe", "select"}
    | {"selectattr"}
)
# These go through a string character by character, and through a list in interpreted code.
_WALKING_FILTERS = frozenset(
    {"groupby", "join", "last", "list", "map", "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr"}
    | {"sort", "sum", "unique"}
)


def printable_size(meter: Meter, value: Any) -> int:
    if isinstance(value, Undefined):
        return 0
    # Anything else prints its address, or other objects of the template without end.
    if value is None or isinstance(value, (str, int, float, list, tuple, Mapping)):
        return meter.weigh(value)
    raise TemplateLimitError(f"it writes a {type(value).__name__}, which is not text")


def pay_for_product(meter: Meter, left: Any, right: Any) -> None:
    if isinstance(right, (str, list, tuple)):
        left, right = right, left
    if isinstance(left, int) and isinstance(right, int):
        meter.integer(left.bit_length() + right.bit_length())
    elif isinstance(right, int) and isinstance(left, str):
        meter.make(len(left) * max(right, 0))
    elif isinstance(right, int) and isinstance(left, (list, tuple)):
        meter.spend(len(left) * max(right, 0))


def pay_for_method(
    meter: Meter, owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Pays for owner.name(*args, **kwargs); the arguments to call it with (an iterator among them is used up here)."""
    for argument in (*args, *kwargs.values()):
        meter.weigh(argument)
    if isinstance(owner, dict):
        return args
    if isinstance(owner, (list, tuple)):
        meter.weigh(owner)
        return args
    meter.make(len(owner))
    if name.startswith("is") or name in ("title", "swapcase", "casefold", "capitalize", "upper", "lower"):
        meter.classify(owner)
    first = args[0] if args else None
    if name == "join" and args:
        items = list(meter.ticking(iter(args[0])))
        _pay_for_join(meter, items, owner)
        return (items, *args[1:])
    if name == "replace":
        _pay_for_replace(meter, owner, *args[:2])
    elif name in ("center", "ljust", "rjust", "zfill"):
        meter.make(_as_size(first))
    elif name == "expandtabs":
        meter.make(len(owner) + owner.count("\t") * _as_size(first if args else kwargs.get("tabsize", 8)))
    elif name in ("strip", "lstrip", "rstrip"):
        _check_stripped(first)
    elif name in ("split", "rsplit", "splitlines"):
        separator = first if args else kwargs.get("sep")
        if isinstance(separator, str) and separator:
            meter.search(owner, separator, backwards=name == "rsplit")
            meter.spend(owner.count(separator))
        else:
            meter.spend(len(owner) // 8)
    elif isinstance(first, str):
        meter.search(owner, first, backwards=name in ("rfind", "rindex", "rpartition"))
    return args


def _as_size(value: Any) -> int:
    return max(value, 0) if isinstance(value, int) else 0  # the call itself refuses what is no integer


def _check_stripped(chars: Any) -> None:
    if isinstance(chars, str) and len(chars) > _MAX_STRIPPED_CHARS:
        raise TemplateLimitError(f"it strips more than {_MAX_STRIPPED_CHARS} kinds of characters")


def _pay_for_replace(meter: Meter, text: str, old: Any = "", new: Any = "") -> None:
    if isinstance(old, str) and isinstance(new, str):
        meter.search(text, old)
        meter.make(len(text) + text.count(old) * len(new))


def _pay_for_join(meter: Meter, items: Sequence[Any], separator: str) -> None:
    meter.make(meter.weigh(items) + len(items) * len(separator))


def pay_for_walk(meter: Meter, name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Pays for going through `value`; `value`, or its items if it can be gone through only once."""
    if name not in _WALKING_FILTERS:
        return value
    if name not in ("join", "list"):
        for path in (kwargs.get("attribute"), args[0] if args else None):
            if isinstance(path, str) and path.count(".") > _MAX_ATTRIBUTE_DOTS:
                raise TemplateLimitError(f"it follows an attribute path of more than {_MAX_ATTRIBUTE_DOTS} dots")
    if isinstance(value, (str, list, tuple, range)):
        meter.spend(3 * len(value))
    elif isinstance(value, Iterator):
        return list(value) if name in ("join", "sum") else value
    return value


def _check_indent(meter: Meter, text: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    width = args[0] if args else kwargs.get("width", 4)
    width = len(width) if isinstance(width, str) else _as_size(width)
    lines = len(text) if not isinstance(text, str) else text.count("\n") + 2
    meter.make(width)
    meter.make(meter.weigh(text) + lines * width)
    meter.spend(lines)


def _check_round(meter: Meter, number: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    precision = args[0] if args else kwargs.get("precision", 0)
    if isinstance(precision, int) and abs(precision) > 20:
        raise TemplateLimitError("it rounds to more than 20 digits")


def _check_sum(meter: Meter, items: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    start = args[1] if len(args) > 1 else kwargs.get("start", 0)
    if not isinstance(start, (int, float)):
        raise TemplateLimitError("it adds up something that is no number")


def _check_tojson(meter: Meter, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    indent = args[1] if len(args) > 1 else kwargs.get("indent")
    size = len(indent) if isinstance(indent, str) else indent
    if isinstance(size, int) and size > _MAX_JSON_INDENT:
        raise TemplateLimitError(f"it indents JSON by more than {_MAX_JSON_INDENT}")
    for separator in kwargs.get("separators") or ():
        if len(separator) > _MAX_JSON_INDENT:
            raise TemplateLimitError(f"it separates JSON by more than {_MAX_JSON_INDENT} characters")


FILTER_CHECKS: Mapping[str, Callable[[Meter, Any, tuple[Any, ...], Mapping[str, Any]], None]] = {
    "capitalize": lambda meter, text, args, kwargs: meter.classify(str(text)),
    "format": lambda meter, text, args, kwargs: meter.percent_format(str(text), kwargs or args),
    "indent": _check_indent,
    "join": lambda meter, items, args, kwargs: _pay_for_join(meter, items, str((*args, kwargs.get("d", ""))[0])),
    "lower": lambda meter, text, args, kwargs: meter.classify(str(text)),
    "replace": lambda meter, text, args, kwargs: _pay_for_replace(meter, str(text), *args[:2]),
    "round": _check_round,
    "sum": _check_sum,
    "string": lambda meter, value, args, kwargs: meter.make(printable_size(meter, value)),
    "title": lambda meter, text, args, kwargs: meter.spend(len(str(text))),
    "tojson": _check_tojson,
    "trim": lambda meter, text, args, kwargs: _check_stripped(args[0] if args else kwargs.get("chars")),
    "urlencode": lambda meter, text, args, kwargs: meter.spend(len(str(text)) // 2),
    "upper": lambda meter, text, args, kwargs: meter.classify(str(text)),
    "wordcount": lambda meter, text, args, kwargs: meter.spend(len(str(text)) // 2),
}
