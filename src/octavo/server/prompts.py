"""From text and conversations to token ids, within bounds that are checked before the work. Runs beside the loop."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo import limits
from octavo.chat.tools import read_tools
from octavo.errors import CapacityError, InvalidParameterError
from octavo.server.errors import invalid
from octavo.server.schema import ChatCompletionRequest, CompletionRequest, TokenizeRequest
from octavo.server.state import ServerState

# What the template gets from us, and names of Python's; a body must not put its own in their place.
_OURS = frozenset({"self", "messages", "add_generation_prompt", "bos_token", "eos_token", "unk_token", "pad_token"})


@dataclass(slots=True)
class EncodedPrompt:
    """text: None when ids were given."""

    text: str | None
    ids: list[int]


def encode_text(state: ServerState, text: str, *, special: bool) -> EncodedPrompt:
    """Raises CapacityError for a text of so many bytes that its tokens cannot fit, before they are made.

    Also where it is to be truncated: no client may have us read what is many times what it can use.
    """
    most = state.most_prompt_tokens
    if len(text) * 4 > most:  # else it has too few bytes even as all emoji
        size = len(text.encode("utf-8", "replace"))
        if size > most * state.longest_token:
            raise CapacityError(
                f"the prompt has {size} bytes; at up to {state.longest_token} bytes a token it is longer than the "
                f"{most} prompt tokens allowed"
            )
    return EncodedPrompt(text, state.tokenizer.encode(text, add_special_tokens=special))


def completion_prompts(state: ServerState, request: CompletionRequest) -> list[EncodedPrompt]:
    """One or several prompts, in any of the four forms."""
    listed, single = _listed(request.prompt)
    if len(listed) > limits.MAX_PROMPTS:
        raise InvalidParameterError("prompt", f"{len(listed)} prompts", f"at most {limits.MAX_PROMPTS} in a request")
    special = request.add_special_tokens is not False
    found = []
    for i, prompt in enumerate(listed):
        if isinstance(prompt, str):
            encoded = encode_text(state, prompt, special=special)
        else:
            encoded = EncodedPrompt(None, prompt)
        found.append(within(state, encoded, request.truncate_prompt_tokens, "prompt" if single else f"prompt[{i}]"))
    return found


def _listed(prompt: str | list[str | int | list[int]]) -> tuple[list[str | list[int]], bool]:
    if isinstance(prompt, str):
        return [prompt], True
    texts = [item for item in prompt if isinstance(item, str)]
    ids = [item for item in prompt if isinstance(item, int)]
    lists = [item for item in prompt if isinstance(item, list)]
    if prompt and len(ids) == len(prompt):
        return [ids], True
    if prompt and len(texts) == len(prompt):
        return [*texts], False
    if prompt and len(lists) == len(prompt):
        return [*lists], False
    raise invalid("prompt", "prompt: expected a text, a list of texts, token ids, or lists of token ids; none is empty")


def chat_prompt(
    state: ServerState, request: ChatCompletionRequest, messages: list[Any], variables: Mapping[str, Any]
) -> EncodedPrompt:
    """messages, variables: as ChatFormat.conversation makes them."""
    text = render_chat(
        state,
        messages,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=bool(request.continue_final_message),
        variables=request.chat_template_kwargs,
        ours=variables,
    )
    special = bool(request.add_special_tokens)
    encoded = encode_text(state, text, special=special)
    return within(state, encoded, request.truncate_prompt_tokens, "messages")


def within(state: ServerState, prompt: EncodedPrompt, truncate: int | None, name: str) -> EncodedPrompt:
    """Cut to the last `truncate` tokens, and no longer than is allowed."""
    if truncate is not None and truncate > 0:
        prompt.ids = prompt.ids[-truncate:]
    if not prompt.ids:
        raise InvalidParameterError(name, prompt.text if prompt.text is not None else [], "at least one token")
    most = state.most_prompt_tokens
    if len(prompt.ids) > most:
        raise CapacityError(f"{name} has {len(prompt.ids)} tokens; at most {most} prompt tokens are allowed")
    return prompt


def render_chat(
    state: ServerState,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
    ours: Mapping[str, Any] | None = None,
) -> str:
    """The conversation by the model's template. With continue_final_message the text ends inside the last message.

    variables: what the body has for the template. ours: what goes before them.
    """
    if len(messages) > limits.MAX_MESSAGES:
        raise InvalidParameterError("messages", f"{len(messages)} messages", f"at most {limits.MAX_MESSAGES}")
    variables = dict(variables or {})
    taken = [name for name in variables if name in _OURS or not name.isidentifier() or name.startswith("_")]
    if taken:
        raise InvalidParameterError(
            "chat_template_kwargs", taken[0], "names of variables of the template other than ours"
        )
    if continue_final_message and add_generation_prompt:
        raise InvalidParameterError("add_generation_prompt", True, "false with continue_final_message, or left out")
    opens = not continue_final_message if add_generation_prompt is None else add_generation_prompt

    def render(messages: list[dict[str, Any]]) -> str:
        return state.tokenizer.apply_chat_template(
            messages, add_generation_prompt=opens, **{**variables, **(ours or {})}
        )

    return _until_last(render, messages) if continue_final_message else render(messages)


def _until_last(render: Callable[[list[dict[str, Any]]], str], messages: list[dict[str, Any]]) -> str:
    """Up to where the last message's content ends. A mark is rendered with it: its own text may also be the template's.

    Digits, as no template changes them; a blank behind them, as templates that strip contents then show it.
    """
    digits = f"{secrets.randbits(128):039}"
    mark = digits + " "
    marked = _with_ending(messages, lambda text: text + mark)
    text = render(messages if marked is None else marked)  # without text to mark: for the template's own complaints
    if marked is not None and mark not in text:
        mark = digits
        text = render(_with_ending(messages, lambda text: text.rstrip() + mark) or messages)
    if mark not in text:
        allowed = "false, unless the last message ends in text to go on from"
        raise InvalidParameterError("continue_final_message", True, allowed)
    return text[: text.rindex(mark)].replace(mark, "")  # a template may show the content twice


def _with_ending(messages: list[dict[str, Any]], change: Callable[[str], str]) -> list[dict[str, Any]] | None:
    """With another text at the end of the last message; None if no text is there."""
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        return [*messages[:-1], {**messages[-1], "content": change(content)}]
    part = content[-1] if isinstance(content, list) and content else None
    if isinstance(content, list) and isinstance(part, dict) and isinstance(part.get("text"), str):
        parts = [*content[:-1], {**part, "text": change(part["text"])}]
        return [*messages[:-1], {**messages[-1], "content": parts}]
    return None


def tokenize_prompt(state: ServerState, request: TokenizeRequest) -> EncodedPrompt:
    """The prompt or the conversation of /tokenize in vLLM's style."""
    if (request.prompt is None) == (request.messages is None):
        raise invalid("prompt", "exactly one of prompt and messages is required", "missing_required_parameter")
    if request.messages is None:
        assert request.prompt is not None
        return encode_text(state, request.prompt, special=request.add_special_tokens is not False)
    messages, ours = state.chat.conversation(request.messages, read_tools(request.tools))
    text = render_chat(
        state,
        messages,
        ours=ours,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=bool(request.continue_final_message),
        variables=request.chat_template_kwargs,
    )
    return encode_text(state, text, special=bool(request.add_special_tokens))
