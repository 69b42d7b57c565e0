"""The forms in which `LLM` takes prompts and conversations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Number
from typing import Any

from octavo.errors import InvalidParameterError

Message = Mapping[str, Any]
TokenIds = Sequence[int]  # also a NumPy array or whatever else has tolist()
Prompt = str | TokenIds | Mapping[str, Any]

_ALLOWED = 'a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}'


def listed_prompts(prompts: Any) -> tuple[list[Any], bool]:
    """The prompts one by one, not yet checked, and whether the caller gave one that stands for itself."""
    if isinstance(prompts, (str, bytes, Mapping)):
        return [prompts], True
    items = _items(prompts)
    if items is None:
        raise InvalidParameterError("prompts", prompts, f"{_ALLOWED}, or a list of these")
    if items and all(isinstance(item, Number) for item in items):
        return [items], True
    return items, False


def read_prompt(prompt: Any) -> tuple[str | None, list[Any]]:
    """(text, []) or (None, token ids); the ids themselves are checked by Engine.prepare."""
    given = prompt
    if isinstance(prompt, Mapping):
        ids = prompt.get("prompt_token_ids")
        prompt = prompt.get("prompt") if ids is None else ids
    if isinstance(prompt, str):
        return prompt, []
    items = None if isinstance(prompt, (bytes, Mapping)) else _items(prompt)
    if items is None:
        raise InvalidParameterError("prompt", given, _ALLOWED)
    return None, items


def listed_conversations(messages: Any) -> tuple[list[Any], bool]:
    """The conversations one by one, not yet checked, and whether the caller gave a single one."""
    items = None if isinstance(messages, (str, bytes, Mapping)) else _items(messages)
    if items is None:
        raise InvalidParameterError("messages", messages, "a list of messages, or a list of such lists")
    single = bool(items) and isinstance(items[0], Mapping)
    return ([items], True) if single else (items, False)


def is_conversation(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _items(value: Any) -> list[Any] | None:
    """The elements of a list, tuple, array or iterator; None for what has none."""
    if hasattr(value, "tolist"):  # an array's elements as Python numbers
        value = value.tolist()
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        return None
    return list(value)
