"""Writes a generation's events as they come: one write a step, and a comment when nothing comes for long."""

from __future__ import annotations

import asyncio
from typing import Protocol

from octavo.engine.ipc import Token
from octavo.server.exchange import Exchange
from octavo.server.generation import Events, Running
from octavo.server.sse import KEEP_ALIVE


class Renderer(Protocol):
    def begin(self) -> bytes: ...

    def tokens(self, prompt: int, tokens: list[Token]) -> bytes: ...

    def end(self) -> bytes: ...


async def stream_answer(exchange: Exchange, run: Running, renderer: Renderer, keep_alive: float) -> None:
    """The status waits for the first token, for at most `keep_alive` seconds: what fails at once has its own status."""
    events = run.events
    first = await _first(exchange, events, keep_alive, renderer)
    if first is not None:
        if not exchange.started:
            await exchange.start_events()
            opening = renderer.begin()
        else:
            opening = b""
        await exchange.write(opening + renderer.tokens(*first))
        async for prompt, tokens in events:
            data = renderer.tokens(prompt, tokens) if tokens else KEEP_ALIVE
            if data:
                await exchange.write(data)
    await exchange.finish(renderer.end())


async def _first(
    exchange: Exchange, events: Events, keep_alive: float, renderer: Renderer
) -> tuple[int, list[Token]] | None:
    """The first tokens; None if the events end without any."""
    waiting = asyncio.ensure_future(_next_tokens(events))
    try:
        while not waiting.done():
            await asyncio.wait((waiting,), timeout=keep_alive)
            if not waiting.done():
                if not exchange.started:
                    await exchange.start_events()
                    await exchange.write(renderer.begin())
                await exchange.write(KEEP_ALIVE)
        return waiting.result()
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def _next_tokens(events: Events) -> tuple[int, list[Token]] | None:
    async for prompt, tokens in events:
        if tokens:
            return prompt, tokens
    return None
