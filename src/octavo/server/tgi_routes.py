"""The surface of Hugging Face's text-generation-inference: /generate, /generate_stream, / and /info."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo import limits
from octavo.engine.client import EngineState
from octavo.engine.ipc import Token, TokenLogprob
from octavo.server.constraints import naming
from octavo.server.errors import ApiError
from octavo.server.exchange import TGI, Endpoint, Exchange, Receive, Send
from octavo.server.generation import Running, running
from octavo.server.openai_shapes import finite, shown
from octavo.server.sse import encode
from octavo.server.state import Scope, ServerState
from octavo.server.streaming import stream_answer
from octavo.server.tgi_prepare import TgiAnswer, prepare_generate

if TYPE_CHECKING:
    from starlette.routing import Route

_COMPUTE_TYPE = "cpu"


def routes(state: ServerState) -> list[Route]:
    from starlette.routing import Route

    return [
        *(
            Route(path, Endpoint(state, partial(_generate, route), TGI), methods=["POST"])
            for path, route in (("/generate", "generate"), ("/generate_stream", "generate_stream"), ("/", "/"))
        ),
        Route("/", Facts(state, _health), methods=["GET"]),
        Route("/info", Facts(state, _info), methods=["GET"]),
    ]


async def _generate(route: str, state: ServerState, exchange: Exchange, body: bytes) -> None:
    answer = await state.in_thread(len(body), prepare_generate, state, exchange, body, route)
    exchange.headers |= {"x-compute-type": _COMPUTE_TYPE, "x-compute-characters": str(len(answer.inputs))}
    with naming(answer.constrained_by):
        await _run(state, exchange, answer)


async def _run(state: ServerState, exchange: Exchange, answer: TgiAnswer) -> None:
    async with running(state, exchange, answer.generation) as run:
        if answer.generation.stream:
            await stream_answer(exchange, run, EventRenderer(run, answer, state), state.keep_alive)
        else:
            found = await _whole(run, answer, state)
            await exchange.answer([found] if answer.pipeline else found, headers=_times(exchange, run))


def _times(exchange: Exchange, run: Running) -> dict[str, str]:
    """TGI's headers: x-compute-time in seconds, the others in milliseconds."""
    record, moments = exchange.record, run.done[0].timings
    now = time.monotonic()
    admitted = now if record.admitted is None else record.admitted
    tokens = run.done[0].completion_tokens
    inference = now - moments.first_scheduled
    milliseconds = {
        "x-total-time": now - record.arrival,
        "x-validation-time": admitted - record.arrival,
        "x-queue-time": moments.first_scheduled - admitted,
        "x-inference-time": inference,
        "x-time-per-token": inference / max(1, tokens),
    }
    return {
        "x-compute-time": f"{now - record.arrival:.6f}",
        **{name: str(max(0, round(value * 1000))) for name, value in milliseconds.items()},
        "x-prompt-tokens": str(run.done[0].prompt_tokens),
        "x-generated-tokens": str(tokens),
    }


def _finish_reason(token: Token) -> str | None:
    if token.finish_reason != "stop":
        return token.finish_reason
    return "stop_sequence" if isinstance(token.stop_reason, str) else "eos_token"


def _token(token: Token, special_ids: frozenset[int]) -> dict[str, Any]:
    """The texts of those that are not special, joined, are the generated text."""
    assert token.logprobs is not None
    own = token.logprobs[0]
    special = token.token_id in special_ids and not token.text
    return {
        "id": token.token_id,
        "text": shown(own) if special else token.text,
        "logprob": finite(own.logprob),
        "special": special,
    }


def _top_tokens(candidates: Sequence[TokenLogprob], most: int, special_ids: frozenset[int]) -> list[dict[str, Any]]:
    likely = sorted((item for item in candidates if item.rank <= most), key=lambda item: item.rank)
    return [
        {
            "id": item.token_id,
            "text": shown(item),
            "logprob": finite(item.logprob),
            "special": item.token_id in special_ids,
        }
        for item in likely
    ]


async def _whole(run: Running, answer: TgiAnswer, state: ServerState) -> dict[str, Any]:
    outputs: list[list[Token]] = [[] for _ in range(answer.generation.n)]
    async for _, tokens in run.events:
        for token in tokens:
            outputs[token.index].append(token)
    if len(outputs) > 1:
        outputs.sort(key=_total_logprob, reverse=True)
    text = "".join(token.text for token in outputs[0])
    body: dict[str, Any] = {"generated_text": answer.inputs + text if answer.full_text else text}
    if answer.details:
        details = _details(run, answer, state, outputs[0])
        if len(outputs) > 1:
            details["best_of_sequences"] = [_sequence(run, answer, state, output) for output in outputs[1:]]
        body["details"] = details
    return body


def _total_logprob(output: list[Token]) -> float:
    return sum(finite(token.logprobs[0].logprob) for token in output if token.logprobs)


def _details(run: Running, answer: TgiAnswer, state: ServerState, output: list[Token]) -> dict[str, Any]:
    special = state.tokenizer.special_ids
    details: dict[str, Any] = {
        "finish_reason": _finish_reason(output[-1]),
        "generated_tokens": len(output),
        "seed": _seed(answer),
        "prefill": _prefill(run, answer, state),
        "tokens": [_token(token, special) for token in output],
    }
    if answer.top_n_tokens:
        details["top_tokens"] = [_top_tokens(token.logprobs or [], answer.top_n_tokens, special) for token in output]
    return details


def _sequence(run: Running, answer: TgiAnswer, state: ServerState, output: list[Token]) -> dict[str, Any]:
    text = "".join(token.text for token in output)
    whole = answer.inputs + text if answer.full_text else text
    return {"generated_text": whole, **_details(run, answer, state, output)}


def _prefill(run: Running, answer: TgiAnswer, state: ServerState) -> list[dict[str, Any]]:
    if not answer.prefill:
        return []
    ids = answer.generation.prompts[0].ids
    entries = run.done[0].prompt_logprobs or [None] * len(ids)
    return [
        {
            "id": token_id,
            "text": state.tokenizer.token_text(token_id),
            "logprob": None if entry is None else finite(entry[0].logprob),
        }
        for token_id, entry in zip(ids, entries)
    ]


def _seed(answer: TgiAnswer) -> int | None:
    seed = answer.generation.params[0].seed
    return seed % (1 << 64) if answer.samples and seed is not None else None


class EventRenderer:
    """TGI's events: one a token, the last with the whole text. No mark of the end follows it."""

    def __init__(self, run: Running, answer: TgiAnswer, state: ServerState) -> None:
        self._answer = answer
        self._special = state.tokenizer.special_ids
        self._texts = [answer.inputs] if answer.full_text else []
        self._count = 0

    def begin(self) -> bytes:
        return b""

    def tokens(self, prompt: int, tokens: list[Token]) -> bytes:
        return b"".join(self._event(token) for token in tokens)

    def end(self) -> bytes:
        return b""

    def _event(self, token: Token) -> bytes:
        answer = self._answer
        self._count += 1
        self._texts.append(token.text)
        body: dict[str, Any] = {"index": self._count, "token": _token(token, self._special)}
        if answer.top_n_tokens:
            body["top_tokens"] = _top_tokens(token.logprobs or [], answer.top_n_tokens, self._special)
        body["generated_text"] = body["details"] = None
        if token.finish_reason is not None:
            body["generated_text"] = "".join(self._texts)
            if answer.details:
                body["details"] = {
                    "finish_reason": _finish_reason(token),
                    "generated_tokens": self._count,
                    "seed": _seed(answer),
                    "input_length": len(answer.generation.prompts[0].ids),
                }
        return b"data:" + encode(body) + b"\n\n"


class Facts:
    """A GET route of TGI that answers from what is known."""

    def __init__(self, state: ServerState, facts: Any) -> None:
        self._state = state
        self._facts = facts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, TGI)
        try:
            await exchange.answer(self._facts(self._state))
        except Exception as error:
            await exchange.fail(error)


def _health(state: ServerState) -> dict[str, str]:
    if state.engine.state is not EngineState.READY or state.problem() is not None:
        raise ApiError(503, "unhealthy", tgi_type="healthcheck")
    return {"status": "ok"}


def _info(state: ServerState) -> dict[str, Any]:
    from octavo import __version__

    info = state.info
    return {
        "model_id": state.model_names[0],
        "model_sha": info.digest,
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": state.max_concurrent_requests,
        "max_best_of": limits.TGI_MAX_BEST_OF,
        "max_stop_sequences": limits.TGI_MAX_STOP_SEQUENCES,
        "max_input_tokens": state.most_prompt_tokens,
        "max_total_tokens": info.max_model_len,
        "validation_workers": state.short_threads._max_workers,
        "max_client_batch_size": limits.MAX_PROMPTS,
        "router": "octavo",
        "version": __version__,
        "sha": None,
        "docker_label": None,
    }
