"""Where a host reads weights from: the hub, at URLs that the launcher names, or another host.

What cannot be read directly comes through the launcher.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipespec.cluster.byte_channel import ByteChannel, LocalChannel
from pipespec.cluster.weight_links import LinkFailed, WeightLink
from pipespec.engine.checkpoint_parts.fetching import Source
from pipespec.engine.checkpoint_parts.hub_client import Unavailable
from pipespec.engine.checkpoint_parts.parts_file import Range

Channel = ByteChannel | LocalChannel


class RelayedSource:
    """Bytes of one source for one model: directly, until that fails, then through the launcher.

    A connection that breaks is replaced once before that.

    Args:
        name: of the source: HUB or a host.
        direct: its `read` raises Unavailable or LinkFailed if the launcher may be able to; None:
            the launcher alone can read them.
    """

    def __init__(self, channel: Channel, kind: str, name: str, direct: Source | None) -> None:
        self._channel, self._kind, self.name, self._direct = channel, kind, name, direct
        self._stopped, self._relayed = False, direct is None

    def read(self, file: str, part: Range) -> Iterator[bytes]:
        """See `pipespec.engine.checkpoint_parts.fetching.Source`."""
        at, stop = part
        again = True
        while self._direct is not None and not self._relayed:
            try:
                for chunk in self._direct.read(file, (at, stop)):
                    at += len(chunk)
                    yield chunk
                return
            except (Unavailable, LinkFailed) as error:
                if self._stopped:
                    raise Unavailable(f"reading from {self.name} was stopped") from error
                if again and isinstance(error, LinkFailed) and error.reached:
                    again = False
                else:
                    self._relay(error)
        yield from self._channel.stream(
            "read", kind=self._kind, source=self.name, file=file, start=at, stop=stop
        )

    def stop(self) -> None:
        """End what is read, soon."""
        self._stopped = True
        if self._direct is not None:
            self._direct.stop()

    def _relay(self, error: Exception) -> None:
        """Have the launcher read from now on, which warns once."""
        self._relayed = True
        if isinstance(error, LinkFailed):
            self._channel.call(
                "unreachable", source=self.name, why=str(error), reached=error.reached
            )


@dataclass(frozen=True)
class LinkedSource:
    """Another host, over connections to it."""

    link: WeightLink
    kind: str
    name: str

    def read(self, file: str, part: Range) -> Iterator[bytes]:
        """See `pipespec.engine.checkpoint_parts.fetching.Source`. Raises LinkFailed."""
        start, stop = part
        return self.link.read(stop - start, kind=self.kind, file=file, start=start, stop=stop)

    def stop(self) -> None:
        """End what is read, soon."""
        self.link.close()
