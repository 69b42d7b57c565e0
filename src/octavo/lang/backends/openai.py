"""Programs on any OpenAI-compatible endpoint, as far as such endpoints go; the rest is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from octavo.errors import UnsupportedByBackendError
from octavo.lang.backends.http import HttpClient, expecting
from octavo.lang.backends.interface import Completion, Generated
from octavo.lang.backends.wire import differing, gathered, generated_of
from octavo.lang.cancellation import Cancellation
from octavo.lang.choices import Scored
from octavo.lang.prompt import Part, Prompt
from octavo.lang.turns import plain_turns
from octavo.params import SamplingParams
from octavo.structured import StructuredOutputs

_KNOWN = frozenset(
    {"n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop", "max_tokens"}
    | {"logit_bias", "logprobs"}
)
_SEED_MASK = (1 << 31) - 1


class OpenAIEndpoint:
    """base_url: such as https://api.openai.com/v1. chat: by /chat/completions; else by /completions.

    max_tokens_field: what the endpoint calls it, such as max_completion_tokens. sends_seed: false for one that refuses
    seeds; the others get the lowest 31 bits of it, as many take no more.

    A chat endpoint keeps its template to itself: a gen must be the first thing of an assistant turn, and state.text()
    shows turns as plain lines. Refused with UnsupportedByBackendError: select, constraints other than JSON (and those
    without chat), sampling arguments that OpenAI's API lacks, and turns without chat.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        chat: bool = True,
        timeout: float = 600.0,
        max_tokens_field: str = "max_tokens",
        sends_seed: bool = True,
    ) -> None:
        self._http = HttpClient(base_url, api_key, timeout)
        self._model = model
        self._chat = chat
        self._max_tokens_field = max_tokens_field
        self._sends_seed = sends_seed
        self.turns = plain_turns()

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        on_text: Callable[[str], None] | None,
        cancellation: Cancellation,
    ) -> Generated:
        body = self._body(prompt, params)
        path = "/chat/completions" if self._chat else "/completions"
        with expecting("OpenAI's"):
            if on_text is None:
                return generated_of(self._http.post(path, body, cancellation))
            events = self._http.stream(path, {**body, "stream": True}, cancellation)
            return generated_of(gathered(events, params.n, on_text))

    def _body(self, prompt: Prompt, params: SamplingParams) -> dict[str, Any]:
        given = differing(params)
        unknown = sorted(set(given) - _KNOWN)
        if unknown:
            raise UnsupportedByBackendError(
                f"an OpenAI endpoint has no {', '.join(unknown)}; an LLM or an Octavo server has"
            )
        given.pop("max_tokens", None)
        seed = given.pop("seed", None)
        body: dict[str, Any] = {"model": self._model, **given, self._max_tokens_field: params.max_tokens}
        if seed is not None and self._sends_seed:
            body["seed"] = seed & _SEED_MASK
        if self._chat:
            if prompt.open_role != "assistant" or prompt.open_content:
                raise UnsupportedByBackendError(
                    "a chat endpoint writes whole assistant turns: a gen must be the first thing in one; use an LLM, "
                    "an Octavo server, or chat=False"
                )
            body["messages"] = prompt.messages
            if params.logprobs is not None:
                body |= {"logprobs": True, "top_logprobs": params.logprobs}
        else:
            if prompt.messages or prompt.open_role is not None:
                raise UnsupportedByBackendError("an endpoint without chat has no template for turns: use chat=True")
            body["prompt"] = prompt.text
        if params.structured is not None:
            body["response_format"] = self._response_format(params.structured)
        return body

    def _response_format(self, structured: StructuredOutputs) -> dict[str, Any]:
        if self._chat and structured.start_after is None and not structured.disable_any_whitespace:
            if structured.json_object:
                return {"type": "json_object"}
            if isinstance(structured.json, str):
                schema = {"name": "answer", "schema": json.loads(structured.json), "strict": True}
                return {"type": "json_schema", "json_schema": schema}
        raise UnsupportedByBackendError(
            "an OpenAI endpoint cannot hold an output to a regex, a grammar, a choice or a dtype, and to JSON only "
            "with chat; an LLM or an Octavo server can"
        )

    def kept(self, completion: Completion, text: str) -> list[Part]:
        return [text] if text else []

    def score(
        self, prompt: Prompt, choices: Sequence[str], unconditional: bool, cancellation: Cancellation
    ) -> list[Scored]:
        raise UnsupportedByBackendError(
            "an OpenAI endpoint does not tell how likely a given text is, so `select` and gen(choices=…) cannot run on "
            "it; an LLM or an Octavo server can"
        )

    def warm(self, prompt: Prompt) -> None:
        """Nothing: its cache, if it has one, is its own."""

    def flush_cache(self) -> None:
        raise UnsupportedByBackendError("an OpenAI endpoint has no route that empties its cache; an LLM can do it")
