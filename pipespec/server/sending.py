"""How answers get to who asked: whole, or as a stream of events; and what if nobody is there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from pipespec.errors import PipespecError
from pipespec.server.answering import Answering
from pipespec.server.errors import of
from pipespec.server.shaping import Shape

# A connection says something at least this often while its request waits.
KEEPALIVE_S = 10.0
KEEPALIVE = b": waiting\n\n"
DONE = b"data: [DONE]\n\n"
# What proxies write to their logs for a client that has left; nobody reads the reply.
LEFT = 499


class EventStream(StreamingResponse):
    """Server-sent events. A client that leaves, or does not read, holds up nobody else."""

    media_type = "text/event-stream"

    def __init__(self, answering: Answering, shape: Shape):
        super().__init__(_events(answering, shape), headers={"Cache-Control": "no-cache"})
        self._answering = answering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # Whether or not the stream was begun.
            await self._answering.close()

    async def stream_response(self, send: Send) -> None:
        # Whoever leaves while nothing can be sent leaves the iterator where it is.
        async with aclosing(self.body_iterator):  # type: ignore[type-var]
            await super().stream_response(send)


async def _events(answering: Answering, shape: Shape) -> AsyncIterator[bytes]:
    try:
        for chunk in shape.opening():
            yield _event(chunk.model_dump_json())
        async for piece in answering.pieces(KEEPALIVE_S):
            if piece is None:
                yield KEEPALIVE
                continue
            for event in shape.events(piece):
                yield _event(event)
        for chunk in shape.closing():
            yield _event(chunk.model_dump_json())
    except PipespecError as error:
        # The status was sent long ago.
        yield _event(json.dumps(of(error).reply))
    yield DONE


def _event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()


async def whole(answering: Answering, shape: Shape, request: Request) -> Response:
    """The answers in one reply, unless the client leaves before. Raises ApiError."""
    try:
        collecting = asyncio.ensure_future(_collected(answering, shape))
        leaving = asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                return Response(status_code=LEFT)
            return Response(collecting.result(), media_type="application/json")
        except PipespecError as error:
            raise of(error) from error
        finally:
            for task in (collecting, leaving):
                task.cancel()
            await asyncio.wait({collecting, leaving})
    finally:
        await answering.close()


async def _collected(answering: Answering, shape: Shape) -> str:
    async for piece in answering.pieces(KEEPALIVE_S):
        if piece is not None:
            shape.take(piece)
    return shape.reply().model_dump_json()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
