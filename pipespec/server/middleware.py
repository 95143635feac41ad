"""ASGI middleware: request ids, the access log, and the checks that refuse a request, none of
which reads its body.

A browser sends requests on behalf of any page that its user opens. Two headers that a page cannot
choose identify them: `Origin` names the page's own origin, and `Host` the host of the URL. A page
can make its own name resolve to the server's address (DNS rebinding), so that its origin equals the
server's. Without an API key the server therefore accepts only names that no page can have, and
those of `--allowed-hosts`.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipespec.server.api_errors import ApiError
from pipespec.server.dialect import error_reply, public_routes
from pipespec.server.options import ANY, host_name, is_address, normal_name, normal_origin
from pipespec.system.validation import shown

REQUEST_ID = "X-Request-Id"
# A client's own id is sent back if it has this form; any other is replaced.
_VALID_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=@-]{0,127}")
BEARER = "bearer "
MAX_PATH = 200  # characters of a path in the access log


def new_request_id() -> str:
    return f"req_{secrets.token_hex(16)}"


class RequestIds:
    """Adds an `X-Request-Id` to every reply, by which a client's logs and reports can refer to it:
    the client's own if it is up to 128 letters, digits and `._:/+=@-`, else a new one."""

    def __init__(self, app: ASGIApp, on_answered: Callable[[str], None] | None = None):
        """`on_answered` is called with a line on each request at its end: the access log."""
        self._app = app
        self._on_answered = on_answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = given if _VALID_ID.fullmatch(given) else new_request_id()
        state = scope.setdefault("state", {})
        began, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if self._on_answered is not None:
                path = scope["raw_path"].decode("latin-1")[:MAX_PATH]
                self._on_answered(
                    f"{datetime.now(UTC).isoformat(timespec='milliseconds')} {request_id} "
                    f"{scope['method']} {path} {status} key={state.get('key_name') or '-'} "
                    f"seconds={time.monotonic() - began:.3f}"
                    f"{state['text'].summary if 'text' in state else ''}"
                )


class Check:
    """Answers a request with the error that `refusal` returns, or passes it on if that is None."""

    def __init__(self, app: ASGIApp, refusal: Callable[[Scope, Headers], ApiError | None]):
        self._app = app
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope, Headers(scope=scope)) if scope["type"] == "http" else None
        app = self._app if error is None else error_reply(scope["path"], error)
        await app(scope, receive, send)


class HostCheck:
    """Refuses requests for a host that is not one of the server's with 403.

    The server accepts the loopback names (localhost and names below it), addresses, `host` (the
    value of `--host`) and `allowed`; with "*" every name. A request without Host is not a
    browser's.
    """

    def __init__(self, host: str, allowed: Sequence[str]):
        self._any = ANY in allowed
        self._names = {normal_name(name) for name in ("localhost", host, *allowed)}
        self._suffixes = (".localhost", *(n[1:] for n in self._names if n.startswith("*.")))

    def __call__(self, scope: Scope, headers: Headers) -> ApiError | None:
        for host in () if self._any else headers.getlist("host"):
            name = host_name(host)
            known = name in self._names or (name and name.endswith(self._suffixes))
            if name is None or not (known or is_address(name)):
                return ApiError(
                    HTTPStatus.FORBIDDEN,
                    f"This server does not serve the host {shown(host)}; ask for it by its "
                    "address, start it with --allowed-hosts, or with an API key.",
                    code="host_not_allowed",
                )
        return None


class OriginCheck:
    """Refuses requests of web pages of other origins with 403. The server's own origin is the
    scheme and the Host of the request, or X-Forwarded-Proto of a proxy on this machine (uvicorn
    reads it)."""

    def __init__(self, allowed: Sequence[str]):
        self._any = ANY in allowed
        self._allowed = {normal_origin(origin) for origin in allowed} - {None}

    def __call__(self, scope: Scope, headers: Headers) -> ApiError | None:
        foreign = None if self._any else self._foreign(scope["method"], scope["scheme"], headers)
        if foreign is None:
            return None
        return ApiError(
            HTTPStatus.FORBIDDEN,
            f"Web pages of {foreign} may not send requests to this server; start it with "
            "--allowed-origins if they should.",
            code="origin_not_allowed",
        )

    def _foreign(self, method: str, scheme: str, headers: Headers) -> str | None:
        origins = headers.getlist("origin")
        own = normal_origin(f"{scheme}://{headers.get('host', '')}")
        for origin in origins:
            normal = normal_origin(origin)
            if normal is None or normal not in {own, *self._allowed}:
                return f"the origin {shown(origin)}"
        # Images and scripts of a page are fetched without Origin; a link to the dashboard is not
        # the page's own request, but a form is.
        site = headers.get("sec-fetch-site", "none")
        linked = method == "GET" and headers.get("sec-fetch-mode", "navigate") == "navigate"
        if not origins and not linked and site in ("cross-site", "same-site"):
            return "another site"
        return None


class ApiKeyCheck:
    """Refuses requests without one of `keys` with 401, except for `/health` and the public routes
    (pages), which reveal nothing about the cluster. With no keys every request passes.

    CORS answers a browser's preflight before this check. The digest of the key is left in the
    request's `state.api_key_digest`, and the key's name, of `names`, in `state.key_name`. Digests
    are compared in constant time.
    """

    def __init__(self, keys: Sequence[str], names: Sequence[str] = ()):
        self._names = names
        self._digests = [_digest(key.encode()) for key in keys]
        self._public = public_routes()

    def __call__(self, scope: Scope, headers: Headers) -> ApiError | None:
        public = scope["path"] == "/health" or any(
            route.matches(scope)[0] is not Match.NONE for route in self._public
        )
        required = bool(self._digests) and not public
        key, bearer = headers.get("x-api-key", ""), headers.get("authorization", "")
        if bearer.lower().startswith(BEARER):
            key = bearer[len(BEARER) :].strip()
        digest = _digest(key.encode("latin-1", errors="replace")) if required else b""
        scope.setdefault("state", {})["api_key_digest"] = digest
        # Digests have equal lengths, and all of them are compared.
        same = [hmac.compare_digest(digest, known) for known in self._digests]
        if any(same):
            scope["state"]["key_name"] = self._names[same.index(True)] if self._names else ""
        if not required or any(same):
            return None
        return ApiError(
            HTTPStatus.UNAUTHORIZED,
            "The API key is missing or wrong; send it as Authorization: Bearer KEY.",
            code="invalid_api_key",
        )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
