"""Asynchronous code for callers that block: an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")
R = TypeVar("R")


class LoopThread(Generic[T]):
    """Holds an asynchronous context manager open, and runs coroutines beside it. `resource` is what
    the manager yields. The caller may be in any thread and have an event loop of its own, as in a
    notebook. Ctrl-C interrupts only the caller's wait: it cancels the coroutine, and the next call
    works as before. The thread does not keep the interpreter alive."""

    def __init__(self, opening: Callable[[], AbstractAsyncContextManager[T]]):
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self._opened: Future[T] = Future()
        self._error: BaseException | None = None
        self._task: asyncio.Task[Any] | None = None
        # Calls that wait, and whether the thread has ended; both under the lock.
        self._calls: dict[Future[Any], Coroutine[Any, Any, Any]] = {}
        self._ended = False
        self._lock = threading.RLock()  # garbage that is collected under it may call
        self._closings: set[asyncio.Task[None]] = set()  # of generators, which nobody waits for
        self._thread = threading.Thread(
            target=self._main, args=(opening,), name="pipespec-client", daemon=True
        )
        self._thread.start()
        try:
            self.resource = self._opened.result()
        except BaseException:
            self.close()
            raise

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """What a coroutine returns or raises, or, once the thread has ended, why it has."""
        future: Future[R] | None = None
        try:
            with self._lock:
                if self._ended:
                    raise self._error or RuntimeError("The client was closed.")
                future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
                self._calls[future] = coroutine
            return future.result()
        except CancelledError:
            if self._error is not None:
                raise self._error from None
            raise
        except BaseException:  # also Ctrl-C
            if future is None:
                with suppress(ValueError):  # it runs already
                    coroutine.close()
            elif not future.done():
                with self._lock:
                    if not self._ended:
                        future.cancel()
            raise
        finally:
            with self._lock:
                self._calls.pop(future, None)  # type: ignore[arg-type]

    def iterate(self, items: AsyncGenerator[R, None]) -> Iterator[R]:
        """The items of an asynchronous generator, which is closed at the end of the iteration."""
        end = object()

        async def following() -> R | object:
            return await anext(items, end)

        try:
            while (item := self.run(following())) is not end:
                yield cast(R, item)
        finally:
            if not self._loop.is_closed():
                self._close(items)

    def _close(self, items: AsyncGenerator[Any, None]) -> None:
        if threading.current_thread() is not self._thread:
            self.run(items.aclose())
            return
        # Collected as garbage there, where nothing may wait for the loop.
        closing = self._loop.create_task(items.aclose())
        self._closings.add(closing)
        closing.add_done_callback(self._closings.discard)

    def close(self) -> None:
        """Leave the context manager and end the thread; harmless when called again."""
        with suppress(RuntimeError):  # the loop is closed: the thread has ended by itself
            self._loop.call_soon_threadsafe(self._end)
        if threading.current_thread() is not self._thread:  # where garbage may be collected
            self._thread.join()

    def _end(self) -> None:
        if self._opened.done():
            self._ending.set()
        elif self._task is not None:
            self._task.cancel()

    def _main(self, opening: Callable[[], AbstractAsyncContextManager[T]]) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._hold(opening))
            except BaseException as error:  # noqa: BLE001 - raised where the caller waits
                self._error = error
                if not self._opened.done():
                    self._opened.set_exception(error)
            with self._lock:
                self._ended = True  # before the loop closes, as it takes no more calls then
        with self._lock:
            for future, coroutine in self._calls.items():
                if not future.done():  # the loop did not come to it
                    coroutine.close()
                    future.cancel()

    async def _hold(self, opening: Callable[[], AbstractAsyncContextManager[T]]) -> None:
        self._task = asyncio.current_task()
        async with opening() as resource:
            self._opened.set_result(resource)
            await self._ending.wait()
