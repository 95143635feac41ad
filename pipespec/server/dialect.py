"""What a server needs of an interface that it adds to OpenAI's: paths, requests that translate
themselves into chats or completions, and formats of replies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.routing import BaseRoute

from pipespec.client.model_info import ModelInfo
from pipespec.server.api_errors import ApiError
from pipespec.server.reply_format import ReplyFormat
from pipespec.server.request_schema import Refused, RequestBody

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

    Declared fields and `passed` ones are honoured, except for `ignored` ones, which change no
    text, and `refused` ones (as in `UNSUPPORTED_FIELDS`). All others are unknown, and ignored.
    `names` are the names here, by ours, of fields that have another one in error messages.
    """

    passed: ClassVar[frozenset[str]] = OWN_FIELDS
    ignored: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[Refused] = {}
    names: ClassVar[Mapping[str, str]] = {}

    @property
    def continues(self) -> str | None:
        """The id of the reply that it continues."""
        return None

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
    """A route for POST: the models of a request and of a whole reply, what makes the replies if
    text is generated, and the media type of streams."""

    body: type[RequestBody]
    reply: type[BaseModel]
    format: Callable[..., ReplyFormat] | None = None
    stream: str = ""


@dataclass(frozen=True)
class ErrorFormat:
    """The model of errors, and what makes the body of one."""

    model: type[BaseModel]
    body: Callable[[ApiError], dict[str, Any]]


@dataclass(frozen=True)
class Dialect:
    """What a server has beside OpenAI's interface: the `DIALECT` of a module of extras.

    Attributes:
        routes: those that take a body, by their paths.
        errors: how errors are written, by the beginning of the path.
        public_routes: need no key and no cluster, and so are there while it loads.
        mount: adds further routes to a server whose cluster is ready, with its `OpenAIServing`.
    """

    routes: Mapping[str, BodyRoute] = field(default_factory=dict)
    errors: Mapping[str, ErrorFormat] = field(default_factory=dict)
    public_routes: Sequence[BaseRoute] = ()
    mount: Callable[[FastAPI, Any], None] | None = None
