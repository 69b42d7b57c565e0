"""POST /v1/score: the log-probabilities of given continuations of a prompt, all of them in one batch."""

from __future__ import annotations

import secrets
import time
from math import fsum
from typing import TYPE_CHECKING, Any

from octavo import limits
from octavo.engine.score import continuation_logprobs, score_params
from octavo.errors import InvalidParameterError
from octavo.server.errors import invalid, json_bytes
from octavo.server.exchange import OPENAI, Endpoint, Exchange
from octavo.server.generation import Generation, Running, running, with_seeds
from octavo.server.openai_prepare import check_model, name_ignored
from octavo.server.openai_shapes import finite
from octavo.server.prompts import EncodedPrompt, encode_text, within
from octavo.server.schema import ScoreRequest, check_timeouts, decode, renamed
from octavo.server.state import ServerState

if TYPE_CHECKING:
    from starlette.routing import Route


def routes(state: ServerState) -> list[Route]:
    from starlette.routing import Route

    return [Route("/v1/score", Endpoint(state, score, OPENAI), methods=["POST"])]


async def score(state: ServerState, exchange: Exchange, body: bytes) -> None:
    model, start, generation = await state.in_thread(len(body), _prepare, state, exchange, body)
    async with running(state, exchange, generation) as run:
        async for _ in run.events:
            pass
        head = {
            "id": generation.request_id,
            "object": "score",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": state.info.fingerprint,
        }
        size = limits.SHORT_BODY_BYTES + 1  # thousands of numbers: not on the loop
        await exchange.answer_json(await state.in_thread(size, _answer, head, state, run, start))


def _prepare(state: ServerState, exchange: Exchange, body: bytes) -> tuple[str, int, Generation]:
    """The name for the answer, how many tokens the prompt has, and each continuation behind it."""
    request, ignored = decode(body, ScoreRequest)
    name_ignored(exchange, ignored)
    model = check_model(state, request.model)
    check_timeouts(request)
    if (request.prompt is None) == (request.prompt_token_ids is None):
        raise invalid("prompt", "exactly one of prompt and prompt_token_ids is required", "missing_required_parameter")
    if not request.continuations:
        raise InvalidParameterError("continuations", [], "at least one text or list of token ids")
    if request.prompt is None:
        before = request.prompt_token_ids or []
    else:
        before = encode_text(state, request.prompt, special=request.add_special_tokens is not False).ids
    if not before:
        raise InvalidParameterError("prompt", request.prompt, "at least one token")
    prompts = []
    for i, given in enumerate(request.continuations):
        behind = encode_text(state, given, special=False).ids if isinstance(given, str) else given
        if not behind:
            raise InvalidParameterError(f"continuations[{i}]", given, "at least one token")
        prompts.append(within(state, EncodedPrompt(None, [*before, *behind]), None, f"continuations[{i}]"))
    params = score_params(
        len(before), priority=request.priority or 0, cache_salt=state.salt(exchange.scope, request.cache_salt)
    )
    try:
        seeded = with_seeds(state, prompts, params)
    except InvalidParameterError as error:
        raise renamed(error, {"prompt_token_ids": "continuations", "n": "continuations"}) from None
    timeouts = (request.queue_timeout, request.first_token_timeout, request.request_timeout)
    generation = Generation("score-" + secrets.token_hex(16), prompts, seeded, timeouts=timeouts, hides_output=True)
    return model, len(before), generation


def _answer(head: dict[str, Any], state: ServerState, run: Running, start: int) -> bytes:
    return json_bytes({**head, **_scores(state, run, start)})


def _scores(state: ServerState, run: Running, start: int) -> dict[str, Any]:
    scores = []
    for index, (prompt, done) in enumerate(zip(run.generation.prompts, run.done)):
        behind = prompt.ids[start:]
        entries = [None if entry is None else {e.token_id: e for e in entry} for entry in done.prompt_logprobs or []]
        logprobs = [finite(logprob) for logprob in continuation_logprobs(entries, start, behind)]
        texts = [state.tokenizer.token_text(token_id) for token_id in behind]
        scores.append(
            {"index": index, "token_ids": behind, "tokens": texts, "logprobs": logprobs, "logprob": fsum(logprobs)}
        )
    total = sum(len(prompt.ids) for prompt in run.generation.prompts)
    details = {"cached_tokens": run.cached_tokens}
    usage = {"prompt_tokens": total, "completion_tokens": 0, "total_tokens": total, "prompt_tokens_details": details}
    return {"scores": scores, "usage": usage}
