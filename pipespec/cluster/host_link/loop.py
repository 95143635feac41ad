"""The event loop of this process's connections to hosts, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
# The exit code, as ssh says it, of a program whose connection broke; others are the program's own.
NO_CONNECTION = 255

_beginning = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def _begun() -> asyncio.AbstractEventLoop:
    """It begins with its first use, and does not keep the interpreter alive."""
    global _loop
    with _beginning:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="host links", daemon=True).start()
        return _loop


def start(work: Coroutine[Any, Any, T]) -> Future[T]:
    return asyncio.run_coroutine_threadsafe(work, _begun())


def call(work: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns or raises. A signal that ends the caller's wait ends it too."""
    future = start(work)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def soon(function: Callable[..., object], *args: Any) -> None:
    _begun().call_soon_threadsafe(function, *args)
