"""/tokenize in both surfaces' shapes (TGI's is told by `inputs`), /detokenize and TGI's /chat_tokenize."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo import limits
from octavo.chat.tools import read_tools
from octavo.errors import InvalidParameterError
from octavo.server.exchange import OPENAI, TGI, Endpoint, Exchange
from octavo.server.openai_prepare import check_model, name_ignored
from octavo.server.prompts import encode_text, render_chat, tokenize_prompt
from octavo.server.schema import ChatTokenizeRequest, DetokenizeRequest, TokenizeRequest, decode
from octavo.server.state import ServerState

if TYPE_CHECKING:
    from starlette.routing import Route


def routes(state: ServerState) -> list[Route]:
    from starlette.routing import Route

    return [
        Route("/tokenize", Endpoint(state, tokenize, OPENAI), methods=["POST"]),
        Route("/detokenize", Endpoint(state, detokenize, OPENAI), methods=["POST"]),
        Route("/chat_tokenize", Endpoint(state, chat_tokenize, TGI), methods=["POST"]),
    ]


async def tokenize(state: ServerState, exchange: Exchange, body: bytes) -> None:
    await exchange.answer(await state.in_thread(len(body), _tokenized, state, exchange, body))


async def detokenize(state: ServerState, exchange: Exchange, body: bytes) -> None:
    await exchange.answer(await state.in_thread(len(body), _detokenized, state, exchange, body))


async def chat_tokenize(state: ServerState, exchange: Exchange, body: bytes) -> None:
    await exchange.answer(await state.in_thread(len(body), _chat_tokenized, state, exchange, body))


def _tokenized(state: ServerState, exchange: Exchange, body: bytes) -> Any:
    request, ignored = decode(body, TokenizeRequest)
    name_ignored(exchange, ignored)
    if request.inputs is not None:
        exchange.surface = TGI
        return _spans(state, request.inputs, special=request.add_special_tokens is not False)
    check_model(state, request.model)
    ids = tokenize_prompt(state, request).ids
    return {
        "count": len(ids),
        "max_model_len": state.info.max_model_len,
        "tokens": ids,
        "token_strs": [state.tokenizer.token_text(i) for i in ids] if request.return_token_strs else None,
    }


def _detokenized(state: ServerState, exchange: Exchange, body: bytes) -> Any:
    request, ignored = decode(body, DetokenizeRequest)
    name_ignored(exchange, ignored)
    check_model(state, request.model)
    if len(request.tokens) > limits.MAX_DETOKENIZE_TOKENS:
        raise InvalidParameterError("tokens", f"{len(request.tokens)} ids", f"at most {limits.MAX_DETOKENIZE_TOKENS}")
    width = state.info.vocab_size
    for token_id in request.tokens:
        if not 0 <= token_id < width:
            raise InvalidParameterError("tokens", token_id, f"token ids from 0 to {width - 1}")
    return {"prompt": state.tokenizer.decode(request.tokens, skip_special_tokens=False)}


def _chat_tokenized(state: ServerState, exchange: Exchange, body: bytes) -> Any:
    request, ignored = decode(body, ChatTokenizeRequest)
    name_ignored(exchange, ignored)
    check_model(state, request.model)
    tools = read_tools(request.tools, request.tool_choice)
    messages, ours = state.chat.conversation(request.messages, tools, request.tool_prompt)
    text = render_chat(state, messages, add_generation_prompt=True, ours=ours)
    return {"tokenize_response": _spans(state, text, special=False), "templated_text": text}


def _spans(state: ServerState, text: str, *, special: bool) -> list[dict[str, Any]]:
    """TGI's tokens: where each lies in the text, in characters; those put around it (BOS) lie nowhere.

    A character of several tokens belongs to the first of them.
    """
    tokenizer = state.tokenizer
    ids = encode_text(state, text, special=special).ids
    bare = tokenizer.encode(text, add_special_tokens=False) if special else ids
    before = next((i for i in range(len(ids) - len(bare) + 1) if ids[i : i + len(bare)] == bare), 0)
    # The encoding may have put a space before the text that is not in it.
    seen = -1 if tokenizer.strips_leading_space and not text.startswith(" ") else 0
    spans = []
    for i, token_id in enumerate(ids):
        start = min(max(seen, 0), len(text))
        if before <= i < before + len(bare):
            seen += sum(byte & 0xC0 != 0x80 for byte in tokenizer.token_bytes(token_id))
            stop = min(max(seen, 0), len(text))
        else:
            stop = start
        spans.append(
            {"id": token_id, "text": text[start:stop] or tokenizer.token_text(token_id), "start": start, "stop": stop}
        )
    return spans
