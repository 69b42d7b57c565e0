"""GET /openapi.json: what the surfaces take and give, from the structs that decode the bodies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from octavo.server.exchange import OPENAI, Exchange, Receive, Send
from octavo.server.schema import (
    ChatCompletionRequest,
    ChatTokenizeRequest,
    CompletionRequest,
    DetokenizeRequest,
    ScoreRequest,
    TgiRequest,
    TokenizeRequest,
)
from octavo.server.state import Scope, ServerState

if TYPE_CHECKING:
    from starlette.routing import Route

_REF = "#/components/schemas/{name}"
_POSTS: dict[str, tuple[type[msgspec.Struct], str, str]] = {
    "/v1/completions": (CompletionRequest, "Continue one or several prompts", "OpenAIError"),
    "/v1/chat/completions": (ChatCompletionRequest, "Answer a conversation", "OpenAIError"),
    "/v1/score": (ScoreRequest, "Log-probabilities of given continuations of a prompt", "OpenAIError"),
    "/tokenize": (TokenizeRequest, "Token ids of a text or a conversation", "AnyError"),
    "/detokenize": (DetokenizeRequest, "Text of token ids", "OpenAIError"),
    "/generate": (TgiRequest, "Continue a prompt, as TGI does", "TgiError"),
    "/generate_stream": (TgiRequest, "Continue a prompt as events, as TGI does", "TgiError"),
    "/": (TgiRequest, "Continue a prompt, in one piece or as events, as TGI does", "TgiError"),
    "/chat_tokenize": (ChatTokenizeRequest, "A conversation as the model sees it, as TGI does", "TgiError"),
}
_GETS = {
    "/v1/models": "The models served here",
    "/v1/models/{id}": "One model",
    "/": "Whether the model answers",
    "/info": "The model and the limits, as TGI tells them",
}
_STREAMS = ("/v1/completions", "/v1/chat/completions", "/generate_stream", "/")


def document() -> dict[str, Any]:
    """OpenAPI 3.1. Bodies may have other fields: those that would change the answer are refused by name."""
    from octavo import __version__

    kinds = list(dict.fromkeys(kind for kind, _, _ in _POSTS.values()))
    _, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for path, (kind, summary, error) in _POSTS.items():
        body = {"required": True, "content": _json({"$ref": _REF.format(name=kind.__name__)})}
        paths[path] = {"post": {"summary": summary, "requestBody": body, "responses": _responses(path, error)}}
    for path, summary in _GETS.items():
        operation: dict[str, Any] = {"summary": summary, "responses": _responses("", "AnyError")}
        if "{id}" in path:
            operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
        paths.setdefault(path, {})["get"] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Octavo", "version": __version__, "description": "OpenAI's and TGI's APIs on one engine."},
        "paths": paths,
        "components": {"schemas": {**components, **_ERRORS}},
    }


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _responses(path: str, error: str) -> dict[str, Any]:
    content = _json({"type": ["object", "array"]})
    if path in _STREAMS:
        content["text/event-stream"] = {}
    failed = {"description": "Refused or failed", "content": _json({"$ref": _REF.format(name=error)})}
    return {"200": {"description": "The answer", "content": content}, "4XX": failed, "5XX": failed}


_ERRORS: dict[str, Any] = {
    "OpenAIError": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
            }
        },
    },
    "TgiError": {
        "type": "object",
        "required": ["error", "error_type"],
        "properties": {"error": {"type": "string"}, "error_type": {"type": "string"}},
    },
    "AnyError": {"anyOf": [{"$ref": _REF.format(name="OpenAIError")}, {"$ref": _REF.format(name="TgiError")}]},
}


class _Document:
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Exchange(scope, receive, send, OPENAI).answer(document())


def routes(state: ServerState) -> list[Route]:
    from starlette.routing import Route

    return [Route("/openapi.json", _Document(), methods=["GET"])]
