"""Errors on the wire: which status, type and code each has, in both surfaces' shapes.

Messages are of our own errors, which speak of the request; of any other exception nothing leaves the process.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.errors import (
    CapacityError,
    ChatTemplateError,
    DeadlineError,
    DrainingError,
    EngineClosedError,
    EngineUnavailableError,
    InvalidParameterError,
    OctavoError,
    OverloadedError,
    QueueFullError,
    RequestFailedError,
    SlowReaderError,
)

_INVALID = "invalid_request_error"
_SERVER = "server_error"
_UNAVAILABLE = "service_unavailable_error"
# Text that others wrote (a template, a library) may show where it ran.
_INTERNALS = re.compile(r"0x[0-9a-fA-F]{4,}|(?:^|[\s'\"(<])/[\w.-]+/|\bFile \"|Traceback")

_BY_STATUS = {
    400: (_INVALID, "invalid_request"),
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", "forbidden"),
    404: (_INVALID, "not_found"),
    405: (_INVALID, "method_not_allowed"),
    408: (_INVALID, "request_timeout"),
    413: (_INVALID, "body_too_large"),
    414: (_INVALID, "url_too_long"),
    415: (_INVALID, "unsupported_media_type"),
    429: ("rate_limit_error", "overloaded"),
    431: (_INVALID, "headers_too_large"),
    500: (_SERVER, "internal_error"),
    503: (_UNAVAILABLE, "unavailable"),
    504: (_SERVER, "deadline_exceeded"),
}


@dataclass
class ApiError(Exception):
    """An answer that is not a success. `error_type`: TGI's word for it, where the status does not tell."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    tgi_type: str | None = None

    def __post_init__(self) -> None:
        super().__init__(self.message)
        if self.code is None:
            self.code = _BY_STATUS[self.status][1]

    @property
    def type(self) -> str:
        return _BY_STATUS[self.status][0]


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, param, code)


def unsupported(param: str, message: str | None = None) -> ApiError:
    """For a field that would change the answer: it is not silently left out."""
    return ApiError(400, message or f"{param} is not supported by this server", param, "unsupported_parameter")


def api_error(error: BaseException) -> ApiError:
    """What a client is told of an exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidParameterError):
        return invalid(error.field, str(error))
    if isinstance(error, OverloadedError):
        headers = {"retry-after": str(error.retry_after)}
        return ApiError(429, str(error), code="overloaded", headers=headers, tgi_type="overloaded")
    if isinstance(error, QueueFullError):  # the engine's queue, of outputs; the door counts requests
        return ApiError(429, str(error), code="overloaded", headers={"retry-after": "5"}, tgi_type="overloaded")
    if isinstance(error, DrainingError):
        return ApiError(503, str(error), code="draining", headers={"retry-after": str(error.retry_after)})
    if isinstance(error, CapacityError):
        return ApiError(400, str(error), "prompt", "context_length_exceeded")
    if isinstance(error, DeadlineError):
        return ApiError(504, str(error), code="deadline_exceeded")
    if isinstance(error, ChatTemplateError):
        return ApiError(
            400, _without_internals(str(error)), "messages", "chat_template_error", tgi_type="template_error"
        )
    if isinstance(error, (EngineUnavailableError, EngineClosedError)):
        message = f"the model cannot answer now: {_without_internals(str(error))}"
        return ApiError(503, message, code="engine_unavailable", headers={"retry-after": "5"})
    if isinstance(error, SlowReaderError):
        return ApiError(408, "the answer was not read in time", code="slow_reader")
    if isinstance(error, RequestFailedError):
        return ApiError(500, _without_internals(str(error)), code="request_failed")
    if isinstance(error, OctavoError):
        return ApiError(500, "the request failed", code="request_failed")
    return ApiError(500, "an internal error, which has been logged", code="internal_error")


def _without_internals(message: str) -> str:
    return "the details are in the server's log" if _INTERNALS.search(message) else message


def openai_body(error: ApiError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def tgi_status(error: ApiError) -> int:
    """TGI says 422 of what is wrong with a request and 424 of what went wrong in the model."""
    if error.status == 400:
        return 422
    return 424 if error.status == 500 else error.status


def tgi_body(error: ApiError) -> dict[str, Any]:
    kinds = {400: "validation", 413: "validation", 429: "overloaded", 503: "healthcheck", 504: "overloaded"}
    kind = error.tgi_type or kinds.get(error.status, "generation" if error.status >= 500 else "validation")
    message = error.message
    if kind == "validation":
        message = f"Input validation error: {message}"
    elif kind == "generation":
        message = f"Request failed during generation: {message}"
    return {"error": message, "error_type": kind}


def json_bytes(body: Any) -> bytes:
    return msgspec.json.encode(body)


def fallback_handlers() -> dict[Any, Any]:
    """Starlette's exception handlers for what no route of ours answered: 404, 405, and what should not happen."""
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response

    messages = {404: "there is no such route", 405: "this route has other methods; see the header allow"}

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status = error.status_code if error.status_code in _BY_STATUS else 400
        told = ApiError(status, messages.get(status, "the request cannot be served"))
        return _response(told, dict(error.headers or {}))

    async def failed(request: Request, error: Exception) -> Response:
        return _response(api_error(error), {})

    def _response(told: ApiError, headers: dict[str, str]) -> Response:
        return Response(json_bytes(openai_body(told)), told.status, headers, "application/json")

    return {HTTPException: refused, Exception: failed}
