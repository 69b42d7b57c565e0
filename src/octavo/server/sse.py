"""OpenAI's streams as bytes. What does not change between chunks is rendered once, so that a token costs its text."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.engine.ipc import Token
from octavo.server.generation import Running
from octavo.server.openai_shapes import Answer, CompletionLogprobs, chat_logprob

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

encode = msgspec.json.Encoder().encode


def event(body: Any) -> bytes:
    return b"data: " + encode(body) + b"\n\n"


class ChunkRenderer:
    """The chunks of one answer. In order: `begin`, `tokens` for each list of tokens, `end`."""

    def __init__(self, run: Running, answer: Answer) -> None:
        generation = answer.generation
        self._run = run
        self._answer = answer
        self._n = generation.n
        self._base = b"data: " + encode(answer.head())[:-1]
        opens, closes = (b'"delta":{"content":', b"}") if answer.chat else (b'"text":', b"")
        count = generation.n * len(generation.prompts)
        self._heads = [self._base + b',"choices":[{"index":%d,%s' % (index, opens) for index in range(count)]
        self._closes = closes
        self._no_usage = b',"usage":null}\n\n' if answer.include_usage else b"}\n\n"
        self._tail = closes + b',"logprobs":null,"finish_reason":null}]' + self._no_usage
        self._plain = answer.most_logprobs is None and not answer.return_token_ids and not answer.continuous_usage
        self._offsets = [CompletionLogprobs(answer.hidden_ids) for _ in range(count)]
        self._seen = 0  # tokens

    def begin(self) -> bytes:
        """What comes before any token: the role, or the prompt to echo."""
        answer, generation = self._answer, self._answer.generation
        out = []
        for index in range(len(self._heads)):
            prompt = index // self._n
            extra: dict[str, Any] = (
                {"prompt_token_ids": generation.prompts[prompt].ids} if answer.return_token_ids else {}
            )
            if answer.chat:
                choice = {"index": index, "delta": {"role": "assistant", "content": ""}}
                out.append(self._chunk([{**choice, "logprobs": None, "finish_reason": None}], **extra))
            elif answer.echo or extra:
                text = answer.echo_texts[prompt] if answer.echo else ""
                choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None, **extra}
                out.append(self._chunk([choice]))
        return b"".join(out)

    def tokens(self, prompt: int, tokens: list[Token]) -> bytes:
        """A chunk for each token that shows something; b"" when none does."""
        out: list[bytes] = []
        first = prompt * self._n
        for token in tokens:
            if self._plain and token.finish_reason is None:
                if token.text:
                    out += (self._heads[first + token.index], encode(token.text), self._tail)
            else:
                text = b'""' if self._answer.generation.hides_output else encode(token.text)
                shown = self._heads[first + token.index] + text + self._closes
                out.append(self._full(first + token.index, token, shown, token.finish_reason))
        return b"".join(out)

    def end(self) -> bytes:
        """The usage chunk, if asked for, and the mark of a regular end."""
        if not self._answer.include_usage:
            return DONE
        return self._chunk([], usage=self._answer.usage(self._run)) + DONE

    def _full(self, index: int, token: Token, shown: bytes, reason: str | None) -> bytes:
        """A chunk with all that can be in one. shown: its beginning, with what the choice adds."""
        answer = self._answer
        hides = answer.generation.hides_output
        self._seen += 1
        parts = [shown, b',"logprobs":', b"null" if hides else self._logprobs(index, token)]
        reason = "length" if hides else reason
        parts += (b',"finish_reason":', encode(reason))
        if reason is not None:
            seed = answer.generation.params[index // self._n].seed
            stop = None if hides else token.stop_reason
            parts += (b',"stop_reason":', encode(stop), b',"seed":', encode(seed))
        if answer.return_token_ids:
            parts += (b',"token_ids":', b"[]" if hides else encode([token.token_id]))
        parts.append(b"}]")
        if answer.continuous_usage:
            parts += (b',"usage":', encode(answer.usage(self._run, self._seen)), b"}\n\n")
        else:
            parts.append(self._no_usage)
        return b"".join(parts)

    def _logprobs(self, index: int, token: Token) -> bytes:
        most = self._answer.most_logprobs
        if most is None or token.logprobs is None:
            return b"null"
        if self._answer.chat:
            return encode({"content": [chat_logprob(token, most)], "refusal": None})
        return encode(self._offsets[index].of([token.logprobs]))

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None, **extra: Any) -> bytes:
        fields = b"".join(b',"%s":%s' % (name.encode(), encode(value)) for name, value in extra.items())
        end = self._no_usage
        if usage is None and self._answer.continuous_usage:
            usage = self._answer.usage(self._run, self._seen)
        if usage is not None:
            end = b',"usage":' + encode(usage) + b"}\n\n"
        return self._base + b',"choices":' + encode(choices) + fields + end


class ReadChunkRenderer(ChunkRenderer):
    """Of an answer whose tokens are read as content, thoughts and calls: a chunk for each token that adds to one."""

    def tokens(self, prompt: int, tokens: list[Token]) -> bytes:
        out: list[bytes] = []
        for token in tokens:
            index = prompt * self._n + token.index
            reader = self._answer.readers[index]
            delta = reader.read(token)
            if delta or not self._plain or token.finish_reason is not None:
                shown = self._base + b',"choices":[{"index":%d,"delta":%s' % (index, encode(delta))
                out.append(self._full(index, token, shown, reader.finish_reason(token)))
        return b"".join(out)
