"""How a cluster is doing, read from its Redis by whoever asks."""

from __future__ import annotations

from dataclasses import dataclass

from pipespec.control.connection import Pipe
from pipespec.control.keys import Keys

# Every member complains of an epoch that ends; the first one's reason is wanted.
NUM_COMPLAINTS = 64


@dataclass(frozen=True)
class Overview:
    """One moment of a namespace.

    `joined` ranks have loaded their models and take part in `epoch`. Of the requests so far,
    `open` are being decoded, `queued` wait and `finished` are answered or cancelled. `last_fault`
    is what was complained of first in the last epoch with a complaint, None without any.
    """

    epoch: int
    joined: int
    open: int
    queued: int
    finished: int
    last_fault: str | None


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
        # Together, so that no request is counted twice.
        pipe.call("MULTI")
        pipe.call("HLEN", keys.ranks(int(epoch)))
        pipe.call("GET", keys.finished)
        pipe.call("LLEN", keys.queue)
        pipe.call("LLEN", keys.admitted)
        pipe.call("XREVRANGE", keys.suspicions, "+", "-", "COUNT", NUM_COMPLAINTS)
        joined, finished, queued, admitted, faults = pipe.call("EXEC")
    finally:
        pipe.close()
    return Overview(
        epoch=int(epoch),
        joined=joined,
        open=admitted,
        queued=queued,
        finished=int(finished or 0),
        last_fault=_first_of_last_epoch(faults),
    )


def _first_of_last_epoch(entries: list[tuple[bytes, list[bytes]]]) -> str | None:
    """From the stream of suspicions, the newest first: what began the last trouble."""
    if not entries:
        return None
    complaints = []
    for _, fields in entries:
        words = [word.decode() for word in fields]
        complaints.append(dict(zip(words[::2], words[1::2], strict=True)))
    last = max(int(told["epoch"]) for told in complaints)
    first = [told for told in complaints if int(told["epoch"]) == last][-1]
    return f"epoch {last}: {first['member']}: {first['reason']}"
