"""Asynchronous code that blocking callers run in another thread's event loop."""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing

import pytest

from pipespec.client.loop_thread import LoopThread


class Resource:
    """What is open in the thread, and what happened to it."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.thread = threading.get_ident()

    async def double(self, number: int) -> int:
        await asyncio.sleep(0)
        return 2 * number

    async def fail(self) -> None:
        raise ValueError("no")

    async def numbers(self) -> AsyncGenerator[int]:
        try:
            for number in range(10):
                yield number
        finally:
            self.events.append("left")


@asynccontextmanager
async def opened() -> AsyncIterator[Resource]:
    resource = Resource()
    try:
        yield resource
    finally:
        resource.events.append("closed")


@pytest.fixture
def thread() -> Iterator[LoopThread[Resource]]:
    thread = LoopThread(opened)
    yield thread
    thread.close()


def test_a_coroutine_runs_in_the_other_thread_and_returns_or_raises_here(
    thread: LoopThread[Resource],
) -> None:
    resource = thread.resource
    assert resource.thread != threading.get_ident()
    assert thread.run(resource.double(4)) == 8
    with pytest.raises(ValueError, match="no"):
        thread.run(resource.fail())
    assert thread.run(resource.double(5)) == 10

    async def cell() -> int:
        return thread.run(resource.double(6))

    assert asyncio.run(cell()) == 12, "the caller may have a running event loop"


def test_an_iteration_that_is_left_closes_its_generator(thread: LoopThread[Resource]) -> None:
    assert list(thread.iterate(thread.resource.numbers())) == list(range(10))
    pieces = thread.iterate(thread.resource.numbers())
    assert next(pieces) == 0
    assert thread.resource.events == ["left"]
    pieces.close()
    assert thread.resource.events == ["left", "left"]


def test_an_iteration_that_is_collected_in_the_other_thread_closes_its_generator(
    thread: LoopThread[Resource],
) -> None:
    pieces = thread.iterate(thread.resource.numbers())
    assert next(pieces) == 0
    kept = [pieces]
    del pieces

    async def collect() -> None:
        kept.clear()

    thread.run(collect())
    assert thread.run(thread.resource.double(4)) == 8
    thread.close()
    assert thread.resource.events == ["left", "closed"]


def test_closing_leaves_the_resource_once_and_ends_the_thread() -> None:
    before = threading.active_count()
    thread = LoopThread(opened)
    assert threading.active_count() == before + 1
    for _ in range(2):
        thread.close()
        assert thread.resource.events == ["closed"]
    assert threading.active_count() == before


def test_what_opening_raises_is_raised_here_and_leaves_no_thread() -> None:
    @asynccontextmanager
    async def broken() -> AsyncIterator[None]:
        raise ValueError("closed today")
        yield

    before = threading.active_count()
    with pytest.raises(ValueError, match="closed today"):
        LoopThread(broken)
    assert threading.active_count() == before


def test_an_interrupted_wait_cancels_its_coroutine_and_the_next_works(
    thread: LoopThread[Resource],
) -> None:
    """As Ctrl-C does it, which raises where the caller waits."""
    ended = threading.Event()

    async def forever() -> None:
        # As a signal handler would, once the coroutine runs.
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        thread.run(forever())
    assert ended.wait(30)
    assert thread.run(thread.resource.double(4)) == 8


def test_calls_after_the_resource_has_failed_raise_why() -> None:
    @asynccontextmanager
    async def failing() -> AsyncIterator[Resource]:
        async with asyncio.TaskGroup() as tasks:
            resource = Resource()
            tasks.create_task(resource.fail())
            yield resource

    with closing(LoopThread(failing)) as ending:
        for _ in range(3):
            call = asyncio.sleep(60)
            with pytest.raises(ExceptionGroup, match="unhandled errors"):
                ending.run(call)
            assert inspect.getcoroutinestate(call) == inspect.CORO_CLOSED


def test_a_call_after_the_end_says_so(thread: LoopThread[Resource]) -> None:
    thread.close()
    with pytest.raises(RuntimeError, match="The client was closed"):
        thread.run(thread.resource.double(4))
