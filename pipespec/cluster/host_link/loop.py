"""The event loop of this process's connections to hosts, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class _Loop:
    """Begins with its first use, and does not keep the interpreter alive."""

    def __init__(self) -> None:
        self._beginning = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def get(self) -> asyncio.AbstractEventLoop:
        with self._beginning:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                run = self._loop.run_forever
                threading.Thread(target=run, name="host links", daemon=True).start()
            return self._loop


_THE_LOOP = _Loop()


def start(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Run a coroutine beside the caller, which may cancel it."""
    return asyncio.run_coroutine_threadsafe(work, _THE_LOOP.get())


def call(work: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns or raises. A signal that ends the caller's wait ends it too."""
    future = start(work)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def soon(function: Callable[..., object], *args: Any) -> None:
    """Call a function in the loop, without waiting for it."""
    _THE_LOOP.get().call_soon_threadsafe(function, *args)
