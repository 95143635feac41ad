"""All ranks as threads of one process, for tests and for debugging."""

from __future__ import annotations

import threading
from dataclasses import replace

from pipespec.core import Batch
from pipespec.errors import RankFailed
from pipespec.transport.transport import Transport


class _ThreadLink:
    """Holds at most one batch. Before Python 3.13 `queue.Queue` cannot wake a waiting thread when
    it is closed."""

    def __init__(self, sender: int) -> None:
        self.sender = sender
        self._batch: Batch | None = None
        self._closed_by: int | None = None
        self._changed = threading.Condition()

    def put(self, batch: Batch) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._batch is None or self._closed_by is not None)
            self._refuse_if_closed()
            self._batch = batch
            self._changed.notify_all()

    def get(self) -> Batch:
        with self._changed:
            self._changed.wait_for(lambda: self._batch is not None or self._closed_by is not None)
            # What was sent before the sender closed still arrives.
            if self._batch is None:
                self._refuse_if_closed()
            batch, self._batch = self._batch, None
            assert batch is not None
            self._changed.notify_all()
            return batch

    def close(self, rank: int) -> None:
        with self._changed:
            if self._closed_by is None:
                self._closed_by = rank
            if rank != self.sender:
                self._batch = None
            self._changed.notify_all()

    def _refuse_if_closed(self) -> None:
        if self._closed_by is not None:
            raise RankFailed(
                f"The link from rank {self.sender} to rank {self.sender + 1} is closed: "
                f"rank {self._closed_by} ended."
            )


class ThreadTransport:
    """One rank's ends of the links that `thread_transports` made."""

    def __init__(
        self, rank: int, previous: _ThreadLink | None, following: _ThreadLink | None
    ) -> None:
        self.rank = rank
        self._previous = previous
        self._following = following

    def send(self, batch: Batch) -> None:
        assert self._following is not None, "the last rank has no next rank"
        hidden = None if batch.hidden is None else batch.hidden.clone()
        self._following.put(replace(batch, rows=batch.rows.copy(), hidden=hidden))

    def recv(self) -> Batch:
        assert self._previous is not None, "rank 0 has no previous rank"
        return self._previous.get()

    def abort(self) -> None:
        self.close()

    def close(self) -> None:
        for link in (self._previous, self._following):
            if link is not None:
                link.close(self.rank)


def thread_transports(num_ranks: int) -> list[Transport]:
    """The transports of ranks `0 .. num_ranks - 1`, one for each thread."""
    assert num_ranks > 0
    links: list[_ThreadLink | None] = [_ThreadLink(rank) for rank in range(num_ranks - 1)]
    ends = [None, *links, None]
    return [ThreadTransport(rank, ends[rank], ends[rank + 1]) for rank in range(num_ranks)]
