"""A chat answer as OpenAI's messages and deltas: content, reasoning and tool calls, read from the tokens' text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from octavo.chat.parser import Arguments, CallStart, ChatParser, Content, Event, Reasoning
from octavo.engine.ipc import Token

Delta = dict[str, Any]


class ChatReader:
    """One choice of an answer. `tells_reasoning`: thoughts are part of the answer; else they are left out.

    It is a fold over the tokens delivered, so an engine that was started again in their midst changes nothing.
    """

    def __init__(self, parser: ChatParser, tells_reasoning: bool) -> None:
        self._parser = parser
        self._tells_reasoning = tells_reasoning
        self.reasoning_tokens = 0

    def read(self, token: Token) -> Delta:
        """What the token adds to the message; {} when nothing is certain yet."""
        self.reasoning_tokens += self._parser.thinking
        events = self._parser.push(token.text)
        if token.finish_reason is not None:
            events += self._parser.finish()
        return self._delta(events)

    def finish_reason(self, token: Token) -> str | None:
        """The token's, but "tool_calls" where a regular end leaves calls to make."""
        return "tool_calls" if token.finish_reason == "stop" and self._parser.calls else token.finish_reason

    def _delta(self, events: Iterable[Event]) -> Delta:
        delta: Delta = {}
        calls: dict[int, dict[str, Any]] = {}
        for event in events:
            if isinstance(event, Content):
                delta["content"] = delta.get("content", "") + event.text
            elif isinstance(event, Reasoning):
                if self._tells_reasoning:
                    for name in ("reasoning", "reasoning_content"):  # vLLM's word for it, and everybody else's
                        delta[name] = delta.get(name, "") + event.text
            elif isinstance(event, CallStart):
                function = {"name": event.name, "arguments": ""}
                calls[event.call] = {"index": event.call, "id": event.id, "type": "function", "function": function}
            else:
                assert isinstance(event, Arguments)
                call = calls.setdefault(event.call, {"index": event.call, "function": {"arguments": ""}})
                call["function"]["arguments"] += event.text
        if calls:
            delta["tool_calls"] = list(calls.values())
        return delta


def whole_message(reader: ChatReader, tokens: Iterable[Token]) -> dict[str, Any]:
    """The message that the deltas of the tokens make."""
    pieces: dict[str, list[str]] = {}
    calls: list[dict[str, Any]] = []
    arguments: list[list[str]] = []
    for token in tokens:
        delta = reader.read(token)
        for name, text in delta.items():
            if name != "tool_calls":
                pieces.setdefault(name, []).append(text)
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                calls.append(call)
                arguments.append([])
            arguments[call["index"]].append(call["function"]["arguments"])
    for call, texts in zip(calls, arguments):
        call["function"]["arguments"] = "".join(texts)
        del call["index"]
    message: dict[str, Any] = {"role": "assistant", "content": None if calls else "", "refusal": None}
    message |= {name: "".join(texts) for name, texts in pieces.items()}
    return {**message, "tool_calls": calls} if calls else message
