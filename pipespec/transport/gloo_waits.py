"""Which threads wait in gloo, and since when. gloo does not release every wait when a neighbour
dies or a link is closed. In torch 2.13, a message that is partly sent or received belongs to no
list of pending operations, so neither the end of the connection nor an abort reaches who waits for
it (gloo, tcp/pair.cc, `Pair::signalException`). `pipespec.cluster.ranks.heartbeat` looks here
whether a thread that it has aborted still waits."""

from __future__ import annotations

import threading
import time

from pipespec.system.liveness import Waiting

_since: dict[int, float] = {}  # on the monotonic clock, by thread


class GlooWait(Waiting):
    """While its block runs, this thread waits in gloo."""

    def __enter__(self) -> None:
        _since[threading.get_ident()] = time.monotonic()
        super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        _since.pop(threading.get_ident(), None)


def waiting_since(thread: int) -> float | None:
    """When that thread began to wait; None: it does not."""
    return _since.get(thread)
