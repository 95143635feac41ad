"""Errors as each dialect's clients read them."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Literal

from pydantic import BaseModel
from starlette.responses import JSONResponse

from pipespec.server.api_errors import ApiError, ErrorReply

ANTHROPIC, OLLAMA = "/v1/messages", "/api/"
ANTHROPIC_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}


class AnthropicErrorDetail(BaseModel):
    """Why a request was refused or failed."""

    type: str
    message: str


class AnthropicError(BaseModel):
    """The body of replies of Anthropic's routes with an error status, and of its event."""

    type: Literal["error"] = "error"
    error: AnthropicErrorDetail


class OllamaError(BaseModel):
    """The body of replies of Ollama's routes with an error status."""

    error: str


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """The body of an error, as Anthropic's package reads it."""
    failed = error.status >= HTTPStatus.INTERNAL_SERVER_ERROR
    kind = ANTHROPIC_TYPES.get(
        HTTPStatus(error.status), "api_error" if failed else "invalid_request_error"
    )
    detail = AnthropicErrorDetail(type=kind, message=error.message)
    return AnthropicError(error=detail).model_dump()


def error_model(path: str) -> type[BaseModel]:
    """What describes the errors of a route."""
    if path.startswith(OLLAMA):
        return OllamaError
    return AnthropicError if path.startswith(ANTHROPIC) else ErrorReply


def error_reply(path: str, error: ApiError) -> JSONResponse:
    """The reply to a request for a path that is refused or has failed."""
    body = error.body
    if path.startswith(OLLAMA):
        body = OllamaError(error=error.message).model_dump()
    elif path.startswith(ANTHROPIC):
        body = anthropic_error(error)
    return JSONResponse(body, error.status, error.headers)
