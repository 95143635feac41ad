"""Reads the steps that the head publishes for dashboards, from an event loop. A reader sets a key
that expires. The head looks for such keys once a second, and publishes its steps while there is one
(`lua/publish_step.lua`)."""

from __future__ import annotations

import time

from pipespec.controller.async_request_log import AsyncRedisConnection, block_ms
from pipespec.controller.log_records import entries_of
from pipespec.controller.redis_keys import RedisKeys

# How long such a key exists, and how often it is renewed.
WATCH_S = 3
RENEW_S = 1.0
# Steps that are read at once.
MOST_STEPS = 64


class TelemetryReader:
    """The steps of a cluster as they are published, and the tree of one request, for one task."""

    def __init__(self, url: str, *, namespace: str, request: int | None):
        keys = RedisKeys(namespace)
        self._pipe = AsyncRedisConnection(url)
        self._stream = keys.published_steps
        self._watch_keys = [keys.watched]
        if request is not None:
            self._watch_keys.append(keys.watched_request(request))
        self._renewed: float | None = None
        self._position: str | None = None  # in the stream; None: not known yet

    async def close(self) -> None:
        await self._pipe.close()

    async def next(self, timeout: float) -> list[dict[bytes, bytes]]:
        """The next steps, each as the head published it (`pipespec.head.tree_telemetry`) with its
        "epoch"; [] if none comes within `timeout` seconds. Raises Unreachable."""
        now = time.monotonic()
        if self._renewed is None or now - self._renewed >= RENEW_S:
            await self._pipe.batch([("SET", key, "", "EX", WATCH_S) for key in self._watch_keys])
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
