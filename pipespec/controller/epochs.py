"""Epochs of a namespace: each begins when a cluster is made (anew), and ends the one before."""

from __future__ import annotations

from pipespec.controller.client import KEEP_STALE_S
from pipespec.controller.connection import Pipe
from pipespec.controller.keys import Keys
from pipespec.controller.records import FAILED
from pipespec.controller.requests import KEEP_FINISHED_S
from pipespec.controller.scripts import evalsha, load

# So many clusters in a row may fail with a request of which nothing was decided.
MOST_CLUSTERS = 3


def begin(url: str, namespace: str, assignment: str = "") -> int:
    """Ends the current epoch of a namespace, if there is one, and begins the next; its number.

    `assignment` is what `Membership.epoch` tells of it. Raises Unreachable.
    """
    return _next(url, namespace, assignment)


def end(url: str, namespace: str, *, failed: bool) -> None:
    """Ends the current epoch of a namespace; its cluster will begin no other.

    A request with which MOST_CLUSTERS in a row have failed, before any of its tokens was decided,
    is given up: it may be why. Raises Unreachable.
    """
    _next(url, namespace, "", MOST_CLUSTERS if failed else "")


def forget(url: str, namespace: str) -> None:
    """Deletes every key of a namespace; for clusters that live for one request.

    Raises Unreachable.
    """
    pipe = Pipe(url)
    try:
        cursor = b"0"
        while True:
            cursor, names = pipe.call("SCAN", cursor, "MATCH", Keys(namespace).everything)
            if names:
                pipe.call("DEL", *names)
            if cursor == b"0":
                return
    finally:
        pipe.close()


def _next(url: str, namespace: str, assignment: str, most: int | str = "") -> int:
    keys = Keys(namespace)
    names = (
        keys.epoch,
        keys.queue,
        keys.admitted,
        keys.assignments,
        keys.requests,
        keys.finished,
        keys.totals,
    )
    told = (keys.epochs, KEEP_STALE_S, assignment, most, FAILED, KEEP_FINISHED_S)
    pipe = Pipe(url)
    try:
        load(pipe)
        begun: int = pipe.call(*evalsha("new_epoch", names, *told))
        return begun
    finally:
        pipe.close()
