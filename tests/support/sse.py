"""A strict reader of server-sent events and of OpenAI's grammar over them: whatever is not exactly right raises."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


class GrammarError(AssertionError):
    """The stream is not what it must be."""


@dataclass
class Choice:
    text: str = ""
    roles: int = 0
    finish_reason: str | None = None
    chunks: int = 0
    logprobs: list[Any] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    seed: int | None = None
    stop_reason: Any = None


@dataclass
class Streamed:
    """A stream that has been read to its end. error: the error event that ended it; then `done` is False."""

    choices: dict[int, Choice]
    usage: dict[str, Any] | None
    done: bool
    error: dict[str, Any] | None
    comments: int
    chunks: list[dict[str, Any]]

    @property
    def texts(self) -> list[str]:
        return [self.choices[index].text for index in sorted(self.choices)]


def events(body: bytes) -> tuple[list[str], int]:
    """The data of each event, and the number of comments. Every event is one `data:` line and an empty line."""
    text = body.decode("utf-8")
    if text and not text.endswith("\n\n"):
        raise GrammarError("the stream ends inside an event")
    found, comments = [], 0
    for block in text.split("\n\n")[:-1]:
        if "\n" in block or "\r" in block:
            raise GrammarError(f"more than one line in an event: {block!r}")
        if block.startswith(":"):
            comments += 1
        elif block.startswith("data:"):
            found.append(block[5:].removeprefix(" "))
        else:
            raise GrammarError(f"neither data nor a comment: {block!r}")
    return found, comments


def read_openai(body: bytes, *, chat: bool, choices: int = 1, usage: bool = False) -> Streamed:
    """Checks a whole stream: one role a choice (chat), deltas, one finish_reason a choice, at most one usage chunk
    after them all, one [DONE] at the end; or an error event at the end and no [DONE]."""
    data, comments = events(body)
    result = Streamed({i: Choice() for i in range(choices)}, None, False, None, comments, [])
    head = None
    for i, item in enumerate(data):
        if result.done or result.error is not None:
            raise GrammarError(f"an event behind the end: {item}")
        if item == "[DONE]":
            result.done = True
            continue
        chunk = json.loads(item)
        if "error" in chunk:
            if set(chunk["error"]) != {"message", "type", "param", "code"}:
                raise GrammarError(f"an error of another shape: {chunk}")
            result.error = chunk["error"]
            continue
        result.chunks.append(chunk)
        this = {name: chunk[name] for name in ("id", "object", "created", "model", "system_fingerprint")}
        head = head or this
        if this != head:
            raise GrammarError(f"chunk {i} is of another answer: {this} after {head}")
        if chunk["object"] != ("chat.completion.chunk" if chat else "text_completion"):
            raise GrammarError(f"object {chunk['object']}")
        if not chunk["choices"]:
            _read_usage(result, chunk, usage)
            continue
        if result.usage is not None:
            raise GrammarError("a chunk behind the usage chunk")
        for choice in chunk["choices"]:
            _read_choice(result, choice, chat)
    if result.error is None:
        if not result.done:
            raise GrammarError("no end")
        if any(choice.finish_reason is None for choice in result.choices.values()):
            raise GrammarError("a choice without finish_reason")
        if usage and result.usage is None:
            raise GrammarError("no usage chunk")
    return result


def _read_usage(result: Streamed, chunk: dict[str, Any], wanted: bool) -> None:
    if not wanted or result.usage is not None:
        raise GrammarError(f"a chunk without choices: {chunk}")
    if any(choice.finish_reason is None for choice in result.choices.values()):
        raise GrammarError("usage before the end of all choices")
    result.usage = chunk["usage"]


def _read_choice(result: Streamed, choice: dict[str, Any], chat: bool) -> None:
    index = choice["index"]
    if index not in result.choices:
        raise GrammarError(f"choice {index}")
    seen = result.choices[index]
    if seen.finish_reason is not None:
        raise GrammarError(f"a delta of choice {index} behind its end")
    if chat:
        delta = choice["delta"]
        if "role" in delta:
            seen.roles += 1
            if delta["role"] != "assistant":
                raise GrammarError(f"role {delta['role']}")
        if (seen.chunks == 0) != ("role" in delta) or seen.roles != 1:
            raise GrammarError(f"the role must come first and once: {choice}")
        seen.text += delta.get("content", "")
    else:
        seen.text += choice["text"]
    seen.chunks += 1
    seen.finish_reason = choice["finish_reason"]
    if choice["logprobs"] is not None:
        seen.logprobs.append(choice["logprobs"])
    seen.token_ids += choice.get("token_ids") or []
    if seen.finish_reason is not None:
        seen.seed, seen.stop_reason = choice["seed"], choice["stop_reason"]
