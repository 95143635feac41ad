"""The dashboard and the chat page: static files, which hold no data of a cluster, and a stream of
server-sent events for each page of the dashboard.

An event "history" comes first, with the last hour; "snapshot" once a second, with the metrics of
/metrics and the unfinished requests; "steps" has the head's steps since the last one, and the tree
of the request that the page shows. Each page has a Redis connection of its own, and the server
keeps no state for it.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from pipespec.controller.async_request_log import TelemetryReader
from pipespec.errors import Unreachable
from pipespec.head.tree_telemetry import STEP, StepSnapshot, TreeSnapshot
from pipespec.server.api_errors import ApiError
from pipespec.server.app import MAX_REQUEST
from pipespec.server.dialect import Dialect
from pipespec.server.openai_serving import Moment, OpenAIServing
from pipespec.server.reply_format import sse
from pipespec.server.response_stream import EventStream
from pipespec.text import token_text

MAX_PAGES = 32  # that are open at a time
# How many requests that are decoded, and how many that wait, a snapshot lists.
MAX_LISTED = 100
SNAPSHOT_S = 1.0
# Steps within this time form one event, with the tree as it is after the last of them.
GATHER_S = 0.05
# How soon a server that is about to end is noticed.
LOOK_S = 0.25

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
# The fields of a step's entry in Redis.
StepEntry = dict[bytes, bytes]


class Dashboard:
    """Streams the state of a server's cluster to dashboard pages.

    A request and its tokens are shown only to clients that send the API key with which it came.
    """

    def __init__(self, serving: OpenAIServing):
        self._serving = serving
        self._client = serving.client
        self._num_pages = 0
        self._texts: dict[int, str] = {}  # of tokens that were shown

    def watch(self, request: int | None, api_key_digest: bytes) -> EventStream:
        """GET /events, for a page with the API key of this digest. Raises ApiError."""
        if self._num_pages >= MAX_PAGES:
            raise ApiError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{MAX_PAGES} pages are watching, and no more may; close one.",
            )
        if request is not None and not self.may_watch(request, api_key_digest):
            raise ApiError(
                HTTPStatus.NOT_FOUND,
                f"This server has no open request {request} with your API key.",
                param="request",
            )
        events = self._events(request, api_key_digest)
        return EventStream(events, headers={"Cache-Control": "no-store"})

    def origins(self, api_key_digest: bytes) -> dict[int, dict[str, str]]:
        """What is shown of the requests with an API key, by their numbers in the cluster's log."""
        return {
            number: {
                "client": stream.origin.client,
                "agent": stream.origin.agent,
                "preview": stream.origin.preview,
            }
            for stream in self._serving.open
            if hmac.compare_digest(stream.origin.api_key_digest, api_key_digest)
            for number in stream.numbers
        }

    def may_watch(self, number: int, api_key_digest: bytes) -> bool:
        """If the server asks for keys, only open requests that came here with the same one."""
        return not api_key_digest or number in self.origins(api_key_digest)

    async def _events(self, request: int | None, api_key_digest: bytes) -> AsyncIterator[bytes]:
        running = self._client.running
        watch = self._client.watch(request)
        self._num_pages += 1
        try:
            yield sse(history_event(self._serving.history, time.monotonic()), "history")
            while not self._serving.ending:
                if running is not self._client.running:  # the name belongs to another cluster now
                    await watch.close()
                    if request is not None and not self.may_watch(request, api_key_digest):
                        request = None
                    running, watch = self._client.running, self._client.watch(request)
                    self._texts.clear()
                due = time.monotonic() + SNAPSHOT_S
                yield sse(await self._snapshot(api_key_digest), "snapshot")
                async for steps in self._until(due, watch):
                    yield sse(steps_event(steps, request, self._text), "steps")
        finally:
            self._num_pages -= 1
            await watch.close()

    async def _until(self, due: float, watch: TelemetryReader) -> AsyncIterator[list[StepEntry]]:
        """The steps that arrive until `due`, in groups that arrive together."""
        while not self._serving.ending and (left := due - time.monotonic()) > 0:
            try:
                if steps := await watch.next(min(left, LOOK_S)):
                    await asyncio.sleep(GATHER_S)
                    yield steps + await watch.next(0.0)
            except Unreachable:
                await asyncio.sleep(min(left, LOOK_S))

    async def _snapshot(self, api_key_digest: bytes) -> dict[str, Any]:
        status = await self._serving.cluster_status()
        requests: list[dict[str, Any]] = []
        if status is not None:
            with suppress(Unreachable):
                unfinished = await self._client.log.unfinished(MAX_LISTED)
                origins = self.origins(api_key_digest)
                requests = [
                    asdict(each)
                    | {"watchable": not api_key_digest or each.request in origins}
                    | origins.get(each.request, {})
                    for each in unfinished
                ]
        running = self._client.running
        served = running.served
        return {
            "at": time.monotonic(),
            "model": self._serving.metrics.model,
            "time_scale": served.time_scale,
            "synthetic": served.synthetic,
            "figures": self._serving.metrics.samples_by_name(status),
            "last_fault": status and status.last_fault,
            "requests": requests,
        }

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = token_text(self._client.served.tokenizer, token)
        return self._texts[token]


def history_event(moments: Iterable[Moment], now: float) -> dict[str, Any]:
    """The data of an event "history": the time now, and the moments, each with its fault only where
    that is another than before."""
    rows: list[list[Any]] = []
    before = None
    for *counts, fault in moments:
        rows.append([*counts, fault if fault != before else None])
        before = fault or before
    return {"at": now, "moments": rows}


def steps_event(
    steps: Sequence[StepEntry], request: int | None, text: Callable[[int], str]
) -> dict[str, Any]:
    """The data of an event "steps".

    "steps" has the epoch, the number and the rows by kind of each step. "tree" has the tree of
    `request` after the last step that published it, and all tokens that these steps accepted.
    `text` returns the text of a token.
    """
    rows = []
    accepted: list[int] = []
    newest: tuple[int, int, TreeSnapshot] | None = None
    for fields in steps:
        epoch, step = int(fields[b"epoch"]), StepSnapshot.unpack(fields[STEP.encode()])
        rows.append([epoch, *astuple(step)])
        if payload := fields.get(str(request).encode()):
            newest = epoch, step.step, TreeSnapshot.unpack(payload)
            accepted += newest[2].accepted
    if newest is None:
        return {"steps": rows, "tree": None}
    epoch, number, tree = newest
    columns = {name: getattr(tree, name).tolist() for name in ("id", "parent", "token", "fed")}
    shown = {
        "epoch": epoch,
        "step": number,
        "request": request,
        "length": tree.length,
        "size": tree.size,
        **columns,
        "logp": [round(value, 4) for value in tree.logp.tolist()],
        "texts": [text(token) for token in columns["token"]],
        "accepted": accepted,
        "accepted_texts": [text(token) for token in accepted],
    }
    return {"steps": rows, "tree": shown}


# --- routes -------------------------------------------------------------------------------------


async def _page(request: Request) -> Response:
    return FileResponse(FOLDER / PAGES[request.url.path], headers=HEADERS)


class _Files(StaticFiles):
    def file_response(self, *args: object, **options: object) -> Response:
        response = super().file_response(*args, **options)  # type: ignore[arg-type]
        response.headers.update(HEADERS)
        return response


def mount(app: FastAPI, serving: OpenAIServing) -> None:
    dashboard = Dashboard(serving)

    @app.get("/events", include_in_schema=False, response_model=None)
    async def events(
        http: Request, request: Annotated[int | None, Query(ge=1, le=MAX_REQUEST)] = None
    ) -> Response:
        return dashboard.watch(request, http.state.api_key_digest)


DIALECT = Dialect(
    public_routes=[
        *(Route(path, _page) for path in PAGES),
        Mount("/page", _Files(directory=FOLDER)),
    ],
    mount=mount,
)
