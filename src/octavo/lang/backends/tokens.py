"""Prompts as token ids, for backends that take them.

What the model wrote stays as the tokens it drew; texts between are encoded by themselves. So the prompt of a later call
begins with all tokens of the call before, and the prefix cache has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from octavo.errors import InvalidParameterError
from octavo.lang.prompt import Output, Part, Prompt

Encode = Callable[[str, bool], list[int]]  # text, and whether the model's own BOS and the like are put around it


def prompt_ids(prompt: Prompt, encode: Encode, *, whole: bool) -> list[int]:
    """`whole`: the tokenizer puts a space before every text, so that a text must not be encoded in pieces."""
    if whole:
        return encode(prompt.text, not prompt.chat)
    ids: list[int] = []
    pending = ""
    first = True
    for part in [*prompt.parts, None]:
        if isinstance(part, str):
            pending += part
        elif isinstance(part, Output) and part.ids is None:
            pending += part.text
        else:
            if pending or first:
                ids += encode(pending, first and not prompt.chat)
            pending, first = "", False
            if part is not None and part.ids is not None:
                ids += part.ids
    return ids


def kept_ids(
    ids: Sequence[int], text: str, token_bytes: Callable[[int], bytes], hidden: frozenset[int]
) -> tuple[int, str]:
    """How many of `ids` spell a beginning of `text` in whole characters, and the rest of the text."""
    data = text.encode()
    end = count = whole = 0
    for i, token_id in enumerate(ids):
        piece = token_bytes(token_id)
        if token_id in hidden or not data.startswith(piece, end):
            break
        end += len(piece)
        if end == len(data) or data[end] & 0xC0 != 0x80:  # a character begins here
            count, whole = i + 1, end
    return count, data[whole:].decode()


def choices_ids(
    prompt: Prompt, choices: Sequence[str], encode: Encode, *, whole: bool, side_by_side: int = 1
) -> tuple[int, list[list[int]]]:
    """Prompt and choice together as token ids, a list a choice; and how many of the prompt's tokens begin all of them.

    side_by_side: how many threads encode, for an `encode` that waits for a server.

    A choice is encoded together with the text before it, as it would be had the program written it: behind "is: " the
    choice "A" is the token " A". Raises InvalidParameterError when there is nothing before the choices.
    """
    before = prompt_ids(prompt, encode, whole=whole)

    def joined(choice: str) -> list[int]:
        return prompt_ids(Prompt([*prompt.parts, choice], prompt.chat), encode, whole=whole)

    if side_by_side == 1:
        found = [joined(choice) for choice in choices]
    else:
        with ThreadPoolExecutor(min(side_by_side, len(choices))) as threads:
            found = list(threads.map(joined, choices))
    shared = min(_common(before, ids) for ids in found)
    shared = min(shared, *(len(ids) - 1 for ids in found))
    if shared < 1:
        raise InvalidParameterError("choices", list(choices), "behind some text: they are scored as what follows it")
    return shared, found


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    count = 0
    for x, y in zip(a, b):
        if x != y:
            break
        count += 1
    return count


def parts_of(text: str, ids: Sequence[int], count: int, rest: str) -> list[Part]:
    """`text` as `count` of the ids and a rest."""
    head = text[: len(text) - len(rest)]
    parts: list[Part] = []
    if count:
        parts.append(Output(head, tuple(ids[:count])))
    if rest:
        parts.append(rest)
    return parts
