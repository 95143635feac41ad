"""Following many requests from an event loop: also while a read waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from pipespec.controller import async_request_log
from pipespec.controller.async_request_log import (
    AsyncRedisConnection,
    AsyncRequestLog,
    AsyncStreams,
)
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.controller.log_records import Accepted, Finished
from pipespec.controller.rank_controller import Controller
from pipespec.controller.redis_connection import RedisConnection
from pipespec.controller.request_log import Forgotten
from pipespec.errors import ControllerError, Unreachable
from tests.helpers.log import accept, head_of, take
from tests.helpers.waiting import soon

ASKED = {"prompt": (5, 6, 7), "max_new_tokens": 9}
LONG_S = 30.0


@asynccontextmanager
async def listening(
    url: str, namespace: str, patience: float = LONG_S
) -> AsyncIterator[tuple[AsyncRequestLog, AsyncStreams]]:
    log = AsyncRequestLog(url, namespace=namespace, patience=patience)
    streams = AsyncStreams(url, log, namespace=namespace)
    try:
        yield log, streams
    finally:
        await streams.close()
        await log.close()


def run(
    url: str, namespace: str, story: Callable[[AsyncRequestLog, AsyncStreams], Awaitable[None]]
) -> None:
    async def tell() -> None:
        async with listening(url, namespace) as (log, streams):
            await story(log, streams)

    asyncio.run(tell())


def test_a_request_added_during_a_read_is_followed_at_once(
    server: EmbeddedRedis, head: Controller, namespace: str
) -> None:
    async def story(log: AsyncRequestLog, streams: AsyncStreams) -> None:
        first = await log.enqueue(**ASKED)
        await streams.add(first)
        for _ in range(3):  # each time the read that waits is another
            waiting = asyncio.ensure_future(streams.next(LONG_S))
            await soon(lambda: streams.reading)
            second = await log.enqueue(**ASKED)
            await streams.add(second)
            began = time.monotonic()
            accept(head, second, 3, [20])
            head.finish(second, "stop")
            head.tokens(second)
            assert (await waiting)[0] == (second, Accepted(3, (20,)))
            assert time.monotonic() - began < LONG_S / 2
            if len(streams) == 2:
                assert await streams.next(LONG_S) == [(second, Finished("stop"))]

    run(server.url, namespace, story)


def test_dropped_and_held_requests_are_not_read(
    server: EmbeddedRedis, head: Controller, namespace: str
) -> None:
    async def story(log: AsyncRequestLog, streams: AsyncStreams) -> None:
        ids = [await log.enqueue(**ASKED) for _ in range(2)]
        for request in ids:
            await streams.add(request)
            accept(head, request, 3, [10])
        head.tokens(ids[0])
        streams.hold(ids[0])
        streams.drop(ids[1])
        assert await streams.next(0.05) == []
        await streams.release(ids[0])
        assert await streams.next(LONG_S) == [(ids[0], Accepted(3, (10,)))]

    run(server.url, namespace, story)


def test_following_continues_after_a_restart_and_names_lost_requests(namespace: str) -> None:
    with EmbeddedRedis(port=0) as server:

        async def story(log: AsyncRequestLog, streams: AsyncStreams) -> None:
            with head_of(server, namespace) as head:
                ids = [await log.enqueue(**ASKED) for _ in range(2)]
                for request in ids:
                    await streams.add(request)
                    accept(head, request, 3, [request])
                head.tokens(ids[0])
                received = []
                while len(received) < 2:
                    received += await streams.next(LONG_S)
            server.restart()
            with pytest.raises(Unreachable):
                await streams.next(LONG_S)
            # An enqueue repeats itself, and is done once.
            third = await log.enqueue(**ASKED)
            assert third == ids[-1] + 1
            with head_of(server, namespace) as head:
                accept(head, ids[1], 3, [ids[1], 8])  # decoded again
                head.finish(ids[0], "length")
                head.tokens(ids[0])
            received = []
            while len(received) < 2:
                received += await streams.next(LONG_S)
            assert received == [(ids[0], Finished("length")), (ids[1], Accepted(4, (8,)))]
            RedisConnection(server.url).call("FLUSHALL")
            await streams.close()
            with pytest.raises(Forgotten, match=f"Request {ids[1]} is not in the log"):
                await streams.next(LONG_S)

        run(server.url, namespace, story)


@pytest.mark.usefixtures("head")
def test_a_cancelled_request_ends(server: EmbeddedRedis, namespace: str) -> None:
    async def story(log: AsyncRequestLog, streams: AsyncStreams) -> None:
        request = await log.enqueue(**ASKED)
        await streams.add(request)
        await log.cancel(request)
        assert await streams.next(LONG_S) == [(request, Finished("cancelled"))]
        with pytest.raises(ControllerError, match="request 99 is not in the log"):
            await log.cancel(99)

    run(server.url, namespace, story)


def test_a_call_cancelled_halfway_does_not_disturb_the_next(
    server: EmbeddedRedis, head: Controller, namespace: str
) -> None:
    async def story(log: AsyncRequestLog, _: AsyncStreams) -> None:
        first = await log.enqueue(**ASKED)
        for turns in range(1, 20):  # of the loop, before it is cancelled
            asking = asyncio.ensure_future(log.look())
            for _ in range(turns):
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait([asking])
        second = await log.enqueue(**ASKED)
        assert second == first + 1
        taken = take(head)
        assert taken is not None
        assert taken.id == first

    run(server.url, namespace, story)


def test_a_redis_that_accepts_a_connection_but_says_nothing_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that hangs does, or what stands before it: the greeting is not answered either."""
    monkeypatch.setattr(async_request_log, "ANSWER_TIMEOUT_S", 0.2)

    async def ask() -> None:
        silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1")
        port = silent.sockets[0].getsockname()[1]
        connection = AsyncRedisConnection(f"redis://:secret@127.0.0.1:{port}/0")
        with pytest.raises(Unreachable, match=r"did not answer within 0\.2 seconds"):
            await asyncio.wait_for(connection.call("PING"), LONG_S)
        assert not connection.connected
        silent.close()

    asyncio.run(ask())
