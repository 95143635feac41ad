"""Watching the head's steps, and who is not answered yet, through a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from pipespec.controller.aio import AsyncLog
from pipespec.controller.client import KEEP_SHOWN_S, SHOWN_STEPS, Controller
from pipespec.controller.connection import Pipe
from pipespec.controller.keys import Keys
from pipespec.controller.overview import Unfinished
from pipespec.controller.server import EmbeddedRedis
from pipespec.controller.watching import WATCH_S, AsyncWatch
from pipespec.core import Sampling
from pipespec.errors import StaleEpoch
from tests.helpers.log import accept, head_of, take


def watching(
    server: EmbeddedRedis,
    namespace: str,
    request: int | None,
    story: Callable[[AsyncWatch], Awaitable[None]],
) -> None:
    async def run() -> None:
        watch = AsyncWatch(server.url, namespace=namespace, request=request)
        try:
            await story(watch)
        finally:
            await watch.close()

    asyncio.run(run())


def test_the_head_knows_who_watches_and_is_heard_from_then_on(
    server: EmbeddedRedis, head: Controller, namespace: str
) -> None:
    async def story(watch: AsyncWatch) -> None:
        head.show({"step": b"before"})
        head.watched([])  # a reply, so that it was done
        assert head.watched([6, 7]) is None
        assert await watch.next(0.0) == []
        assert head.watched([6, 7]) == {7}
        assert head.watched([]) == set()
        for step in (b"\x00one", b"two"):
            head.show({"step": step, "7": b"tree\xff"})
        head.watched([])
        came = await watch.next(1.0)
        assert [fields[b"step"] for fields in came] == [b"\x00one", b"two"]
        assert all(fields[b"7"] == b"tree\xff" and int(fields[b"epoch"]) > 0 for fields in came)
        assert await watch.next(0.0) == []

    watching(server, namespace, 7, story)


def test_what_is_shown_and_who_watches_is_soon_forgotten(
    server: EmbeddedRedis, head: Controller, namespace: str
) -> None:
    async def story(watch: AsyncWatch) -> None:
        await watch.next(0.0)
        for _ in range(SHOWN_STEPS + 9):
            head.show({"step": b""})
        assert head.watched([]) == set()
        keys, pipe = Keys(namespace), Pipe(server.url)
        try:
            assert pipe.call("XLEN", keys.shown) == SHOWN_STEPS
            assert 0 < pipe.call("TTL", keys.shown) <= KEEP_SHOWN_S
            assert 0 < pipe.call("TTL", keys.watched) <= WATCH_S
        finally:
            pipe.close()

    watching(server, namespace, None, story)


def test_a_head_of_an_old_epoch_shows_nothing(
    server: EmbeddedRedis, head: Controller, namespace: str
) -> None:
    def show() -> None:
        head.show({"step": b""})
        head.watched([])  # errors come with a later reply, unless Redis was quick

    with head_of(server, namespace):
        with pytest.raises(StaleEpoch):
            show()
        pipe = Pipe(server.url)
        try:
            assert not pipe.call("EXISTS", Keys(namespace).shown)
        finally:
            pipe.close()


def test_unfinished_requests_are_listed_by_how_far_they_are(
    server: EmbeddedRedis, head: Controller, namespace: str
) -> None:
    async def look(most: int) -> list[Unfinished]:
        log = AsyncLog(server.url, namespace=namespace, patience=0.0)
        try:
            return await log.unfinished(most)
        finally:
            await log.close()

    asked = {"max_new_tokens": 9, "sampling": Sampling(), "stop": (), "eos": ()}
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
