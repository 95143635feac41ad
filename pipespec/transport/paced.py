"""An emulated network in front of a real one: batches arrive no sooner than they would there."""

from __future__ import annotations

from dataclasses import replace

from pipespec.clock import monotonic_ns
from pipespec.core import Batch
from pipespec.emulation import Link, wait_until
from pipespec.transport.protocol import Transport


class PacedTransport:
    """Holds back what arrives until `link` would have brought it; for ranks of one machine.

    `scale` multiplies the emulated times.
    """

    def __init__(self, inner: Transport, link: Link, scale: float) -> None:
        self.rank = inner.rank
        self._inner = inner
        self._link = link
        self._scale = scale

    def send(self, batch: Batch) -> None:
        self._inner.send(replace(batch, sent_ns=monotonic_ns()))

    def recv(self) -> Batch:
        batch = self._inner.recv()
        rows = 0 if batch.hidden is None else len(batch)
        wait_until(batch.sent_ns, self._link.ms(rows) * self._scale)
        return batch

    def abort(self) -> None:
        self._inner.abort()

    def close(self) -> None:
        self._inner.close()
