"""Asking a cluster from an event loop: who is slow, and a cluster that goes and comes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from pipespec.client import registry
from pipespec.client.aio import MOST_EVENTS, AsyncFollowed, attach
from pipespec.client.registry import Owner, RunningCluster
from pipespec.client.served import ServedModel
from pipespec.cluster.deployment import decide
from pipespec.config.compose import compose
from pipespec.controller.client import Controller
from pipespec.controller.connection import ANSWER_TIMEOUT_S
from pipespec.controller.following import MOST_ENTRIES, Event
from pipespec.controller.records import Accepted, Finished
from pipespec.controller.server import EmbeddedRedis
from pipespec.core import Sampling
from pipespec.errors import RankFailed
from tests.helpers.log import accept, head_of
from tests.helpers.waiting import soon

NAME, NAMESPACE = "lab", "async-client"
PROMPT = (5, 6, 7)
LONG_S = 60.0


@pytest.fixture(scope="module")
def served() -> ServedModel:
    return ServedModel.of(decide(compose([])))


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def head(server: EmbeddedRedis) -> Iterator[Controller]:
    with head_of(server, NAMESPACE) as controller:
        yield controller


@pytest.fixture
def running(
    server: EmbeddedRedis, served: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> RunningCluster:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return RunningCluster(
        NAME, server.url, NAMESPACE, 1, Owner.this(), "here", (), served, num_ranks=3, started=1.0
    )


def ended() -> Owner:
    """A process that is no more."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = replace(
        Owner.this(), pid=process.pid, created=psutil.Process(process.pid).create_time()
    )
    process.communicate()
    return owner


async def all_of(followed: AsyncFollowed) -> list[tuple[int, Event]]:
    """What is heard until all have finished."""
    heard: list[tuple[int, Event]] = []
    while len(followed):
        heard += await followed.next(LONG_S)
    return heard


async def ask(followed: AsyncFollowed) -> int:
    return await followed.submit(PROMPT, Sampling(), max_new_tokens=2000)


def test_the_log_keeps_what_a_slow_reader_does_not_take(
    head: Controller, running: RunningCluster
) -> None:
    async def story() -> None:
        async with attach(running, LONG_S) as client, client.follow() as followed:
            slow, quick = await ask(followed), None
            for i in range(1500):
                accept(head, slow, 3 + i, [i])
            head.finish(slow, "stop")
            head.tokens(slow)
            async with client.follow() as other:
                # Whoever asks after him is answered before he has taken anything.
                quick = await ask(other)
                head.finish(quick, "stop")
                head.tokens(quick)
                assert await other.next(LONG_S) == [(quick, Finished("stop"))]
            assert followed.waiting(slow) <= MOST_EVENTS + MOST_ENTRIES
            heard = [event for _, event in await all_of(followed)]
            assert heard == [*(Accepted(3 + i, (i,)) for i in range(1500)), Finished("stop")]

    asyncio.run(story())


def test_who_leaves_cancels_and_who_finished_does_not(
    head: Controller, running: RunningCluster
) -> None:
    async def story() -> tuple[int, int]:
        async with attach(running, LONG_S) as client:
            async with client.follow() as followed:
                first, second = await ask(followed), await ask(followed)
                head.finish(first, "stop")
                head.tokens(first)
                await followed.next(LONG_S)
            # And who leaves while the request is on its way.
            async with client.follow() as followed:
                begun = asyncio.Event()

                async def ask_too() -> None:
                    begun.set()
                    await ask(followed)

                asking = asyncio.ensure_future(ask_too())
                await begun.wait()
                asking.cancel()
                await asyncio.wait([asking])
            return first, second

    first, second = asyncio.run(story())
    with head.streams() as streams:
        for request in (first, second, second + 1):
            streams.add(request)
        told = dict(event for event in [*streams.next(), *streams.next(1)])
    assert told == {
        first: Finished("stop"),
        second: Finished("cancelled"),
        second + 1: Finished("cancelled"),
    }


def test_who_leaves_while_the_cluster_is_away_does_not_wait_for_it(
    running: RunningCluster,
) -> None:
    async def story() -> float:
        with ExitStack() as ending:
            redis = ending.enter_context(EmbeddedRedis())
            here = replace(running, url=redis.url)
            async with attach(here, 10 * LONG_S) as client:
                async with client.follow() as followed:
                    await ask(followed)
                    ending.close()
                # Its cancellation finds nobody, and tries again.
                await soon(lambda: not client._log._pipe.connected)
                began = time.monotonic()
        return time.monotonic() - began

    assert asyncio.run(story()) < 2 * ANSWER_TIMEOUT_S


def test_a_cluster_that_has_ended_is_waited_for_so_long(
    head: Controller, running: RunningCluster
) -> None:
    gone = replace(running, owner=ended())

    async def story() -> None:
        async with attach(gone, patience=0.2) as client, client.follow() as followed:
            await ask(followed)
            with pytest.raises(RankFailed, match="'lab' ended before the request was finished"):
                await all_of(followed)
            assert client.away

    asyncio.run(story())
    assert head.tokens(1) == ()


def test_one_that_is_started_again_with_its_data_goes_on(
    running: RunningCluster, tmp_path: Path
) -> None:
    data = tmp_path / "data"

    async def story() -> None:
        with EmbeddedRedis(data=data) as first, head_of(first, NAMESPACE) as head:
            gone = replace(running, url=first.url, owner=ended())
            stack = attach(gone, LONG_S)
            client = await stack.__aenter__()
            followed = AsyncFollowed(client)
            request = await ask(followed)
            accept(head, request, 3, [8])
            head.tokens(request)
            assert await followed.next(LONG_S) == [(request, Accepted(3, (8,)))]
        with (
            EmbeddedRedis(data=data) as second,
            registry.claim(NAME),
            head_of(second, NAMESPACE) as head,
        ):
            again = replace(running, url=second.url)
            registry.publish(again)
            accept(head, request, 3, [8, 9])  # decoded again
            head.finish(request, "stop")
            head.tokens(request)
            heard = await all_of(followed)
            assert heard == [(request, Accepted(4, (9,))), (request, Finished("stop"))]
            assert client.running == again
            await stack.__aexit__(None, None, None)

    asyncio.run(story())


def test_another_one_of_its_name_does_not_answer_for_it(
    head: Controller, running: RunningCluster
) -> None:
    async def story() -> None:
        gone = replace(running, owner=ended())
        with EmbeddedRedis() as other, head_of(other, NAMESPACE) as new, registry.claim(NAME):
            registry.publish(replace(running, url=other.url))
            async with attach(gone, LONG_S) as client:
                async with client.follow() as followed:
                    await ask(followed)
                    with pytest.raises(RankFailed, match="ended before"):
                        await all_of(followed)
                async with client.follow() as followed:
                    request = await ask(followed)
                    new.finish(request, "stop")
                    new.tokens(request)
                    assert await followed.next(LONG_S) == [(request, Finished("stop"))]

    asyncio.run(story())
    assert head.tokens(1) == ()
