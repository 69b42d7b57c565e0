"""The objects of OpenAI's API: choices, logprobs of both routes, usage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.engine.ipc import Token, TokenLogprob
from octavo.server.chat_answer import ChatReader, whole_message
from octavo.server.errors import json_bytes
from octavo.server.generation import Generation, Running

_LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot say


@dataclass(slots=True)
class Answer:
    """A generation as a route's answer. most_logprobs: None when none are wanted."""

    generation: Generation
    chat: bool
    created: int
    model: str
    fingerprint: str
    echo: bool = False
    echo_texts: list[str] = field(default_factory=list)  # one a prompt
    most_logprobs: int | None = None
    hidden_ids: frozenset[int] = frozenset()  # tokens whose text is left out of the answer
    prompt_logprobs: bool = False
    return_token_ids: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    constrained_by: str | None = None  # the field of the body that a structured output comes from
    readers: list[ChatReader] = field(default_factory=list)  # one a choice, where an answer is more than its text

    def head(self) -> dict[str, Any]:
        kind = "text_completion" if not self.chat else "chat.completion"
        if self.chat and self.generation.stream:
            kind = "chat.completion.chunk"
        return {
            "id": self.generation.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def usage(self, run: Running, completion_tokens: int | None = None) -> dict[str, Any]:
        """completion_tokens: those so far, while it runs."""
        generation = self.generation
        prompt = sum(len(prompt.ids) for prompt in generation.prompts)
        if generation.hides_output:
            completion_tokens = 0
        elif completion_tokens is None:
            completion_tokens = sum(done.completion_tokens for done in run.done)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": run.cached_tokens},
        }
        if self.readers:
            thoughts = sum(reader.reasoning_tokens for reader in self.readers)
            usage["completion_tokens_details"] = {"reasoning_tokens": thoughts}
        return usage


def shown(candidate: TokenLogprob) -> str:
    return candidate.text.decode("utf-8", "replace")


def finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)


def chat_logprob(token: Token, most: int) -> dict[str, Any]:
    """One entry of choice.logprobs.content; `most`: how many of the most likely it lists."""
    assert token.logprobs is not None
    likely = sorted((item for item in token.logprobs if item.rank <= most), key=lambda item: item.rank)
    return {**_chat_entry(token.logprobs[0]), "top_logprobs": [_chat_entry(item) for item in likely]}


def _chat_entry(candidate: TokenLogprob) -> dict[str, Any]:
    return {"token": shown(candidate), "logprob": finite(candidate.logprob), "bytes": list(candidate.text)}


class CompletionLogprobs:
    """choice.logprobs of /v1/completions; text_offset: characters of the tokens before that are shown."""

    def __init__(self, hidden_ids: frozenset[int]) -> None:
        self._hidden_ids = hidden_ids
        self._offset = 0

    def of(self, entries: Iterable[list[TokenLogprob]]) -> dict[str, Any]:
        """`entries`: for each token itself, then the most likely."""
        found: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for candidates in entries:
            top: dict[str, float] = {}
            for item in candidates:
                top.setdefault(shown(item), finite(item.logprob))
            own = candidates[0]
            self._append(found, own.token_id, shown(own), finite(own.logprob), top)
        return found

    def of_prompt(
        self, ids: Sequence[int], entries: Sequence[list[TokenLogprob] | None], token_text: Callable[[int], str]
    ) -> dict[str, Any]:
        """The first token has no logprob: nothing is before it."""
        found: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token_id, candidates in zip(ids, entries):
            if candidates is None:
                self._append(found, token_id, token_text(token_id), None, None)
            else:
                one = self.of([candidates])
                for name, values in one.items():
                    found[name] += values
        return found

    def _append(
        self, found: dict[str, Any], token_id: int, text: str, logprob: float | None, top: dict[str, float] | None
    ) -> None:
        found["text_offset"].append(self._offset)
        found["token_logprobs"].append(logprob)
        found["tokens"].append(text)
        found["top_logprobs"].append(top)
        if token_id not in self._hidden_ids:
            self._offset += len(text)


def prompt_logprobs(entries: Sequence[list[TokenLogprob] | None] | None) -> list[dict[str, Any] | None] | None:
    """vLLM's extra field: for each prompt token, ids to logprobs."""
    if entries is None:
        return None
    return [
        None
        if entry is None
        else {
            str(item.token_id): {"logprob": finite(item.logprob), "rank": item.rank, "decoded_token": shown(item)}
            for item in entry
        }
        for entry in entries
    ]


@dataclass(slots=True)
class Choice:
    """What has come of one choice."""

    texts: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)

    def add(self, token: Token) -> None:
        self.texts.append(token.text)
        self.tokens.append(token)


async def collect(run: Running) -> list[Choice]:
    """All tokens of all choices: the same that a stream is made of."""
    n = run.generation.n
    choices = [Choice() for _ in range(n * len(run.generation.prompts))]
    async for prompt, tokens in run.events:
        for token in tokens:
            choices[prompt * n + token.index].add(token)
    return choices


def whole_answer(run: Running, answer: Answer, choices: list[Choice], token_text: Callable[[int], str]) -> bytes:
    """The answer in one piece, as JSON. token_text: a token id's text."""
    body = answer.head()
    make = _chat_choice if answer.chat else _completion_choice
    body["choices"] = [make(run, answer, index, choice, token_text) for index, choice in enumerate(choices)]
    body["usage"] = answer.usage(run)
    if answer.chat:
        done = run.done[0]
        if answer.return_token_ids:
            body["prompt_token_ids"] = answer.generation.prompts[0].ids
        if answer.prompt_logprobs:
            body["prompt_logprobs"] = prompt_logprobs(done.prompt_logprobs)
    return json_bytes(body)


def _ending(run: Running, answer: Answer, index: int, choice: Choice) -> dict[str, Any]:
    last = choice.tokens[-1]
    ending: dict[str, Any] = {
        "finish_reason": "length" if answer.generation.hides_output else last.finish_reason,
        "stop_reason": None if answer.generation.hides_output else last.stop_reason,
        "seed": run.done[index // answer.generation.n].seed,
    }
    if answer.return_token_ids:
        ending["token_ids"] = [] if answer.generation.hides_output else [token.token_id for token in choice.tokens]
    return ending


def _chat_choice(
    run: Running, answer: Answer, index: int, choice: Choice, token_text: Callable[[int], str]
) -> dict[str, Any]:
    logprobs = None
    if answer.most_logprobs is not None:
        logprobs = {"content": [chat_logprob(token, answer.most_logprobs) for token in choice.tokens], "refusal": None}
    ending = _ending(run, answer, index, choice)
    if answer.readers:
        reader = answer.readers[index]
        message = whole_message(reader, choice.tokens)
        ending["finish_reason"] = reader.finish_reason(choice.tokens[-1])
    else:
        message = {"role": "assistant", "content": "".join(choice.texts), "refusal": None}
    return {"index": index, "message": message, "logprobs": logprobs, **ending}


def _completion_choice(
    run: Running, answer: Answer, index: int, choice: Choice, token_text: Callable[[int], str]
) -> dict[str, Any]:
    generation = answer.generation
    prompt = index // generation.n
    done = run.done[prompt]
    ids = generation.prompts[prompt].ids
    text = "" if generation.hides_output else "".join(choice.texts)
    tokens = [] if generation.hides_output else choice.tokens
    logprobs: dict[str, Any] | None = None
    if answer.most_logprobs is not None:
        shape = CompletionLogprobs(answer.hidden_ids)
        logprobs = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        if answer.echo:
            logprobs = shape.of_prompt(ids, done.prompt_logprobs or [], token_text)
        for name, values in shape.of([token.logprobs or [] for token in tokens]).items():
            logprobs[name] += values
    body: dict[str, Any] = {
        "index": index,
        "text": answer.echo_texts[prompt] + text if answer.echo else text,
        "logprobs": logprobs,
        **_ending(run, answer, index, choice),
    }
    if answer.return_token_ids:
        body["prompt_token_ids"] = ids
    if answer.prompt_logprobs:
        body["prompt_logprobs"] = prompt_logprobs(done.prompt_logprobs)
    return body
