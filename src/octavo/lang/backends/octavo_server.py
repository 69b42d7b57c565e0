"""Programs on an Octavo server: the same answers as on an LLM in this process, bit for bit, where both run alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any

from octavo import limits
from octavo.errors import BackendError, UnsupportedByBackendError
from octavo.lang.backends.http import HttpClient
from octavo.lang.backends.interface import Completion, Generated
from octavo.lang.backends.tokens import choices_ids, parts_of, prompt_ids
from octavo.lang.backends.wire import differing, structured_fields
from octavo.lang.cancellation import Cancellation
from octavo.lang.choices import Scored
from octavo.lang.prompt import Part, Prompt
from octavo.lang.turns import Turns
from octavo.params import SamplingParams

# What the server would else take from the model's own recommendations.
_ALWAYS = (
    *("temperature", "top_p", "top_k", "min_p", "typical_p", "max_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


class OctavoServer:
    """url: such as http://127.0.0.1:8000. model: a name it serves; None is its own. timeout: seconds of silence.

    The server tokenises and renders templates, so nothing of the model need be here. It has no route that empties its
    prefix cache.
    """

    def __init__(
        self, url: str, *, model: str | None = None, api_key: str | None = None, timeout: float = 600.0
    ) -> None:
        self._http = HttpClient(url, api_key, timeout)
        self._model = {} if model is None else {"model": model}
        self._encode = lru_cache(maxsize=256)(self._encoded)
        self.turns = Turns(self._rendered, lru_cache(maxsize=1)(self._bos))

    def _bos(self) -> str:
        with_special, without = self._encoded("a", True), self._encoded("a", False)
        return self._text(list(with_special[: len(with_special) - len(without)]))

    @cached_property
    def _whole(self) -> bool:
        """Whether the tokenizer puts a space before a text."""
        answer = self._post("/tokenize", {"prompt": "a", "add_special_tokens": False, "return_token_strs": True})
        return str(answer["token_strs"][0]).startswith(" ")

    def _post(self, path: str, body: dict[str, Any], cancellation: Cancellation | None = None) -> Any:
        answer = self._http.post(path, {**self._model, **body}, cancellation)
        if not isinstance(answer, dict):
            raise BackendError(f"{self._http.url}{path} answered no JSON object")
        return answer

    def _encoded(self, text: str, special: bool) -> tuple[int, ...]:
        return tuple(self._post("/tokenize", {"prompt": text, "add_special_tokens": special})["tokens"])

    def _ids_of(self, text: str, special: bool) -> list[int]:
        return list(self._encode(text, special))

    def _text(self, ids: list[int]) -> str:
        return str(self._post("/detokenize", {"tokens": ids})["prompt"]) if ids else ""

    def _rendered(self, messages: list[dict[str, str]], opens: bool) -> str:
        body = {"messages": messages, "add_generation_prompt": opens}
        return self._text(self._post("/tokenize", body)["tokens"])

    def _ids(self, prompt: Prompt) -> list[int]:
        return prompt_ids(prompt, self._ids_of, whole=self._whole)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        on_text: Callable[[str], None] | None,
        cancellation: Cancellation,
    ) -> Generated:
        body = {**self._model, **{name: getattr(params, name) for name in _ALWAYS}, **differing(params)}
        body |= {"prompt": self._ids(prompt), "return_token_ids": True}
        if params.structured is not None:
            body["structured_outputs"] = structured_fields(params.structured)
        if on_text is not None:
            # As all its tokens come with their logprobs, a stream can be put together to the whole answer.
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            return _generated(_gathered(self._http.stream("/v1/completions", body, cancellation), params.n, on_text))
        return _generated(self._post("/v1/completions", body, cancellation))

    def kept(self, completion: Completion, text: str) -> list[Part]:
        """The tokens where they spell the text; a text that was cut goes on as text."""
        ids = completion.token_ids
        if ids is None or text != completion.text or isinstance(completion.stop_reason, str):
            return [text] if text else []
        if completion.finish_reason != "stop" or self._text(ids) == text:
            return parts_of(text, ids, len(ids), "")
        return parts_of(text, ids, len(ids) - 1, "")  # without the token that ended it

    def score(
        self, prompt: Prompt, choices: Sequence[str], unconditional: bool, cancellation: Cancellation
    ) -> list[Scored]:
        shared, joined = choices_ids(prompt, choices, self._ids_of, whole=self._whole)
        behind = [ids[shared:] for ids in joined]
        given = self._logprobs(joined, shared, cancellation)
        alone: list[list[float]] = []
        if unconditional:
            longer = [ids for ids in behind if len(ids) > 1]
            scored = iter(self._logprobs(longer, 1, cancellation))
            alone = [[0.0, *(next(scored) if len(ids) > 1 else [])] for ids in behind]
        return [
            Scored(ids, logprobs, alone[i] if unconditional else None)
            for i, (ids, logprobs) in enumerate(zip(behind, given))
        ]

    def _logprobs(self, prompts: list[list[int]], start: int, cancellation: Cancellation) -> list[list[float]]:
        """Of the tokens of each prompt from `start` on; as many prompts in one request as a server takes."""
        found: list[list[float]] = []
        for first in range(0, len(prompts), limits.MAX_PROMPTS):
            part = prompts[first : first + limits.MAX_PROMPTS]
            body = {"prompt": part, "max_tokens": 1, "temperature": 0.0}
            body |= {"prompt_logprobs": 0, "prompt_logprobs_start": start}
            answer = self._post("/v1/completions", body, cancellation)
            for ids, choice in zip(part, answer["choices"]):
                entries = choice["prompt_logprobs"]
                found.append([entries[i][str(ids[i])]["logprob"] for i in range(start, len(ids))])
        return found

    def warm(self, prompt: Prompt) -> None:
        self._post("/v1/completions", {"prompt": self._ids(prompt), "max_tokens": 1, "temperature": 0.0})

    def flush_cache(self) -> None:
        raise UnsupportedByBackendError("an Octavo server has no route that empties its prefix cache; an LLM can do it")


def _gathered(events: Any, n: int, on_text: Callable[[str], None]) -> dict[str, Any]:
    """A streamed answer as if it had come whole."""
    choices: list[dict[str, Any]] = [{"index": i, "text": "", "token_ids": []} for i in range(n)]
    whole: dict[str, Any] = {"choices": choices}
    for event in events:
        whole["usage"] = event.get("usage") or whole.get("usage")
        for delta in event.get("choices", ()):
            choice = choices[delta["index"]]
            choice["text"] += delta["text"]
            choice["token_ids"] += delta.get("token_ids") or []
            for name, values in (delta.get("logprobs") or {}).items():
                choice.setdefault("logprobs", {}).setdefault(name, []).extend(values)
            for name in ("finish_reason", "stop_reason", "seed"):
                if delta.get(name) is not None:
                    choice[name] = delta[name]
            if delta["index"] == 0 and delta["text"]:
                on_text(delta["text"])
    return whole


def _generated(answer: dict[str, Any]) -> Generated:
    usage = answer.get("usage") or {}
    choices = answer["choices"]
    return Generated(
        completions=[
            Completion(
                text=choice["text"],
                finish_reason=choice.get("finish_reason"),
                stop_reason=choice.get("stop_reason"),
                token_ids=choice.get("token_ids"),
                num_tokens=len(choice.get("token_ids") or ()),
                logprobs=choice.get("logprobs"),
            )
            for choice in choices
        ],
        prompt_tokens=usage.get("prompt_tokens"),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        prompt_logprobs=choices[0].get("prompt_logprobs"),
        seed=choices[0].get("seed"),
    )
