"""The conversations that a later request may continue, and the responses that end them."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal

from pydantic import BaseModel

from pipespec.server.api_errors import ApiError


def conversation_name(response: str, api_key_digest: bytes) -> str:
    """The name in the log of the conversation up to a response: only the id, which is random and
    not in the log, and the same API key lead to it."""
    return hmac.new(response.encode(), api_key_digest, hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class KeptResponse:
    """What is kept of a response: its JSON, and a JSON list of the messages up to it and with it.
    Neither has line breaks."""

    response: bytes
    messages: bytes

    def packed(self) -> bytes:
        return self.response + b"\n" + self.messages

    @classmethod
    def unpacked(cls, packed: bytes) -> KeptResponse:
        """The inverse of `packed`."""
        response, _, messages = packed.partition(b"\n")
        return cls(response, messages)


class DeletedResponse(BaseModel):
    """The reply of DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


def no_response_to_continue(response: str) -> ApiError:
    """The error for a request that continues a response under whose id nothing is kept."""
    return ApiError(
        HTTPStatus.BAD_REQUEST,
        f"{_missing(response)}; send the conversation as input.",
        param="previous_response_id",
        code="previous_response_not_found",
    )


def no_such_response(response: str) -> ApiError:
    """The error for the route of a response under whose id nothing is kept."""
    return ApiError(HTTPStatus.NOT_FOUND, f"{_missing(response)}.")


def _missing(response: str) -> str:
    return f"There is no response {response[:100]!r}, or it is not kept any more"
