"""What the dashboard's page is told: the figures of /metrics once a second, and the steps.

A stream of server-sent events. "snapshot" holds every figure, and the requests that are not
answered yet; "steps" what the head fed meanwhile, and the tree of the request that is watched.
Who watches has a connection to Redis of his own, and nothing is kept here for him.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict, astuple
from http import HTTPStatus
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Send

from pipespec.client.aio import AsyncClient
from pipespec.controller.overview import Overview
from pipespec.controller.watching import AsyncWatch
from pipespec.errors import ControllerError, Unreachable
from pipespec.head.watching import STEP, ShownStep, ShownTree
from pipespec.server.errors import ApiError, away
from pipespec.server.metrics import Metrics
from pipespec.text import token_text

# Who may watch at a time, and how many requests that are decoded, or wait, are listed.
MOST_WATCHERS = 32
MOST_LISTED = 100
SNAPSHOT_S = 1.0
# Steps are told together that come within this time; of a tree, how it is after the last of them.
GATHER_S = 0.05
# How soon a server that is about to end is noticed.
LOOK_S = 0.25
# The largest number of a request: numbers of JSON are exact up to here.
LARGEST = 2**53 - 1

# What a step's entry in Redis holds.
Fields = dict[bytes, bytes]


class Watched(StreamingResponse):
    """The events of one who watches, until he leaves."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes]):
        super().__init__(events, headers={"Cache-Control": "no-store"})

    async def stream_response(self, send: Send) -> None:
        # Whoever leaves while nothing can be sent leaves the iterator where it is.
        async with aclosing(self.body_iterator):  # type: ignore[type-var]
            await super().stream_response(send)


class Dashboard:
    """Tells whoever watches how the cluster of a server is doing."""

    def __init__(
        self,
        client: AsyncClient,
        metrics: Metrics,
        look: Callable[[], Awaitable[Overview | None]],
    ):
        self._client = client
        self._metrics = metrics
        self._look = look
        self._watchers = 0
        self._ending = False
        self._texts: dict[int, str] = {}  # of tokens, as far as they were shown

    def end(self) -> None:
        """Let go of whoever watches."""
        self._ending = True

    def watch(self, request: int | None) -> Watched:
        """GET /events. Raises ApiError."""
        if self._watchers >= MOST_WATCHERS:
            raise ApiError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{MOST_WATCHERS} pages are watching, and no more may; close one.",
            )
        return Watched(self._events(request))

    async def cancel(self, request: int) -> None:
        """POST /requests/{request}/cancel. Raises ApiError."""
        if self._client.away:
            raise away()
        try:
            await self._client.cancel(request)
        except Unreachable:
            raise away() from None
        except ControllerError:
            raise ApiError(
                HTTPStatus.NOT_FOUND, f"There is no request {request}.", param="request"
            ) from None

    async def _events(self, request: int | None) -> AsyncIterator[bytes]:
        running = self._client.running
        watch = self._client.watch(request)
        self._watchers += 1
        try:
            while not self._ending:
                if running is not self._client.running:  # the name belongs to another now
                    await watch.close()
                    running, watch = self._client.running, self._client.watch(request)
                    self._texts.clear()
                due = time.monotonic() + SNAPSHOT_S
                yield _event("snapshot", await self._snapshot())
                async for steps in self._until(due, watch):
                    yield _event("steps", steps_of(steps, request, self._text))
        finally:
            self._watchers -= 1
            await watch.close()

    async def _until(self, due: float, watch: AsyncWatch) -> AsyncIterator[list[Fields]]:
        """The steps that come until a moment, those together that come together."""
        while not self._ending and (left := due - time.monotonic()) > 0:
            try:
                if steps := await watch.next(min(left, LOOK_S)):
                    await asyncio.sleep(GATHER_S)
                    yield steps + await watch.next(0.0)
            except Unreachable:
                await asyncio.sleep(min(left, LOOK_S))

    async def _snapshot(self) -> dict[str, Any]:
        overview = await self._look()
        told: list[dict[str, Any]] = []
        if overview is not None:
            with suppress(Unreachable):
                told = [asdict(each) for each in await self._client.unfinished(MOST_LISTED)]
        served = self._client.served
        return {
            "at": time.monotonic(),
            "model": self._metrics.model,
            "time_scale": served.time_scale,
            "synthetic": served.synthetic,
            "figures": self._metrics.figures(overview),
            "last_fault": overview and overview.last_fault,
            "requests": told,
        }

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = token_text(self._client.served.tokenizer, token)
        return self._texts[token]


def steps_of(
    steps: Sequence[Fields], request: int | None, text: Callable[[int], str]
) -> dict[str, Any]:
    """What is told of steps that came together, each as the head showed it: its epoch and number
    and its rows by kind; and of the tree of a request what was accepted in them, and how it was
    after the last of them that showed it. `text` is that of a token."""
    rows = []
    accepted: list[int] = []
    newest: tuple[int, int, ShownTree] | None = None
    for fields in steps:
        epoch, step = int(fields[b"epoch"]), ShownStep.unpack(fields[STEP.encode()])
        rows.append([epoch, *astuple(step)])
        if payload := fields.get(str(request).encode()):
            newest = epoch, step.step, ShownTree.unpack(payload)
            accepted += newest[2].accepted
    if newest is None:
        return {"steps": rows, "tree": None}
    number, last, tree = newest
    told = {"epoch": number, "step": last, "request": request, **_told(tree)}
    told["texts"] = [text(token) for token in told["token"]]
    told |= {"accepted": accepted, "accepted_texts": [text(token) for token in accepted]}
    return {"steps": rows, "tree": told}


def _told(tree: ShownTree) -> dict[str, Any]:
    columns = {name: getattr(tree, name).tolist() for name in ("id", "parent", "token", "fed")}
    logp = [round(value, 4) for value in tree.logp.tolist()]
    return {"length": tree.length, "size": tree.size, **columns, "logp": logp}


def _event(name: str, data: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
