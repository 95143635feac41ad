"""Who may ask: keys, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from pipespec.server.errors import ApiError

OPEN = "/health"
BEARER = "bearer "


class Keys:
    """Refuses whoever shows none of the keys, but on `/health`. Without keys everybody may ask.

    A key is shown as `Authorization: Bearer KEY` or `X-Api-Key: KEY`. A browser asks without one
    what it may send (OPTIONS); CORS answers before.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]):
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] == "http" and scope["path"] != OPEN
        if self._digests and guarded and not self._known(Headers(scope=scope)):
            error = ApiError(
                HTTPStatus.UNAUTHORIZED,
                "The API key is missing or wrong; send it as Authorization: Bearer KEY.",
                code="invalid_api_key",
            )
            reply = JSONResponse(error.reply, error.status, error.headers)
            await reply(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _known(self, headers: Headers) -> bool:
        shown = headers.get("x-api-key", "")
        bearer = headers.get("authorization", "")
        if bearer.lower().startswith(BEARER):
            shown = bearer[len(BEARER) :].strip()
        # Digests are of one length, and all of them are compared.
        digest = _digest(shown.encode("latin-1", errors="replace"))
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
