"""The OpenAI surface: completions, chat completions and models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo import limits
from octavo.server.constraints import naming
from octavo.server.errors import ApiError
from octavo.server.exchange import OPENAI, Endpoint, Exchange, Receive, Send
from octavo.server.generation import running
from octavo.server.openai_prepare import check_model, prepare_chat, prepare_completion
from octavo.server.openai_shapes import Answer, collect, whole_answer
from octavo.server.sse import ChunkRenderer, ReadChunkRenderer
from octavo.server.state import Scope, ServerState
from octavo.server.streaming import stream_answer

if TYPE_CHECKING:
    from starlette.routing import Route


def routes(state: ServerState) -> list[Route]:
    from starlette.routing import Route

    return [
        Route("/v1/completions", Endpoint(state, completions, OPENAI), methods=["POST"]),
        Route("/v1/chat/completions", Endpoint(state, chat_completions, OPENAI), methods=["POST"]),
        Route("/v1/models", Models(state), methods=["GET"]),
        Route("/v1/models/{id:path}", Models(state), methods=["GET"]),
    ]


async def completions(state: ServerState, exchange: Exchange, body: bytes) -> None:
    await _respond(state, exchange, await state.in_thread(len(body), prepare_completion, state, exchange, body))


async def chat_completions(state: ServerState, exchange: Exchange, body: bytes) -> None:
    await _respond(state, exchange, await state.in_thread(len(body), prepare_chat, state, exchange, body))


async def _respond(state: ServerState, exchange: Exchange, answer: Answer) -> None:
    with naming(answer.constrained_by):
        await _run(state, exchange, answer)


async def _run(state: ServerState, exchange: Exchange, answer: Answer) -> None:
    async with running(state, exchange, answer.generation) as run:
        if answer.generation.stream:
            renderer = (ReadChunkRenderer if answer.readers else ChunkRenderer)(run, answer)
            await stream_answer(exchange, run, renderer, state.keep_alive)
            return
        choices = await collect(run)
        token_text = state.tokenizer.token_text
        if answer.most_logprobs is None and not answer.prompt_logprobs:
            data = whole_answer(run, answer, choices, token_text)
        else:  # thousands of small objects: not on the loop
            size = limits.SHORT_BODY_BYTES + 1
            data = await state.in_thread(size, whole_answer, run, answer, choices, token_text)
        await exchange.answer_json(data)


class Models:
    """GET /v1/models and /v1/models/{id}."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, OPENAI)
        name = scope.get("path_params", {}).get("id")
        try:
            if name is None:
                await exchange.answer(
                    {"object": "list", "data": [self._card(each) for each in self._state.model_names]}
                )
            else:
                await exchange.answer(self._card(check_model(self._state, name)))
        except ApiError as error:
            await exchange.fail(error)

    def _card(self, name: str) -> dict[str, Any]:
        info = self._state.engine.info
        return {
            "id": name,
            "object": "model",
            "created": self._state.created,
            "owned_by": "octavo",
            "root": self._state.model_names[0],
            "parent": None,
            "max_model_len": None if info is None else info.max_model_len,
        }
