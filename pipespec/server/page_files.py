"""The dashboard's page: static files, which hold no data of a cluster."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

FOLDER = Path(__file__).parent / "page"
# The page loads everything from this server, and no other page may embed it.
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


def page_routes() -> list[BaseRoute]:
    """The routes of `/` and of the files that it loads."""

    async def page(_: Request) -> Response:
        return FileResponse(FOLDER / "index.html", headers=HEADERS)

    return [Route("/", page), Mount("/page", _Files(directory=FOLDER))]


class _Files(StaticFiles):
    def file_response(self, *args: object, **options: object) -> Response:
        response = super().file_response(*args, **options)  # type: ignore[arg-type]
        response.headers.update(HEADERS)
        return response
