"""Who may ask, and how much: keys, compared in constant time, and a limit of the body."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipespec.server.errors import ApiError

# What needs no key: it says nothing.
OPEN = ("/health", "/", "/page/")
BEARER = "bearer "


class Keys:
    """Refuses whoever shows none of the keys, but on `/health` and for the dashboard's page.
    Without keys everybody may ask.

    A key is shown as `Authorization: Bearer KEY` or `X-Api-Key: KEY`. A browser asks without one
    what it may send (OPTIONS); CORS answers before.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]):
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] == "http" and not _open(scope["path"])
        if self._digests and guarded and not self._known(Headers(scope=scope)):
            error = ApiError(
                HTTPStatus.UNAUTHORIZED,
                "The API key is missing or wrong; send it as Authorization: Bearer KEY.",
                code="invalid_api_key",
            )
            await _refuse(error, scope, receive, send)
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


class BodyLimit:
    """Refuses bodies of more than `most` bytes, by what they say of their length or have."""

    def __init__(self, app: ASGIApp, most: int):
        self._app = app
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = ApiError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"The body has more than {self._most} bytes; send less.",
        )
        declared = Headers(scope=scope).get("content-length", "") if scope["type"] == "http" else ""
        if declared.isdigit() and int(declared) > self._most:
            await _refuse(error, scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._most:
                # FastAPI lets these through while it reads.
                raise HTTPException(error.status, error.message)
            return message

        await self._app(scope, counted, send)


def _open(path: str) -> bool:
    *pages, folder = OPEN
    return path in pages or path.startswith(folder)


def check_origin(headers: Headers, allowed: Sequence[str]) -> None:
    """Raise ApiError if a browser says that a page of another origin asks, which is not among the
    allowed ones. For routes without a body: others ask the browser for leave first (CORS)."""
    foreign = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
    if foreign and headers.get("origin", "") not in allowed and "*" not in allowed:
        raise ApiError(HTTPStatus.FORBIDDEN, "Pages of other origins may not ask for this.")


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    await JSONResponse(error.reply, error.status, error.headers)(scope, receive, send)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
