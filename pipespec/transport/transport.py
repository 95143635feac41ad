"""The interface of a transport, which sends batches from one rank to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pipespec.core import Batch


@dataclass(frozen=True)
class LinkKind:
    """How a rank is linked to the next one. `local`: both are on one host, and the link is bound to
    its loopback interface. `sealed`: messages are encrypted and authenticated."""

    local: bool = True
    sealed: bool = False


class Transport(Protocol):
    """One rank's two links: batches come from `rank - 1` and go to `rank + 1`. Rank 0 only sends,
    the last rank only receives. The sender may change its tensors as soon as `send` has
    returned."""

    rank: int

    @property
    def returns(self) -> Transport | None:
        """The link from the last rank back to rank 0, at these two, which ends with the others;
        None: there is none."""

    def send(self, batch: Batch) -> None:
        """Start sending to the next rank, once the link has room. A stop batch, the last one of a
        link, has been received when this returns. Raises RankFailed if the next rank is gone."""

    def recv(self) -> Batch:
        """The next batch from the previous rank; waits for it without a time limit. Raises
        RankFailed if that rank is gone, and StaleEpoch if the batch is of another epoch."""

    def abort(self) -> None:
        """From another thread: make a thread that waits in `send` or `recv` raise RankFailed."""

    def close(self) -> None:
        """Close both links at once; a neighbour that waits on one of them gets RankFailed."""


@dataclass(frozen=True)
class LinkDelay:
    """What a link adds to the time of a message; this class: nothing, as on a real network. It is
    true if it delays anything. `latency_ms` is the delay in one direction."""

    latency_ms = 0.0

    def __bool__(self) -> bool:
        return False

    def delayed(self, transport: Transport, scale: float) -> Transport:
        """The transport with this delay added to its batches, times `scale`."""
        return transport
