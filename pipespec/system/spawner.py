"""A thread that starts processes on behalf of others."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Made = TypeVar("Made")


class Spawner:
    """Linux ends a child that asks for it (`die_with_parent`) with the thread that made it. This
    one makes it for any other thread, and lives until `close` or the end of the process."""

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # An executor's thread would be joined before those that still use the child.
        self._thread = threading.Thread(target=self._run, name="spawner", daemon=True)

    def make(self, spawn: Callable[[], Made]) -> Made:
        """What `spawn` returns or raises in that thread."""
        made: Future[Made] = Future()

        def order() -> None:
            try:
                made.set_result(spawn())
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                made.set_exception(error)

        if not self._thread.is_alive():
            self._thread.start()
        self._orders.put(order)
        return made.result()

    def close(self) -> None:
        """End the thread, and with it what it has made; harmless when called again."""
        if self._thread.is_alive():
            self._orders.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            order()
