"""Following many requests from an event loop: as `test_streams.py`, and adding while it waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from pipespec.controller.aio import AsyncLog, AsyncStreams, Forgotten
from pipespec.controller.client import Controller
from pipespec.controller.connection import Pipe
from pipespec.controller.overview import look
from pipespec.controller.records import Accepted, Finished
from pipespec.controller.server import EmbeddedRedis
from pipespec.errors import ControllerError, Unreachable
from tests.helpers.log import accept, head_of, take
from tests.helpers.waiting import soon

ASKED = {"prompt": (5, 6, 7), "max_new_tokens": 9}
LONG_S = 30.0


@asynccontextmanager
async def listening(
    url: str, namespace: str, patience: float = LONG_S
) -> AsyncIterator[tuple[AsyncLog, AsyncStreams]]:
    log = AsyncLog(url, namespace=namespace, patience=patience)
    streams = AsyncStreams(url, log, namespace=namespace)
    try:
        yield log, streams
    finally:
        await streams.close()
        await log.close()


def run(
    url: str, namespace: str, story: Callable[[AsyncLog, AsyncStreams], Awaitable[None]]
) -> None:
    async def tell() -> None:
        async with listening(url, namespace) as (log, streams):
            await story(log, streams)

    asyncio.run(tell())


def test_what_is_added_while_a_read_waits_is_heard_at_once(
    server: EmbeddedRedis, head: Controller, namespace: str
) -> None:
    async def story(log: AsyncLog, streams: AsyncStreams) -> None:
        first = await log.enqueue(**ASKED)
        await streams.add(first)
        for _ in range(3):  # each time the read that waits is another
            waiting = asyncio.ensure_future(streams.next(LONG_S))
            await soon(lambda: streams._reading)
            second = await log.enqueue(**ASKED)
            await streams.add(second)
            began = time.monotonic()
            accept(head, second, 3, [20])
            head.finish(second, "stop")
            head.tokens(second)
            assert (await waiting)[0] == (second, Accepted(3, (20,)))
            assert time.monotonic() - began < LONG_S / 2
            if len(streams._following) == 2:
                assert await streams.next(LONG_S) == [(second, Finished("stop"))]

    run(server.url, namespace, story)


def test_it_hears_what_the_synchronous_one_hears(
    server: EmbeddedRedis, head: Controller, namespace: str
) -> None:
    ids = [head.enqueue(**ASKED) for _ in range(3)]
    for request in ids:
        accept(head, request, 3, [10, request])
        head.finish(request, "stop")
    head.tokens(ids[0])

    async def story(log: AsyncLog, streams: AsyncStreams) -> None:
        for request in ids:
            await streams.add(request)
        with head.streams() as others:
            for request in ids:
                others.add(request)
            assert await streams.next(LONG_S) == others.next(LONG_S)
        assert await log.look() == look(server.url, namespace)

    run(server.url, namespace, story)


def test_who_is_dropped_or_held_is_not_read(
    server: EmbeddedRedis, head: Controller, namespace: str
) -> None:
    async def story(log: AsyncLog, streams: AsyncStreams) -> None:
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


@pytest.mark.usefixtures("head")
def test_what_is_cancelled_ends(server: EmbeddedRedis, namespace: str) -> None:
    async def story(log: AsyncLog, streams: AsyncStreams) -> None:
        request = await log.enqueue(**ASKED)
        await streams.add(request)
        await log.cancel(request)
        assert await streams.next(LONG_S) == [(request, Finished("cancelled"))]
        with pytest.raises(ControllerError, match="request 99 is not in the log"):
            await log.cancel(99)

    run(server.url, namespace, story)


def test_all_go_on_after_a_restart_and_what_was_lost_is_told(namespace: str) -> None:
    with EmbeddedRedis(port=0) as server:

        async def story(log: AsyncLog, streams: AsyncStreams) -> None:
            with head_of(server, namespace) as head:
                ids = [await log.enqueue(**ASKED) for _ in range(2)]
                for request in ids:
                    await streams.add(request)
                    accept(head, request, 3, [request])
                head.tokens(ids[0])
                heard = []
                while len(heard) < 2:
                    heard += await streams.next(LONG_S)
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
            heard = []
            while len(heard) < 2:
                heard += await streams.next(LONG_S)
            assert heard == [(ids[0], Finished("length")), (ids[1], Accepted(4, (8,)))]
            Pipe(server.url).call("FLUSHALL")
            await streams.close()
            with pytest.raises(Forgotten, match=f"Request {ids[1]} is not in the log"):
                await streams.next(LONG_S)

        run(server.url, namespace, story)


def test_a_redis_that_stays_away_is_given_up(namespace: str) -> None:
    with EmbeddedRedis() as server:
        url = server.url

    async def story() -> None:
        async with listening(url, namespace, patience=0.2) as (log, _):
            began = time.monotonic()
            with pytest.raises(Unreachable):
                await log.enqueue(**ASKED)
            assert 0.2 <= time.monotonic() - began < LONG_S / 2

    asyncio.run(story())


def test_who_is_cancelled_in_the_middle_of_a_call_does_not_confuse_the_next(
    server: EmbeddedRedis, head: Controller, namespace: str
) -> None:
    async def story(log: AsyncLog, _: AsyncStreams) -> None:
        first = await log.enqueue(**ASKED)
        for _ in range(5):
            asking = asyncio.ensure_future(log.look())
            await soon(lambda: log._pipe._turn.locked())
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        second = await log.enqueue(**ASKED)
        assert second == first + 1
        taken = take(head)
        assert taken is not None
        assert taken.id == first

    run(server.url, namespace, story)
