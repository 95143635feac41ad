"""Watching the head's steps, and who is not answered yet, through a real Redis."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import pytest

from pipespec.controller.async_request_log import WATCH_S, AsyncRequestLog, TelemetryReader
from pipespec.controller.cluster_status import Unfinished
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.controller.rank_controller import KEEP_PUBLISHED_S, MAX_PUBLISHED_STEPS
from pipespec.controller.redis_connection import RedisConnection
from pipespec.controller.redis_keys import RedisKeys
from pipespec.errors import StaleEpoch
from tests.helpers.log import accept, head_of, take

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def watching(
    server: EmbeddedRedis, namespace: str, request: int | None
) -> AsyncIterator[TelemetryReader]:
    watch = TelemetryReader(server.url, namespace=namespace, request=request)
    try:
        yield watch
    finally:
        await watch.close()


async def test_head_publishes_steps_once_a_watcher_is_known(server, head, namespace):
    async with watching(server, namespace, 7) as watch:
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


async def test_published_steps_and_watchers_expire(server, head, namespace):
    async with watching(server, namespace, None) as watch:
        await watch.next(0.0)
        for _ in range(MAX_PUBLISHED_STEPS + 9):
            head.publish_step({"step": b""})
        assert head.watched_requests([]) == set()
        keys = RedisKeys(namespace)
        with closing(RedisConnection(server.url)) as pipe:
            assert pipe.call("XLEN", keys.published_steps) == MAX_PUBLISHED_STEPS
            assert 0 < pipe.call("TTL", keys.published_steps) <= KEEP_PUBLISHED_S
            assert 0 < pipe.call("TTL", keys.watched) <= WATCH_S


def test_a_head_of_an_old_epoch_shows_nothing(server, head, namespace):
    def show() -> None:
        head.publish_step({"step": b""})
        head.watched_requests([])  # errors come with a later reply, unless Redis was quick

    with head_of(server, namespace), closing(RedisConnection(server.url)) as pipe:
        with pytest.raises(StaleEpoch):
            show()
        assert not pipe.call("EXISTS", RedisKeys(namespace).published_steps)


async def test_unfinished_requests_are_listed_by_how_far_they_are(server, head, namespace):
    first, second = (
        head.enqueue(prompt=prompt, max_new_tokens=9) for prompt in ((1, 2, 3), (4, 5))
    )
    urgent = head.enqueue(prompt=(6,), priority=-1, max_new_tokens=9)
    log = AsyncRequestLog(server.url, namespace=namespace, patience=0.0)
    waiting = [Unfinished(urgent, False, 1, 1), Unfinished(first, False, 3, 3)]
    assert await log.unfinished(2) == waiting
    assert take(head) is not None
    accept(head, urgent, 1, (7, 8))
    head.tokens(urgent)
    assert await log.unfinished(10) == [
        Unfinished(urgent, True, 3, 1),
        Unfinished(first, False, 3, 3),
        Unfinished(second, False, 2, 2),
    ]
    await log.close()
