"""Errors over HTTP: one sentence, in the four fields that OpenAI's clients read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from pipespec.errors import (
    ConfigError,
    GrammarError,
    LogFull,
    NonFiniteLogits,
    PipespecError,
    Unreachable,
    WritesRefused,
)
from pipespec.system.validation import shown

# After how many seconds a client may try again that was refused because of load.
RETRY_AFTER_S = 1
MAX_MESSAGE = 1000
INVALID, LIMITED, FAILED = "invalid_request_error", "rate_limit_error", "server_error"
# Pydantic's prefix of messages that our validators have raised.
VALUE_ERROR = "Value error, "
# In place of messages in which pydantic speaks of Python instead of JSON, by the error's type.
MESSAGES = {
    "model_type": "should be an object",
    "model_attributes_type": "should be an object",
    "none_required": "is not supported; leave it out",
    "string_pattern_mismatch": "should match {pattern}",
    "too_short": "should have {min_length} or more items",
    "too_long": "should have {max_length} items at most",
    "string_too_short": "should have {min_length} or more characters",
    "string_too_long": "should have {max_length} characters at most",
}


class ApiError(Exception):
    """A request is refused, or fails: one sentence, the field that is wrong and a code for
    programs."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.status = status
        self.message = message[:MAX_MESSAGE]
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        kind = INVALID
        if self.status == HTTPStatus.TOO_MANY_REQUESTS:
            kind = LIMITED
        elif self.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            kind = FAILED
        detail = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": detail}

    @property
    def headers(self) -> dict[str, str]:
        if self.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
            return {"Retry-After": str(RETRY_AFTER_S)}
        if self.status == HTTPStatus.UNAUTHORIZED:
            return {"WWW-Authenticate": "Bearer"}
        return {}


class ServerShuttingDown(PipespecError):
    """The server is shutting down; ask again in a moment."""


def invalid_field(message: str, code: str | None = None, *, param: str = "") -> ApiError:
    """The error for a wrong field: `param`, or the first word of the message."""
    named = param or re.split("[ ,]", message, maxsplit=1)[0]
    return ApiError(HTTPStatus.BAD_REQUEST, message, named, code)


def api_error_of(error: PipespecError) -> ApiError:
    if isinstance(error, Unreachable) and not isinstance(error, WritesRefused):
        # Its message names internal addresses.
        return cluster_unavailable()
    for kind, status, code in (
        (ConfigError, HTTPStatus.BAD_REQUEST, None),
        (ServerShuttingDown, HTTPStatus.SERVICE_UNAVAILABLE, "shutting_down"),
        (LogFull, HTTPStatus.SERVICE_UNAVAILABLE, "log_full"),
        (WritesRefused, HTTPStatus.SERVICE_UNAVAILABLE, "log_not_writable"),
        (GrammarError, HTTPStatus.BAD_REQUEST, "grammar_failed"),  # it would fail again
        (NonFiniteLogits, HTTPStatus.INTERNAL_SERVER_ERROR, "not_finite"),
    ):
        if isinstance(error, kind):
            return ApiError(status, str(error), code=code)
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))


def cluster_unavailable(state: str = "is not ready") -> ApiError:
    """The error while the cluster does not answer, or loads."""
    message = f"The cluster {state}; try again in a moment."
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="not_ready")


def validation_failed(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first error that validation has found, as one sentence that names the field."""
    first = errors[0]
    place = first["loc"][1:] if first["loc"][:1] == ("body",) else first["loc"]
    kind, message = first["type"], str(first["msg"])
    if not place:
        return ApiError(HTTPStatus.BAD_REQUEST, "The body must be a JSON object.")
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in place]
    name = "".join(parts).removeprefix(".")  # such as messages[0].content
    if kind == "missing":
        return invalid_field(f"{name} is missing.", param=name)
    if message.startswith(VALUE_ERROR):
        return invalid_field(f"{name} {message.removeprefix(VALUE_ERROR)}.", param=name)
    must = MESSAGES.get(kind, "").format(**first.get("ctx", {}))
    must = must or _plain(message.removeprefix("Input "))
    return invalid_field(f"{name} is {shown(first.get('input'))}, but {must}.", param=name)


def _plain(clause: str) -> str:
    return " ".join(clause.split()).rstrip(".")
