"""From the body of a request to a `ParsedRequest`: validated fields, token ids, a grammar.

A client decides how long this takes: the JSON and its validation, the chat template, the tokenizer,
the compilation of a grammar. So it runs in processes of its own (`preparation_workers`), and the
event loop, which serves every stream, only receives the result.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from pipespec.client.model_info import ModelInfo
from pipespec.server.api_errors import ApiError, invalid_field, validation_failed
from pipespec.server.request_parsing import (
    ParsedRequest,
    RequestDefaults,
    RequestParser,
)
from pipespec.server.request_schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from pipespec.server.response_schema import DetokenizeReply, TokenizeReply

Body = TypeVar("Body", bound=BaseModel)
# The bodies of the routes that take one.
BODIES: Mapping[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


@dataclass(frozen=True)
class PreparationContext:
    """What all requests to one server are prepared with.

    Attributes:
        served: the model.
        defaults: the values of fields that a request leaves out.
        names: under which the model is served.
        tool_parser: parses tool calls; None: the chat template determines which.
    """

    served: ModelInfo
    defaults: RequestDefaults
    names: tuple[str, ...]
    tool_parser: str | None

    def without_built_tokenizer(self) -> PreparationContext:
        """A copy for another process, which builds the tokenizer from the backend's text."""
        backend = self.served.backend
        return replace(
            self, served=replace(self.served, backend=replace(backend) if backend else None)
        )


@dataclass(frozen=True)
class PreparedRequest:
    """A request for text, and the options of its reply.

    `model` is the name that the client used; None: none.
    """

    parsed: ParsedRequest
    model: str | None
    stream: bool
    include_usage: bool
    continuous_usage: bool


class Preparer:
    """Prepares the requests to one server, one after the other."""

    def __init__(self, context: PreparationContext):
        self._names = context.names
        self._served = context.served
        self._parser = RequestParser(context.served, context.defaults, context.tool_parser)
        context.served.tokenizer.encode("a")  # builds it, before any request is timed

    def prepare(self, task: str, body: bytes) -> PreparedRequest | bytes:
        """Prepare a body; for `tokenize` and `detokenize` the result is the whole reply, as JSON.

        Raises ApiError.
        """
        match task:
            case "chat":
                return self._chat(body)
            case "completion":
                return self._completion(body)
            case "tokenize":
                return self._tokenize(body)
        return self._detokenize(body)

    def _chat(self, body: bytes) -> PreparedRequest:
        fields = _parse_body(ChatRequest, body)
        self._check(fields)
        parsed = self._parser.chat(fields)
        if parsed.tool_use is not None:  # the grammar enforces required calls
            parsed = replace(parsed, tool_use=replace(parsed.tool_use, required=()))
        return _prepared(fields, parsed)

    def _completion(self, body: bytes) -> PreparedRequest:
        fields = _parse_body(CompletionRequest, body)
        self._check(fields)
        return _prepared(fields, self._parser.completion(fields))

    def _check(self, fields: GenerationRequest) -> None:
        check_model(self._names, fields.model)
        fields.check_supported()
        fields.check_num_answers()

    def _tokenize(self, body: bytes) -> bytes:
        fields = _parse_body(TokenizeRequest, body)
        check_model(self._names, fields.model)
        served = self._served
        given = [n for n in ("prompt", "content", "messages") if getattr(fields, n) is not None]
        if len(given) != 1:
            raise invalid_field("prompt", "prompt, content or messages must be given, one of them.")
        special = fields.add_special_tokens is not False
        text = fields.content if fields.prompt is None else fields.prompt
        if fields.messages is not None:
            text = self._parser.render_chat(
                fields.messages,
                fields.tools or (),
                add_generation_prompt=fields.add_generation_prompt is not False,
            )
            special = bool(fields.add_special_tokens)  # the template writes its own
        ids = self._parser.encode(text or "", special=special)
        strings = None
        if fields.return_token_strs:
            strings = [served.tokenizer.convert_ids_to_tokens(token) or "" for token in ids]
        reply = TokenizeReply(
            count=len(ids), max_model_len=served.context, tokens=ids, token_strs=strings
        )
        return reply.model_dump_json().encode()

    def _detokenize(self, body: bytes) -> bytes:
        fields = _parse_body(DetokenizeRequest, body)
        check_model(self._names, fields.model)
        for token in fields.tokens:
            self._parser.check_token(token, "tokens")
        text = self._parser.decode(fields.tokens)
        return DetokenizeReply(prompt=text, content=text).model_dump_json().encode()


def check_model(names: Sequence[str], name: str | None) -> None:
    """Raise ApiError unless a model is served under this name; None: the request names none."""
    if name is not None and name not in names:
        raise ApiError(
            HTTPStatus.NOT_FOUND,
            f"The model {name[:100]!r} is not served here; ask for {', '.join(names)}.",
            param="model",
            code="model_not_found",
        )


def not_a_json_object() -> ApiError:
    """The error for a body that is not a JSON object, or is not declared as JSON."""
    return validation_failed([{"type": "missing", "loc": (), "msg": ""}])


def _parse_body(kind: type[Body], body: bytes) -> Body:
    """The fields of a body. Raises ApiError."""
    if not body:
        raise not_a_json_object()
    try:
        return kind.model_validate(json.loads(body))
    except json.JSONDecodeError as error:
        raise validation_failed([{"type": "json_invalid", "loc": (), "msg": error.msg}]) from None
    except ValidationError as error:
        raise validation_failed(error.errors(include_url=False)) from None
    except (RecursionError, UnicodeDecodeError, ValueError):  # a number of too many digits
        raise ApiError(
            HTTPStatus.BAD_REQUEST, "The body cannot be read; send JSON in UTF-8."
        ) from None


def _prepared(fields: GenerationRequest, parsed: ParsedRequest) -> PreparedRequest:
    options = fields.stream_options
    return PreparedRequest(
        parsed,
        fields.model,
        bool(fields.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
    )
