"""Prompts to the engine and tokens back: what every route of every surface does between its body and its answer."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from octavo import limits
from octavo.engine.ipc import Done, Token
from octavo.engine.stream import RequestStream
from octavo.errors import InvalidParameterError, RequestFailedError
from octavo.params import SamplingParams
from octavo.server.exchange import Exchange
from octavo.server.prompts import EncodedPrompt
from octavo.server.state import RequestCost, ServerState

_SEED_BITS = 53  # what a JavaScript number holds: a seed drawn here can be sent back by any client

Events = AsyncIterator[tuple[int, list[Token]]]  # index of the prompt; no tokens: a pause


@dataclass(slots=True)
class Generation:
    """What is to be generated: a SamplingParams for each prompt, seeds set.

    hides_output: only the prompts are of interest; the one token an engine must make is left out.
    """

    request_id: str
    prompts: list[EncodedPrompt]
    params: list[SamplingParams]
    stream: bool = False
    timeouts: tuple[float | None, float | None, float | None] = (None, None, None)  # queue, first token, request
    hides_output: bool = False

    @property
    def n(self) -> int:
        return self.params[0].n

    @property
    def cost(self) -> RequestCost:
        return RequestCost(sum(len(prompt.ids) for prompt in self.prompts), self.n * len(self.prompts), *self.timeouts)


def default_sampling(recommended: Mapping[str, Any]) -> dict[str, Any]:
    """The model authors' values, those within our ranges."""
    chosen = {}
    for name, value in recommended.items():
        try:
            SamplingParams(**{name: value})
        except InvalidParameterError:
            continue
        chosen[name] = value
    return chosen


def with_seeds(state: ServerState, prompts: list[EncodedPrompt], params: SamplingParams) -> list[SamplingParams]:
    """The engine's own check for each prompt, and a seed of its own for each if none was asked for."""
    if len(prompts) * params.n > limits.MAX_REQUEST_SEQUENCES:
        allowed = f"at most {limits.MAX_REQUEST_SEQUENCES} outputs over all prompts of a request"
        raise InvalidParameterError("n", f"{params.n} for each of {len(prompts)} prompts", allowed)
    found = []
    for prompt in prompts:
        seeded = params if params.seed is not None else replace(params, seed=secrets.randbits(_SEED_BITS))
        found.append(state.engine.validate(prompt.ids, seeded))
    return found


@dataclass
class Running:
    """A generation under way. `events` may be read once; `done` is whole after its end."""

    generation: Generation
    streams: list[RequestStream]
    events: Events = field(init=False)

    @property
    def done(self) -> list[Done]:
        return [stream.done for stream in self.streams if stream.done is not None]

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache, of those prompts whose first token is there."""
        return sum(stream.started.cached_tokens for stream in self.streams if stream.started is not None)


@asynccontextmanager
async def running(state: ServerState, exchange: Exchange, generation: Generation) -> AsyncIterator[Running]:
    """Admits and submits; whatever happens inside, nothing of it runs on in the engine afterwards."""
    record = exchange.record
    cost = generation.cost
    record.request_id, record.stream = generation.request_id, generation.stream
    record.sequences, record.prompt_tokens = cost.sequences, cost.prompt_tokens
    record.params = generation.params[0]
    async with state.admission(exchange.scope, cost) as admitted:
        record.admitted = time.monotonic()
        streams: list[RequestStream] = []
        try:
            for i, (prompt, params) in enumerate(zip(generation.prompts, generation.params)):
                streams.append(
                    state.engine.submit(
                        f"{generation.request_id}-{i}",
                        prompt.ids,
                        params,
                        deadline=admitted.deadline,
                        first_token_deadline=admitted.first_token_deadline,
                        queue_deadline=admitted.queue_deadline,
                    )
                )
            run = Running(generation, streams)
            run.events = _recorded(run, exchange, admitted.first_token)
            yield run
            record.finished = time.monotonic()
        finally:
            for stream in streams:
                stream.cancel()


async def _recorded(run: Running, exchange: Exchange, first_token: Any) -> Events:
    record = exchange.record
    events = _one(run.streams[0]) if len(run.streams) == 1 else _merged(run.streams)
    async for prompt, tokens in events:
        if tokens:
            if record.first_token is None:
                first_token()
            record.saw_tokens(len(tokens))
            for token in tokens:
                if token.finish_reason is not None:
                    record.finish_reasons.append(token.finish_reason)
        yield prompt, tokens
    if any(stream.done is None for stream in run.streams):
        raise RequestFailedError("the request was ended before its answer was complete")
    record.cached_tokens = sum(done.cached_tokens for done in run.done)
    record.first_scheduled = min(done.timings.first_scheduled for done in run.done)


async def _one(stream: RequestStream) -> Events:
    async for tokens in stream:
        yield 0, tokens


async def _merged(streams: Iterable[RequestStream]) -> Events:
    """What all streams bring, in the order it comes; the first failure ends it."""
    ready: asyncio.Queue[tuple[int, list[Token] | Exception | None]] = asyncio.Queue(maxsize=1)

    async def pump(i: int, stream: RequestStream) -> None:
        try:
            async for tokens in stream:
                await ready.put((i, tokens))
            await ready.put((i, None))
        except Exception as error:
            await ready.put((i, error))

    pumps = [asyncio.ensure_future(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        running = len(pumps)
        while running:
            i, item = await ready.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield i, item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
