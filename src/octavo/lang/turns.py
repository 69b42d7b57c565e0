"""What a chat template writes around the contents of turns, found by rendering marks in their place.

A program's prompt only ever grows: what is written is never rendered again, so that each call finds the whole of the
call before in the prefix cache. Templates that rewrite what they wrote before (drop a thought, move the system prompt
behind the last turn) would break that; of those each piece is taken as it was when it was written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from octavo.errors import ChatTemplateError

_MARK, _NEXT, _FILLER = "mArK0qz", "nExT1qz", "fIlL2qz"  # texts that no template has reason to write or to change

Render = Callable[[list[dict[str, str]], bool], str]


class Turns:
    """render(messages, add_generation_prompt): a conversation by the template, or ChatTemplateError.

    bos: the text with which templates begin a whole prompt, asked for when a turn stands behind other text.
    """

    def __init__(self, render: Render, bos: Callable[[], str] = str) -> None:
        self._render = render
        self.bos = bos
        self.opening = lru_cache(maxsize=1024)(self._opening)
        self.closing = lru_cache(maxsize=1024)(self._closing)

    def _opening(self, roles: tuple[str, ...], role: str, generates: bool) -> str:
        """From the end of the content of the last of `roles` to the beginning of the content of a turn of `role`.

        generates: the model is to write it. Raises ChatTemplateError when the template refuses this order of roles.
        """
        if not roles:
            return self._first(role)
        if generates and role == "assistant":
            text = self._between(roles, None)
        else:
            text = self._between(roles, role)
        if _FILLER in text and roles[0] == "system" and len(roles) > 1:  # the system prompt is moved along
            return self._opening(roles[1:], role, generates)
        if _FILLER in text:
            raise ChatTemplateError("the chat template writes earlier turns again behind later ones")
        return text

    def _closing(self, roles: tuple[str, ...]) -> str:
        """Behind the content of the last of `roles`, when nothing follows; nothing where the template has no say."""
        messages = [*_messages(roles[:-1]), {"role": roles[-1], "content": _MARK}]
        try:
            _, found, after = self._render(messages, False).rpartition(_MARK)
        except ChatTemplateError:
            return ""
        return after if found else ""

    def _first(self, role: str) -> str:
        message = {"role": role, "content": _MARK}
        try:
            before, found, _ = self._render([message], False).partition(_MARK)
        except ChatTemplateError:
            if role != "system":
                raise
            found = ""
        if not found and role == "system":  # some templates write it only together with the user's first turn
            before, found, _ = self._render([message, {"role": "user", "content": _NEXT}], False).partition(_MARK)
        if not found:
            raise ChatTemplateError(f"the chat template does not write the content of a {role} turn")
        return before

    def _between(self, roles: tuple[str, ...], role: str | None) -> str:
        messages = [*_messages(roles[:-1]), {"role": roles[-1], "content": _MARK}]
        if role is None:
            text, end = self._render(messages, True), None
        else:
            text, end = self._render([*messages, {"role": role, "content": _NEXT}], False), _NEXT
        _, found, after = text.partition(_MARK)
        if end is not None:
            after, found, _ = after.partition(end) if found else ("", "", "")
        if not found:
            raise ChatTemplateError(f"the chat template does not write the content of each {role or roles[-1]} turn")
        return after


def plain_turns() -> Turns:
    """`role: content` a line, for endpoints that take messages and keep their template to themselves."""
    return Turns(_plain)


def _plain(messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
    lines = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
    return lines + "assistant: " if add_generation_prompt else lines


def _messages(roles: tuple[str, ...]) -> list[dict[str, str]]:
    return [{"role": role, "content": _FILLER} for role in roles]
