"""Asynchronous code for callers that block: an event loop in a thread of its own (`LoopThread`),
and `AsyncClient` in one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, closing, contextmanager, suppress
from typing import Any, Generic, TypeVar, cast

from anyio.from_thread import start_blocking_portal

from pipespec.client import async_client
from pipespec.client.async_client import AsyncAnswer, AsyncClient, OwnCluster
from pipespec.client.model_info import ModelInfo
from pipespec.client.registry import RunningCluster
from pipespec.errors import Unreachable
from pipespec.timing.stats import Report

T = TypeVar("T")
R = TypeVar("R")
# How long a user waits for a Redis that is away.
PATIENCE_S = 30.0


class LoopThread(Generic[T]):
    """Holds an asynchronous context manager open, and runs coroutines beside it. `resource` is what
    the manager yields. The caller may be in any thread and have an event loop of its own, as in a
    notebook. Ctrl-C interrupts only the caller's wait: it cancels the coroutine, and the next call
    works as before. The thread does not keep the interpreter alive."""

    def __init__(self, manager: AbstractAsyncContextManager[T]):
        self._lock = threading.RLock()  # garbage that is collected under it may call
        self._closed = False
        self._ident: int | None = None  # of the thread
        self._held = ExitStack()
        try:
            portal = self._held.enter_context(start_blocking_portal())
            # Whatever still waits at the end is cancelled.
            self._held.callback(portal.call, portal.stop, True)
            self._ident = portal.call(threading.get_ident)
            self._loop = portal.call(asyncio.get_running_loop)
            # Its users have the error that ends it early; closing must not replace theirs.
            self._held.enter_context(suppress(Exception))
            self.resource = self._held.enter_context(portal.wrap_async_context_manager(manager))
        except BaseException:
            self.close()
            raise

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """What a coroutine returns or raises."""
        try:
            with self._lock:
                if self._closed:
                    coroutine.close()
                    raise RuntimeError("The client was closed.")
                future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            return future.result()
        except BaseException:  # also Ctrl-C, which may come before there is a future
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(_cancel, coroutine)
            raise

    def iterate(self, items: AsyncGenerator[R, None]) -> Iterator[R]:
        """The items of an asynchronous generator. If the iteration is left, the loop closes it."""
        end = object()

        async def following() -> R | object:
            return await anext(items, end)

        while (item := self.run(following())) is not end:
            yield cast(R, item)

    def close(self) -> None:
        """Leave the context manager and end the thread; harmless when called again."""
        if threading.get_ident() == self._ident:
            # Garbage that was collected there, where nothing may wait for the loop.
            threading.Thread(target=self.close).start()
            return
        with self._lock:
            self._closed = True
        self._held.close()


def _cancel(coroutine: Coroutine[Any, Any, Any]) -> None:
    for task in asyncio.all_tasks():
        if task.get_coro() is coroutine:
            task.cancel()


class Client:
    """`run` has a coroutine of what `follow` yields done; it returns or raises what that does."""

    def __init__(self, thread: LoopThread[AsyncClient]):
        self.thread = thread
        self.run = thread.run
        self.served: ModelInfo = thread.resource.served

    @contextmanager
    def follow(self) -> Iterator[AsyncAnswer]:
        """Requests that are followed together; what has not finished at the end is cancelled."""
        answer = AsyncAnswer(self.thread.resource)

        async def leave() -> None:
            answer.leave()

        try:
            yield answer
        finally:
            self.run(leave())

    def reports(self, request: int) -> list[Report]:
        return self.run(self.thread.resource.reports(request))


@contextmanager
def attach(
    running: RunningCluster, patience: float = PATIENCE_S, own: OwnCluster | None = None
) -> Iterator[Client]:
    """Connect to a running cluster, whose ranks are loaded; `patience` and `own` are as for
    `AsyncClient`. Raises Unreachable without answer."""
    manager = async_client.attach(running, patience, follows_restarts=False, own=own)
    with closing(LoopThread(manager)) as thread:
        try:
            thread.run(thread.resource.log.look())
        except Unreachable as error:
            raise Unreachable(
                f"The cluster {running.name!r} on {running.host} does not answer: {error}"
            ) from error
        yield Client(thread)
