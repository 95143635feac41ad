"""The dashboard's page: files that are the same for everybody, and hold nothing of a cluster."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

FOLDER = Path(__file__).parent / "page"
# The page runs and asks what comes from here alone, and nobody shows it inside his own.
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
    """`/` and what it loads."""

    async def page(_: Request) -> Response:
        return FileResponse(FOLDER / "index.html", headers=HEADERS)

    return [Route("/", page), Mount("/page", _Files(directory=FOLDER))]


class _Files(StaticFiles):
    def file_response(self, *args: object, **options: object) -> Response:
        response = super().file_response(*args, **options)  # type: ignore[arg-type]
        response.headers.update(HEADERS)
        return response
