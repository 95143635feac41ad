"""How a cluster is doing, read from its Redis by whoever asks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipespec.controller.connection import Pipe
from pipespec.controller.keys import Keys


@dataclass(frozen=True)
class Overview:
    """One moment of a namespace.

    `joined` ranks have loaded their models and take part in `epoch`. Of the requests so far,
    `open` are being decoded, `queued` wait and `finished` are answered or cancelled. `last_fault`
    says which epoch ended last, and why; None if none has. `statistics` is what the head said of
    this epoch last (`Scheduler.statistics`); nothing if it has not begun.
    """

    epoch: int
    joined: int
    open: int
    queued: int
    finished: int
    last_fault: str | None
    statistics: dict[str, int] = field(default_factory=dict)


def look(url: str, namespace: str) -> Overview | None:
    """How the cluster of a namespace is doing; None if there is nothing of it in Redis.

    Raises Unreachable.
    """
    keys = Keys(namespace)
    pipe = Pipe(url)
    try:
        epoch = pipe.call("GET", keys.epoch)
        if epoch is None:
            return None
        for command in questions(keys, int(epoch)):
            replies = pipe.call(*command)
    finally:
        pipe.close()
    return overview(int(epoch), replies)


def questions(keys: Keys, epoch: int) -> list[tuple[Any, ...]]:
    """The commands that ask how a cluster is doing; the last one replies to all."""
    return [
        ("MULTI",),  # together, so that no request is counted twice
        ("HLEN", keys.ranks(epoch)),
        ("GET", keys.finished),
        ("ZCARD", keys.queue),
        ("ZCARD", keys.admitted),
        ("GET", keys.fault),
        ("HGETALL", keys.statistics(epoch)),
        ("EXEC",),
    ]


def overview(epoch: int, replies: list[Any]) -> Overview:
    """What the last reply to `questions` says."""
    joined, finished, queued, admitted, fault, told = replies
    return Overview(
        epoch=epoch,
        joined=joined,
        open=admitted,
        queued=queued,
        finished=int(finished or 0),
        last_fault=fault.decode() if fault else None,
        statistics={
            name.decode(): int(value) for name, value in zip(told[::2], told[1::2], strict=True)
        },
    )
