"""Watching the head's steps, and who is not answered yet, through a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from pipespec.controller.async_request_log import AsyncRequestLog
from pipespec.controller.cluster_status import Unfinished
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.controller.rank_controller import (
    KEEP_PUBLISHED_S,
    MAX_PUBLISHED_STEPS,
    Controller,
)
from pipespec.controller.redis_connection import RedisConnection
from pipespec.controller.redis_keys import RedisKeys
from pipespec.controller.telemetry_store import WATCH_S, TelemetryReader
from pipespec.core import SamplingParams
from pipespec.errors import StaleEpoch
from tests.helpers.log import accept, head_of, take


def watching(
    server: EmbeddedRedis,
    namespace: str,
    request: int | None,
    story: Callable[[TelemetryReader], Awaitable[None]],
) -> None:
    async def run() -> None:
        watch = TelemetryReader(server.url, namespace=namespace, request=request)
        try:
            await story(watch)
        finally:
            await watch.close()

    asyncio.run(run())


def test_head_publishes_steps_once_a_watcher_is_known(
    server: EmbeddedRedis, head: Controller, namespace: str
) -> None:
    async def story(watch: TelemetryReader) -> None:
        head.publish_step({"step": b"before"})
        head.watched_requests([])  # a reply, so that it was done
        assert head.watched_requests([6, 7]) is None
        assert await watch.next(0.0) == []
        assert head.watched_requests([6, 7]) == {7}
        assert head.watched_requests([]) == set()
        for step in (b"\x00one", b"two"):
            head.publish_step({"step": step, "7": b"tree\xff"})
        head.watched_requests([])
        came = await watch.next(1.0)
        assert [fields[b"step"] for fields in came] == [b"\x00one", b"two"]
        assert all(fields[b"7"] == b"tree\xff" and int(fields[b"epoch"]) > 0 for fields in came)
        assert await watch.next(0.0) == []

    watching(server, namespace, 7, story)


def test_published_steps_and_watchers_expire(
    server: EmbeddedRedis, head: Controller, namespace: str
) -> None:
    async def story(watch: TelemetryReader) -> None:
        await watch.next(0.0)
        for _ in range(MAX_PUBLISHED_STEPS + 9):
            head.publish_step({"step": b""})
        assert head.watched_requests([]) == set()
        keys, pipe = RedisKeys(namespace), RedisConnection(server.url)
        try:
            assert pipe.call("XLEN", keys.published_steps) == MAX_PUBLISHED_STEPS
            assert 0 < pipe.call("TTL", keys.published_steps) <= KEEP_PUBLISHED_S
            assert 0 < pipe.call("TTL", keys.watched) <= WATCH_S
        finally:
            pipe.close()

    watching(server, namespace, None, story)


def test_a_head_of_an_old_epoch_shows_nothing(
    server: EmbeddedRedis, head: Controller, namespace: str
) -> None:
    def show() -> None:
        head.publish_step({"step": b""})
        head.watched_requests([])  # errors come with a later reply, unless Redis was quick

    with head_of(server, namespace):
        with pytest.raises(StaleEpoch):
            show()
        pipe = RedisConnection(server.url)
        try:
            assert not pipe.call("EXISTS", RedisKeys(namespace).published_steps)
        finally:
            pipe.close()


def test_unfinished_requests_are_listed_by_how_far_they_are(
    server: EmbeddedRedis, head: Controller, namespace: str
) -> None:
    async def look(most: int) -> list[Unfinished]:
        log = AsyncRequestLog(server.url, namespace=namespace, patience=0.0)
        try:
            return await log.unfinished(most)
        finally:
            await log.close()

    asked = {"max_new_tokens": 9, "sampling": SamplingParams(), "stop": (), "eos": ()}
    first, second = (head.enqueue(prompt=prompt, **asked) for prompt in ((1, 2, 3), (4, 5)))
    urgent = head.enqueue(prompt=(6,), priority=-1, **asked)
    waiting = [Unfinished(urgent, False, 1, 1), Unfinished(first, False, 3, 3)]
    assert asyncio.run(look(2)) == waiting
    assert take(head) is not None
    accept(head, urgent, 1, (7, 8))
    head.tokens(urgent)
    assert asyncio.run(look(10)) == [
        Unfinished(urgent, True, 3, 1),
        Unfinished(first, False, 3, 3),
        Unfinished(second, False, 2, 2),
    ]
