"""The dashboard and the chat page: static files, which hold no data of a cluster."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, Query
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from pipespec.extras.pages.dashboard import Dashboard
from pipespec.server.app import MAX_REQUEST
from pipespec.server.dialect import Dialect
from pipespec.server.openai_serving import OpenAIServing

FOLDER = Path(__file__).parent / "page"
PAGES = {"/": "index.html", "/chat": "chat.html"}
# A page loads everything from this server, and no other page may embed it.
POLICY = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "connect", "img")),
        *("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def _page(file: str) -> Callable[[Request], Awaitable[Response]]:
    async def page(_: Request) -> Response:
        return FileResponse(FOLDER / file, headers=HEADERS)

    return page


class _Files(StaticFiles):
    def file_response(self, *args: object, **options: object) -> Response:
        response = super().file_response(*args, **options)  # type: ignore[arg-type]
        response.headers.update(HEADERS)
        return response


def mount(app: FastAPI, serving: OpenAIServing) -> None:
    dashboard = Dashboard(serving)

    @app.get("/events", include_in_schema=False, response_model=None)
    async def events(
        http: Request,
        request: Annotated[int | None, Query(ge=1, le=MAX_REQUEST)] = None,
    ) -> Response:
        return dashboard.watch(request, http.state.api_key_digest)


DIALECT = Dialect(
    public_routes=[
        *(Route(path, _page(file)) for path, file in PAGES.items()),
        Mount("/page", _Files(directory=FOLDER)),
    ],
    mount=mount,
)
