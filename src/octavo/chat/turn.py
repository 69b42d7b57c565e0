"""What a model's own way of talking means for one request: its prompt, its constraint, and how its answer is read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.chat.formats import AUTO, ReasoningFormat, ToolFormat, knows_tools, reasoning_format, tool_format
from octavo.chat.grammar import behind_thoughts, calls_or, tool_constraint
from octavo.chat.messages import takes_argument_text, wants_short_ids, with_tool_calls, with_tool_prompt
from octavo.chat.parser import ChatParser
from octavo.chat.tools import Tools, call_ids
from octavo.errors import InvalidParameterError
from octavo.structured import StructuredOutputs

if TYPE_CHECKING:
    from octavo.tokenizer import Tokenizer


class ChatFormat:
    """How a model writes calls and thoughts, and how its template wants conversations. Safe to use from any thread.

    tool_parser, reasoning_parser: "auto" looks at the template, "none" reads nothing, or a name of chat.formats.
    """

    def __init__(self, tokenizer: Tokenizer, tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> None:
        template = tokenizer.chat_template or ""
        self.tools: ToolFormat | None = tool_format(template, tool_parser)
        self.reasoning: ReasoningFormat | None = reasoning_format(template, reasoning_parser)
        self._tokenizer = tokenizer
        self._native = knows_tools(template)
        self._argument_text: bool | None = None
        self._probing = threading.Lock()
        spellings = {tokenizer.token_text(i): i for i in tokenizer.special_ids}
        marks = (*(self.tools.markers if self.tools else ()), *self._thought_marks)
        self._control_ids = {mark: spellings[mark] for mark in marks if mark in spellings}

    @property
    def _thought_marks(self) -> tuple[str, ...]:
        return () if self.reasoning is None else (self.reasoning.opener, self.reasoning.closer)

    def conversation(
        self, messages: Sequence[Any], tools: Tools, tool_prompt: str | None = None
    ) -> tuple[list[Any], dict[str, Any]]:
        """Messages and variables for the template. Raises InvalidParameterError."""
        if tools.callable and self.tools is None:
            allowed = (
                "none: how this model writes calls is not known, or switched off; see the setting tool_call_parser"
            )
            raise InvalidParameterError("tools", [tool.name for tool in tools.callable], allowed)
        speaks = any(isinstance(message, dict) and message.get("tool_calls") for message in messages)
        prepared = with_tool_calls(
            messages,
            argument_text=speaks and self._native and self._takes_argument_text(),
            native=self._native,
            short_ids=wants_short_ids(self.tools),
        )
        if not tools.offered:
            return prepared, {}
        if self._native:
            return prepared, {"tools": [tool.for_template() for tool in tools.offered]}
        return with_tool_prompt(prepared, tools.offered, tool_prompt), {}

    def _takes_argument_text(self) -> bool:
        with self._probing:
            if self._argument_text is None:

                def render(messages: Any) -> str:
                    return self._tokenizer.apply_chat_template(messages, add_generation_prompt=False)

                self._argument_text = takes_argument_text(render)
            return self._argument_text

    def turn(
        self, prompt: str, tools: Tools, structured: StructuredOutputs | None = None, continued: str | None = None
    ) -> Turn:
        """prompt: as the template wrote it. structured: what the answer must be, thoughts and calls apart.

        Where calls are required nothing else can be asked for. continued: the text of the last message, if the answer
        goes on from inside it. Raises InvalidParameterError.
        """
        reasoning = self.reasoning
        thinking = False
        if reasoning is not None and continued is not None:
            thinking = continued.rfind(reasoning.opener) > continued.rfind(reasoning.closer)
        elif reasoning is not None:
            thinking = reasoning.begins_inside(prompt)
        reads_calls = self.tools if tools.callable else None
        ids = self._control_ids
        behind = reasoning if continued is None or thinking else None
        if structured is not None and reads_calls is not None:
            structured = calls_or(structured, reads_calls, tools, behind, thinking=thinking, control_ids=ids)
        elif structured is not None and behind is not None:
            structured = behind_thoughts(structured, behind, thinking=thinking, control_ids=ids)
        elif reads_calls is not None:
            structured = tool_constraint(reads_calls, tools, behind, thinking=thinking, control_ids=ids)
        marks = (*(reads_calls.markers if reads_calls else ()), *self._thought_marks)
        shown = sorted({self._control_ids[mark] for mark in marks if mark in self._control_ids})
        return Turn(reads_calls, reasoning, thinking, tools.names, structured, shown)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request's part of the above. shown_ids: control tokens whose text the parser must see."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    thinking: bool
    names: frozenset[str]
    structured: StructuredOutputs | None
    shown_ids: list[int]

    @property
    def reads(self) -> bool:
        """Whether the answer is more than its text."""
        return self.tools is not None or self.reasoning is not None

    def parser(self, prompt_ids: Sequence[int], seed: int | None, choice: int) -> ChatParser:
        call_id: Callable[[int], str] = call_ids(prompt_ids, seed, choice, short=wants_short_ids(self.tools))
        return ChatParser(self.tools, self.reasoning, thinking=self.thinking, names=self.names, call_id=call_id)
