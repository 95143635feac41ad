"""Asynchronous code that blocking callers run in another thread's event loop."""

import asyncio
import signal
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from concurrent.futures import CancelledError
from contextlib import asynccontextmanager, closing, suppress

import pytest

from pipespec.client.sync_client import LoopThread


class Resource:
    """What is open in the thread, and what happened to it."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.thread = threading.get_ident()
        self.left = asyncio.Event()

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
            self.left.set()


@asynccontextmanager
async def opened() -> AsyncIterator[Resource]:
    resource = Resource()
    try:
        yield resource
    finally:
        resource.events.append("closed")


@pytest.fixture
def thread() -> Iterator[LoopThread[Resource]]:
    thread = LoopThread(opened())
    yield thread
    thread.close()


def test_a_coroutine_runs_in_the_other_thread_and_returns_or_raises_here(thread):
    resource = thread.resource
    assert resource.thread != threading.get_ident()
    assert thread.run(resource.double(4)) == 8
    with pytest.raises(ValueError, match="no"):
        thread.run(resource.fail())

    async def cell() -> int:
        return thread.run(resource.double(6))

    assert asyncio.run(cell()) == 12, "the caller may have a running event loop"


@pytest.mark.parametrize("collected_there", [False, True])
def test_an_iteration_that_is_left_closes_its_generator(thread, collected_there):
    resource = thread.resource
    assert list(thread.iterate(resource.numbers())) == list(range(10))
    resource.left.clear()
    kept = [thread.iterate(resource.numbers())]
    assert next(kept[0]) == 0

    async def collect() -> None:
        kept.clear()

    thread.run(collect()) if collected_there else kept.clear()
    thread.run(asyncio.wait_for(resource.left.wait(), 30))


@pytest.mark.parametrize("collected_there", [False, True])
def test_closing_leaves_the_resource_once_and_ends_the_thread(collected_there):
    before = set(threading.enumerate())
    thread = LoopThread(opened())
    running = threading.Event()

    async def forever() -> None:
        running.set()
        await asyncio.Event().wait()

    def wait() -> None:
        with suppress(CancelledError):
            thread.run(forever())

    async def close() -> None:
        thread.close()

    threading.Thread(target=wait).start()
    assert running.wait(30)
    if collected_there:
        thread.run(close())
    else:
        for _ in range(2):
            thread.close()
    for each in set(threading.enumerate()) - before:
        each.join(30)
    assert thread.resource.events == ["closed"]
    assert set(threading.enumerate()) == before
    with pytest.raises(RuntimeError, match="The client was closed"):
        thread.run(thread.resource.double(4))


def test_what_opening_raises_is_raised_here_and_leaves_no_thread():
    @asynccontextmanager
    async def broken() -> AsyncIterator[None]:
        raise ValueError("closed today")
        yield

    before = threading.active_count()
    with pytest.raises(ValueError, match="closed today"):
        LoopThread(broken())
    assert threading.active_count() == before


def test_what_ends_the_resource_early_does_not_replace_the_callers_own_exception():
    @asynccontextmanager
    async def ending() -> AsyncIterator[None]:
        yield
        raise ValueError("the reader's")

    before = threading.active_count()
    with pytest.raises(LookupError, match="the caller's"), closing(LoopThread(ending())):
        raise LookupError("the caller's")
    assert threading.active_count() == before


def interrupt() -> None:
    """As Ctrl-C does it, which raises where the caller waits."""
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def test_an_interrupted_wait_cancels_its_coroutine_and_the_next_works(thread):
    ended = threading.Event()

    async def forever() -> None:
        interrupt()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        thread.run(forever())
    assert ended.wait(30)
    assert thread.run(thread.resource.double(4)) == 8


def test_an_interrupted_opening_is_undone():
    ended: list[str] = []

    @asynccontextmanager
    async def slow() -> AsyncIterator[None]:
        interrupt()
        try:
            await asyncio.Event().wait()
            yield
        finally:
            ended.append("undone")

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        LoopThread(slow())
    assert ended == ["undone"]
    assert threading.active_count() == before
