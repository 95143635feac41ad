"""The names of conversations that a later request may continue."""

from __future__ import annotations

import hashlib
import hmac
from http import HTTPStatus

from pipespec.server.api_errors import ApiError


def conversation_name(response: str, api_key_digest: bytes) -> str:
    """The name in the log of the conversation up to a response: only the id, which is random and
    not in the log, and the same API key lead to it."""
    return hmac.new(response.encode(), api_key_digest, hashlib.sha256).hexdigest()


def no_such_response(response: str) -> ApiError:
    """The error for an id under which nothing is kept."""
    return ApiError(
        HTTPStatus.BAD_REQUEST,
        f"There is no response {response[:100]!r}, or it is not kept any more; send the "
        "conversation as input.",
        param="previous_response_id",
        code="previous_response_not_found",
    )
