"""Watching what the head does in each step, from an event loop.

Whoever watches leaves a mark that runs out. The head looks for marks once a second, and shows its
steps as long as there is one (`lua/show.lua`); without any it shows nothing.
"""

from __future__ import annotations

import time

from pipespec.controller.aio import AsyncPipe
from pipespec.controller.following import block_ms
from pipespec.controller.keys import Keys
from pipespec.controller.records import entries_of

# How long a mark holds, and how often it is renewed.
WATCH_S = 3
RENEW_S = 1.0
# Steps that are read at once.
MOST_STEPS = 64


class AsyncWatch:
    """The steps of a cluster as they come, and the tree of one request if one is chosen. For one
    task."""

    def __init__(self, url: str, *, namespace: str, request: int | None):
        keys = Keys(namespace)
        self._pipe = AsyncPipe(url)
        self._stream = keys.shown
        self._marks = [keys.watched]
        if request is not None:
            self._marks.append(keys.watched_request(request))
        self._renewed: float | None = None
        self._position: str | None = None  # in the stream; None: not known yet

    async def close(self) -> None:
        await self._pipe.close()

    async def next(self, timeout: float) -> list[dict[bytes, bytes]]:
        """The next steps, each as the head showed it (`pipespec.head.watching`) with its "epoch";
        [] if none comes within `timeout` seconds. Raises Unreachable."""
        now = time.monotonic()
        if self._renewed is None or now - self._renewed >= RENEW_S:
            await self._pipe.batch([("SET", mark, "", "EX", WATCH_S) for mark in self._marks])
            self._renewed = now
        if self._position is None:
            last = await self._pipe.call("XREVRANGE", self._stream, "+", "-", "COUNT", 1)
            self._position = last[0][0].decode() if last else "0"
        block = block_ms(timeout)
        options = ("COUNT", MOST_STEPS, "BLOCK", block)
        command = ("XREAD", *options, "STREAMS", self._stream, self._position)
        found = await self._pipe.call(*command, timeout=block / 1000)
        if not found:
            return []
        entries = entries_of(found[0][1])
        self._position = entries[-1][0]
        return [fields for _, fields in entries]
