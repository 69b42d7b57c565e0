"""A model's chat template: checked messages in, one prompt text out, within fixed bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateSyntaxError

from octavo.errors import ChatTemplateError, InvalidParameterError
from octavo.limits import MAX_TEMPLATE_CHARS
from octavo.tokenizer.template_meter import METER_KEY, Meter, TemplateLimitError
from octavo.tokenizer.template_rewrite import loops_over_content
from octavo.tokenizer.template_sandbox import ChatTemplateRaised, TemplateEnvironment

_MAX_MESSAGE_CHARS = 500


class ChatTemplate:
    """`source` is Jinja as models for transformers write it; `special_texts` (bos_token, …) are variables of it.

    The same messages always cost the same steps, so a template that is refused is refused everywhere.
    """

    def __init__(self, source: str, special_texts: Mapping[str, str]) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ChatTemplateError(f"the chat template has {len(source)} characters, allowed are {MAX_TEMPLATE_CHARS}")
        environment = TemplateEnvironment()
        try:
            tree = environment.parse(source)
            self._takes_parts = loops_over_content(tree)
            self._template = environment.from_string(tree)
        except Exception as error:  # whatever the parser and Python's own compiler raise for someone else's program
            raise _failure("cannot be read", error) from error
        self._special_texts = dict(special_texts)

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Raises InvalidParameterError for malformed messages and ChatTemplateError for what the template does."""
        prepared = [_checked(message, i, self._takes_parts) for i, message in enumerate(_checked_list(messages))]
        values = {**self._special_texts, **variables, "messages": prepared, METER_KEY: Meter()}
        try:
            return self._template.render(values)
        except ChatTemplateRaised as error:
            raise ChatTemplateError(f"the chat template refuses this conversation: {_short(error)}") from None
        except Exception as error:  # the template is a program: it can raise anything
            raise _failure("failed", error) from error


def _failure(what: str, error: Exception) -> ChatTemplateError:
    if isinstance(error, TemplateLimitError):
        return ChatTemplateError(f"the chat template goes beyond its bounds: {_short(error)}")
    if isinstance(error, RecursionError):
        return ChatTemplateError("the chat template goes beyond its bounds: it nests too deeply")
    where = f" at line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
    return ChatTemplateError(f"the chat template {what}{where}: {_short(error)}")


def _short(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if len(text) <= _MAX_MESSAGE_CHARS else text[:_MAX_MESSAGE_CHARS] + "…"


def _checked_list(messages: object) -> Sequence[Any]:
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise InvalidParameterError("messages", messages, "a list of messages, each a dict with role and content")
    if not messages:
        raise InvalidParameterError("messages", messages, "at least one message")
    return messages


def _checked(message: object, index: int, takes_parts: bool) -> dict[str, Any]:
    """The message as the template sees it; its content is a string unless the template walks through parts."""
    name = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidParameterError(name, message, "a dict with role and content")
    if not isinstance(message.get("role"), str):
        raise InvalidParameterError(f"{name}.role", message.get("role"), 'a string, for example "user"')
    content = message.get("content")
    if content is None and message["role"] == "assistant" and message.get("tool_calls"):
        return dict(message)
    if isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
        texts = [_part_text(part, f"{name}.content[{i}]") for i, part in enumerate(content)]
        whole = [{"type": "text", "text": text} for text in texts] if takes_parts else "\n".join(texts)
        return {**message, "content": whole}
    if not isinstance(content, str):
        raise InvalidParameterError(f"{name}.content", content, 'a string or a list of {"type": "text", "text": …}')
    return dict(message)


def _part_text(part: object, name: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    raise InvalidParameterError(name, part, '{"type": "text", "text": …}; other kinds of parts are not supported')
