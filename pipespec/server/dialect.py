"""The routes that take a body: OpenAI's, and those of interfaces (dialects) in other words, whose
requests translate themselves into chats or completions. A server does without dialects that are not
installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar

from fastapi import FastAPI
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute

from pipespec.client.model_info import ModelInfo
from pipespec.server.api_errors import ApiError
from pipespec.server.openai_format import ChatFormat, CompletionFormat
from pipespec.server.reply_format import ReplyFormat
from pipespec.server.request_schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Refused,
    RequestBody,
    TokenizeRequest,
)

# Fields of ours that no dialect but OpenAI's has, and that mean the same in every one.
OWN_FIELDS = frozenset(
    (
        *("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
        *("seed", "min_tokens", "ignore_eos", "stop_token_ids", "priority", "cache_salt"),
        *("chat_template_kwargs", "structured_outputs"),
    )
)


@dataclass(frozen=True)
class Translation:
    """A request of another dialect in OpenAI's words.

    Attributes:
        fields: those of a `ChatRequest`, or of a `CompletionRequest` if `prompt` is among them,
            before validation.
        stream: whether the reply is a stream.
        options: what the format of the reply takes beside the request.
        reply: makes the whole reply, as JSON, to a request for which nothing is generated, of what
            is known of the model.
        clamps: whether a limit of tokens beyond the context is lowered instead of refused.
        counts: makes the reply to a request for the number of its prompt's tokens.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    stream: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    reply: Callable[[ModelInfo], bytes] | None = None
    clamps: bool = False
    counts: Callable[[int], bytes] | None = None


class DialectBody(RequestBody):
    """A request of another dialect.

    Declared fields and `passed` ones are honoured, and `refused` ones are not (as in
    `UNSUPPORTED_FIELDS`). All others are ignored, as they are unknown or change no text. `names`
    are the names here, by ours, of fields that have another one in error messages.
    """

    passed: ClassVar[frozenset[str]] = OWN_FIELDS
    refused: ClassVar[Refused] = {}
    names: ClassVar[Mapping[str, str]] = {}

    @property
    def continues(self) -> str | None:
        """The id of the reply that it continues."""
        return None

    def resolve_model(self, served: Sequence[str]) -> None:
        """Replace a spelling of the model's name that this dialect allows by the served name."""

    def translate(self, kept: bytes) -> Translation:
        """The request without `passed` fields; `kept` is what `ReplyFormat.kept` was of the reply
        that it continues, or empty. Raises ApiError."""
        raise NotImplementedError

    def translated(self, kept: bytes = b"") -> Translation:
        """The request in OpenAI's words. Raises ApiError."""
        extra = self.model_extra or {}
        made = self.translate(kept)
        passed = {name: extra[name] for name in self.passed if name in extra}
        translated = {name: value for name, value in made.fields.items() if value is not None}
        return replace(made, fields=passed | translated)

    def explained(self, error: ApiError) -> ApiError:
        """An error of ours with the names that its fields have here."""
        param = error.param or ""
        for ours, theirs in self.names.items():
            if param == ours or param.startswith((f"{ours}.", f"{ours}[")):
                renamed = theirs + param[len(ours) :]
                message = error.message.replace(param, renamed, 1)
                return ApiError(error.status, message, renamed, error.code)
        return error


@dataclass(frozen=True)
class BodyRoute:
    """A route for POST: the model of a request, and what makes the replies if text is generated."""

    body: type[RequestBody]
    format: type[ReplyFormat] | None = None


@dataclass(frozen=True)
class Dialect:
    """What a server has beside OpenAI's interface: the `DIALECT` of a module of extras.

    Attributes:
        routes: those that take a body, by their paths.
        errors: what makes the body of an error, by the beginning of the path.
        public_routes: need no key and no cluster, and so are there while it loads.
        mount: adds further routes to a server whose cluster is ready, with its `OpenAIServing`.
    """

    routes: Mapping[str, BodyRoute] = field(default_factory=dict)
    errors: Mapping[str, Callable[[ApiError], dict[str, Any]]] = field(default_factory=dict)
    public_routes: Sequence[BaseRoute] = ()
    mount: Callable[[FastAPI, Any], None] | None = None


OPENAI: Mapping[str, BodyRoute] = {
    "/v1/chat/completions": BodyRoute(ChatRequest, ChatFormat),
    "/v1/completions": BodyRoute(CompletionRequest, CompletionFormat),
    "/tokenize": BodyRoute(TokenizeRequest),
    "/detokenize": BodyRoute(DetokenizeRequest),
}
# The modules that have a `DIALECT`.
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
    return {**OPENAI, **{path: route for each in dialects() for path, route in each.routes.items()}}


def public_routes() -> list[BaseRoute]:
    """The routes that need neither a key nor a cluster, beside /health."""
    return [route for dialect in dialects() for route in dialect.public_routes]


def error_reply(path: str, error: ApiError) -> JSONResponse:
    formats = (each for dialect in dialects() for each in dialect.errors.items())
    made = (make(error) for beginning, make in formats if path.startswith(beginning))
    return JSONResponse(next(made, error.body), error.status, error.headers)
