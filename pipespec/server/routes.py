"""The routes that take a body, and the form of their errors, of OpenAI's interface and of all
others that are there."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache

from starlette.responses import JSONResponse
from starlette.routing import BaseRoute

from pipespec.server.api_errors import ApiError, ErrorReply
from pipespec.server.dialect import BodyRoute, Dialect, ErrorFormat
from pipespec.server.openai_format import ChatFormat, CompletionFormat
from pipespec.server.request_schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from pipespec.server.response_schema import (
    ChatReply,
    CompletionReply,
    DetokenizeReply,
    TokenizeReply,
)

SSE = "text/event-stream"
OPENAI: Mapping[str, BodyRoute] = {
    "/v1/chat/completions": BodyRoute(ChatRequest, ChatReply, ChatFormat, SSE),
    "/v1/completions": BodyRoute(CompletionRequest, CompletionReply, CompletionFormat, SSE),
    "/tokenize": BodyRoute(TokenizeRequest, TokenizeReply),
    "/detokenize": BodyRoute(DetokenizeRequest, DetokenizeReply),
}
# The modules that have a `DIALECT`. A server does without those that are not installed.
MODULES = ("dialects.responses", "dialects.anthropic", "dialects.ollama", "pages.routes")


@cache
def dialects() -> tuple[Dialect, ...]:
    found = []
    for name in (f"pipespec.extras.{module}" for module in MODULES):
        try:
            found.append(importlib.import_module(name).DIALECT)
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):
                raise
    return tuple(found)


@cache
def body_routes() -> Mapping[str, BodyRoute]:
    routes = dict(OPENAI)
    for dialect in dialects():
        routes |= dialect.routes
    return routes


def public_routes() -> list[BaseRoute]:
    """The routes that need neither a key nor a cluster, beside /health."""
    return [route for dialect in dialects() for route in dialect.public_routes]


def error_format(path: str) -> ErrorFormat:
    for dialect in dialects():
        for beginning, errors in dialect.errors.items():
            if path.startswith(beginning):
                return errors
    return ErrorFormat(ErrorReply, lambda error: error.body)


def error_reply(path: str, error: ApiError) -> JSONResponse:
    return JSONResponse(error_format(path).body(error), error.status, error.headers)
