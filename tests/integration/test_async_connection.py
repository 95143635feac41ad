"""The connection to Redis of users in an event loop: cancelled calls, and a server that hangs."""

from __future__ import annotations

import asyncio

import pytest

from pipespec.controller import async_request_log
from pipespec.controller.async_request_log import AsyncRedisConnection, AsyncRequestLog
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.controller.rank_controller import Controller
from pipespec.errors import Unreachable
from tests.helpers.log import take

ASKED = {"prompt": (5, 6, 7), "max_new_tokens": 9}
LONG_S = 30.0


def test_a_call_cancelled_halfway_does_not_disturb_the_next(
    server: EmbeddedRedis, head: Controller, namespace: str
) -> None:
    async def story() -> None:
        log = AsyncRequestLog(server.url, namespace=namespace, patience=LONG_S)
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
        await log.close()

    asyncio.run(story())


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
