"""What a program needs of whatever runs its calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from octavo.lang.cancellation import Cancellation
from octavo.lang.choices import Scored
from octavo.lang.prompt import Part, Prompt
from octavo.lang.turns import Turns
from octavo.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Completion:
    """token_ids: all that were drawn, also those whose text is not shown; None where a backend does not tell."""

    text: str
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    num_tokens: int | None = None
    logprobs: Any = None


@dataclass(frozen=True, slots=True)
class Generated:
    """What came of one call: n completions, and what the backend tells beside them."""

    completions: list[Completion] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    prompt_logprobs: Any = None
    seed: int | None = None
    time_to_first_token: float | None = None  # seconds


class Backend(Protocol):
    """Safe to use from many threads. Methods raise OctavoErrors; UnsupportedByBackendError for what it cannot do."""

    turns: Turns

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        on_text: Callable[[str], None] | None,
        cancellation: Cancellation,
    ) -> Generated:
        """Waits for the whole; `on_text` gets the first completion's text as it comes."""

    def kept(self, completion: Completion, text: str) -> list[Part]:
        """How a program goes on behind a completion of which it keeps `text`, a prefix of its text."""

    def score(
        self, prompt: Prompt, choices: Sequence[str], unconditional: bool, cancellation: Cancellation
    ) -> list[Scored]:
        """All choices in one batch. `unconditional`: also without the prompt, the first token counting as 0."""

    def warm(self, prompt: Prompt) -> None:
        """Has the prefix cache hold the prompt, where there is one."""

    def flush_cache(self) -> None: ...
