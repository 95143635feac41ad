"""How a batch gets from one rank to the next."""

from __future__ import annotations

from typing import Protocol

from pipespec.core import Batch


class Transport(Protocol):
    """One rank's two links: batches come from `rank - 1` and go to `rank + 1`.

    Rank 0 only sends, the last rank only receives. A batch arrives with the content it had
    when it was sent; what the sender does with its tensors afterwards does not matter.
    """

    rank: int

    def send(self, batch: Batch) -> None:
        """Start sending to the next rank, once the batch before has left; a stop batch, the
        last one of a link, has left when this returns.

        Raises:
            RankFailed: the next rank is gone.
        """

    def recv(self) -> Batch:
        """The next batch from the previous rank; waits for it without a time limit.

        Raises:
            RankFailed: the previous rank is gone.
            StaleEpoch: the batch belongs to another life of the cluster.
        """

    def abort(self) -> None:
        """From another thread: let whoever waits in `send` or `recv` have RankFailed."""

    def close(self) -> None:
        """Drop both links at once; a neighbour that waits on one of them is told."""
