"""Programs on an Octavo server: the same answers as on an LLM in this process, bit for bit, where both run alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any

from octavo import limits
from octavo.errors import UnsupportedByBackendError
from octavo.lang.backends.http import HttpClient, expecting
from octavo.lang.backends.interface import Completion, Generated
from octavo.lang.backends.tokens import choices_ids, parts_of, prompt_ids
from octavo.lang.backends.wire import differing, gathered, generated_of, structured_fields
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

_SHAPE = "an Octavo server's"
_MOST_CUT = 32  # tokens tried from the end to find where a text was cut; beyond, it goes on as text


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
        with expecting(_SHAPE):
            return str(answer["token_strs"][0]).startswith(" ")

    def _post(self, path: str, body: dict[str, Any], cancellation: Cancellation | None = None) -> Any:
        return self._http.post(path, {**self._model, **body}, cancellation)

    def _encoded(self, text: str, special: bool) -> tuple[int, ...]:
        answer = self._post("/tokenize", {"prompt": text, "add_special_tokens": special})
        with expecting(_SHAPE):
            return tuple(answer["tokens"])

    def _ids_of(self, text: str, special: bool) -> list[int]:
        return list(self._encode(text, special))

    def _text(self, ids: list[int]) -> str:
        with expecting(_SHAPE):
            return str(self._post("/detokenize", {"tokens": ids})["prompt"]) if ids else ""

    def _rendered(self, messages: list[dict[str, str]], opens: bool) -> str:
        answer = self._post("/tokenize", {"messages": messages, "add_generation_prompt": opens})
        with expecting(_SHAPE):
            return self._text(answer["tokens"])

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
        with expecting(_SHAPE):
            if on_text is None or params.prompt_logprobs is not None:  # a server streams none of those
                generated = generated_of(self._post("/v1/completions", body, cancellation))
                if on_text is not None:
                    on_text(generated.completions[0].text)
                return generated
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            return generated_of(gathered(self._http.stream("/v1/completions", body, cancellation), params.n, on_text))

    def kept(self, completion: Completion, text: str) -> list[Part]:
        """The tokens that spell the text: all but the few at its end that were cut off, with the one that ended it."""
        ids = completion.token_ids or []
        if text == completion.text and completion.finish_reason == "length":
            return parts_of(text, ids, len(ids), "")
        for count in range(len(ids), max(len(ids) - _MOST_CUT, 0), -1):
            spelled = self._text(ids[:count])
            if text.startswith(spelled):
                return parts_of(text, ids, count, text[len(spelled) :])
        return [text] if text else []

    def score(
        self, prompt: Prompt, choices: Sequence[str], unconditional: bool, cancellation: Cancellation
    ) -> list[Scored]:
        shared, joined = choices_ids(
            prompt, choices, self._ids_of, whole=self._whole, side_by_side=limits.BACKEND_ENCODERS
        )
        behind = [ids[shared:] for ids in joined]
        given = self._logprobs(joined[0][:shared], behind, cancellation)
        alone: list[list[float] | None] = [None] * len(behind)
        if unconditional:
            alone = [[0.0] for _ in behind]
            # One request for those that begin with the same token: that token is their prompt.
            for first in dict.fromkeys(ids[0] for ids in behind):
                places = [i for i, ids in enumerate(behind) if ids[0] == first and len(ids) > 1]
                scores = self._logprobs([first], [behind[i][1:] for i in places], cancellation)
                for i, logprobs in zip(places, scores):
                    alone[i] = [0.0, *logprobs]
        return [Scored(*each) for each in zip(behind, given, alone)]

    def _logprobs(self, before: list[int], behind: list[list[int]], cancellation: Cancellation) -> list[list[float]]:
        """Of each continuation's tokens; as many continuations in one request as a server takes."""
        found: list[list[float]] = []
        for first in range(0, len(behind), limits.MAX_REQUEST_SEQUENCES):
            part = behind[first : first + limits.MAX_REQUEST_SEQUENCES]
            body = {"prompt_token_ids": before, "continuations": part}
            answer = self._post("/v1/score", body, cancellation)
            with expecting(_SHAPE):
                found += [score["logprobs"] for score in answer["scores"]]
        return found

    def warm(self, prompt: Prompt) -> None:
        self._post("/v1/completions", {"prompt": self._ids(prompt), "max_tokens": 1, "temperature": 0.0})

    def flush_cache(self) -> None:
        raise UnsupportedByBackendError("an Octavo server has no route that empties its prefix cache; an LLM can do it")
