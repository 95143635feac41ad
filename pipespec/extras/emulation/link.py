"""An emulated network in front of a real one: batches arrive no sooner than they would there."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipespec.core import Batch
from pipespec.limits import MAX_MS, check_number
from pipespec.settings import check_settings, setting
from pipespec.timing.clock import monotonic_ns, wait_until
from pipespec.transport.transport import LinkDelay, Transport

MAX_GBIT = 1e6
SLOWEST_GBIT = 1e-3
MAX_ROW_BYTES = 2**24


@dataclass(frozen=True)
class EmulatedLink(LinkDelay):
    """An emulated network between any two ranks."""

    latency_ms: float = setting(0.0, "Latency of a message, one way.", "ms", limits=(0, MAX_MS))
    gbit_per_s: float = setting(
        0.0, "Bandwidth for the hidden states of a batch; 0 is without limit.", "Gbit/s"
    )
    row_bytes: int = setting(
        16384,
        "Hidden states of one row in the emulated model; 16384 is 8192 values in bfloat16, as in a "
        "70B model.",
        "bytes",
        limits=(1, MAX_ROW_BYTES),
    )

    def __post_init__(self) -> None:
        check_settings("emulate_link", self)
        if self.gbit_per_s != 0:
            hint = ", or 0 for no limit"
            check_number(
                "emulate_link.gbit_per_s", self.gbit_per_s, SLOWEST_GBIT, MAX_GBIT, hint=hint
            )

    def __bool__(self) -> bool:
        return self.latency_ms > 0 or self.gbit_per_s > 0

    def ms(self, rows: int) -> float:
        if not self.gbit_per_s:
            return self.latency_ms
        return self.latency_ms + rows * self.row_bytes * 8 / (self.gbit_per_s * 1e6)

    def delayed(self, transport: Transport, scale: float) -> Transport:
        return EmulatedTransport(transport, self, scale) if self else transport


class EmulatedTransport:
    """Holds back what arrives until `link` would have brought it; for ranks of one machine.

    `scale` multiplies the emulated times.
    """

    def __init__(self, inner: Transport, link: EmulatedLink, scale: float) -> None:
        self.rank = inner.rank
        self._inner = inner
        self._link = link
        self._scale = scale
        of_inner = inner.returns
        self.returns = None if of_inner is None else EmulatedTransport(of_inner, link, scale)

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
