"""What a recovery watches: the workers' processes, and a Redis of its own."""

from __future__ import annotations

import queue
from typing import Any, Protocol


class Death(Protocol):
    """A worker was ended by a signal; its supervisor starts another."""

    @property
    def worker(self) -> str: ...

    @property
    def pid(self) -> int | None: ...

    @property
    def how(self) -> str: ...


class Workers(Protocol):
    """The processes that hold ranks."""

    deaths: queue.SimpleQueue[Any]  # of Death

    def kill(self, worker: str, since: float) -> bool:
        """End one that has hung since then; another is started in its place. False: not now."""
        ...

    def preparing(self, worker: str) -> bool:
        """Whether its host has begun to start it."""
        ...

    def mend(self) -> None:
        """Start what was lost, as far as it can be reached."""


class Server(Protocol):
    """A private Redis."""

    def alive(self) -> bool: ...

    def restart(self) -> None: ...
