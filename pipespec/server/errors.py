"""What is refused over HTTP: one sentence, and the four keys that OpenAI's clients read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel

from pipespec.errors import ConfigError, GrammarError, PipespecError, Unreachable
from pipespec.system.reading import shown

# When a client that was refused for now may try again, in seconds.
RETRY_AFTER_S = 1
LONGEST_MESSAGE = 1000
INVALID, LIMITED, FAILED = "invalid_request_error", "rate_limit_error", "server_error"
# What pydantic puts in front of our own words.
OWN_WORDS = "Value error, "
# Our words for what it says of Python instead of JSON, by the type of the error.
OUR_WORDS = {
    "model_type": "should be an object",
    "model_attributes_type": "should be an object",
    "string_pattern_mismatch": "should match {pattern}",
    "too_short": "should have {min_length} or more items",
    "too_long": "should have {max_length} items at most",
}


class ErrorDetail(BaseModel):
    """Why a request was refused or failed."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """The body of every reply that is no success."""

    error: ErrorDetail


class ApiError(Exception):
    """A request is refused, or fails.

    Attributes:
        status: of HTTP.
        message: one sentence.
        param: the field of the request that is wrong, if it is one.
        code: a word for programs, if there is one.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.status = status
        self.message = message[:LONGEST_MESSAGE]
        self.param = param
        self.code = code

    @property
    def reply(self) -> dict[str, Any]:
        """The body that says it."""
        kind = INVALID
        if self.status == HTTPStatus.TOO_MANY_REQUESTS:
            kind = LIMITED
        elif self.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            kind = FAILED
        detail = ErrorDetail(message=self.message, type=kind, param=self.param, code=self.code)
        return ErrorReply(error=detail).model_dump()

    @property
    def headers(self) -> dict[str, str]:
        """Beside the body."""
        if self.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
            return {"Retry-After": str(RETRY_AFTER_S)}
        if self.status == HTTPStatus.UNAUTHORIZED:
            return {"WWW-Authenticate": "Bearer"}
        return {}


class Ending(PipespecError):
    """The server is shutting down; ask again in a moment."""


def refused(param: str, message: str, code: str | None = None) -> ApiError:
    """A field of the request is wrong."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def of(error: PipespecError) -> ApiError:
    """What one of our own errors means for the client."""
    if isinstance(error, ConfigError):
        return ApiError(HTTPStatus.BAD_REQUEST, str(error))
    if isinstance(error, Ending):
        return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, str(error), code="shutting_down")
    if isinstance(error, GrammarError):  # again it would fail again
        return ApiError(HTTPStatus.BAD_REQUEST, str(error), code="grammar_failed")
    if isinstance(error, Unreachable):  # its message names addresses of ours
        return away()
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))


def away() -> ApiError:
    """The cluster does not answer now."""
    return ApiError(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "The cluster is not ready; try again in a moment.",
        code="not_ready",
    )


def loading() -> ApiError:
    """The cluster has not been ready yet."""
    return ApiError(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "The cluster loads; try again in a moment.",
        code="not_ready",
    )


def invalid(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """What validation has found, the first of it, as one sentence that names the field."""
    first = errors[0]
    place = first["loc"][1:] if first["loc"][:1] == ("body",) else first["loc"]
    kind, message = first["type"], str(first["msg"])
    if kind == "json_invalid":
        why = first.get("ctx", {}).get("error", message)
        return ApiError(HTTPStatus.BAD_REQUEST, f"The body is no JSON: {_plain(str(why))}.")
    if not place:
        return ApiError(
            HTTPStatus.BAD_REQUEST,
            "The body must be a JSON object, sent as Content-Type: application/json.",
        )
    name = named(place)
    if kind == "missing":
        return refused(name, f"{name} is missing.")
    if message.startswith(OWN_WORDS):
        return refused(name, f"{name} {message.removeprefix(OWN_WORDS)}.")
    must = OUR_WORDS.get(kind, "").format(**first.get("ctx", {}))
    must = must or _plain(message.removeprefix("Input "))
    return refused(name, f"{name} is {shown(first.get('input'))}, but {must}.")


def named(place: Sequence[str | int]) -> str:
    """A place in the body as people write it: messages[0].content."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in place]
    return "".join(parts).removeprefix(".")


def _plain(clause: str) -> str:
    return " ".join(clause.split()).rstrip(".")
