"""What threads of a cluster do that its end must stop, as the process waits for their threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from pipespec.errors import RankFailed


class Stoppable(Protocol):
    """Work that another thread may stop; who waits for it gets an error."""

    def stop(self) -> None:
        """Stop it; harmless when called again."""


class RunningWork:
    """That of one cluster."""

    def __init__(self) -> None:
        self._running: list[Stoppable] = []
        self._changing = threading.Lock()
        self._over = False

    def end(self) -> None:
        """Stop what runs, and let nothing more begin."""
        with self._changing:
            self._over = True
            running = [*self._running]
        for work in running:
            work.stop()

    @contextmanager
    def holding(self, work: Stoppable) -> Iterator[None]:
        """Let work be stopped within the block. Raises RankFailed once the cluster has ended."""
        with self._changing:
            if self._over:
                raise RankFailed("The cluster has ended.")
            self._running.append(work)
        try:
            yield
        finally:
            with self._changing:
                self._running.remove(work)
