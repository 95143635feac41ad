"""Where a host reads weights from: the hub, at URLs that the launcher names, or another host.

What cannot be read directly comes through the launcher.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Protocol

from pipespec.cluster.byte_channel import ByteChannel, LocalChannel
from pipespec.cluster.weight_links import LinkFailed, WeightLink
from pipespec.cluster.weight_plan import HUB
from pipespec.engine.checkpoint_parts.blueprint import Blueprint
from pipespec.engine.checkpoint_parts.hub_client import HubClient, Location, Unavailable
from pipespec.engine.checkpoint_parts.ranges import MAX_GAP_BYTES, Range

Channel = ByteChannel | LocalChannel


class Direct(Protocol):
    """Reads bytes without the launcher."""

    def read(self, file: str, part: Range) -> Iterator[bytes]:
        """The bytes of a part of a file, as they come. Raises Unavailable, LinkFailed: perhaps the
        launcher can read them; ModelError."""

    def close(self) -> None:
        """End what is read, soon."""


class RelayedSource:
    """Bytes of one source for one model: directly, until that fails, then through the launcher.

    A connection that breaks is replaced once before that.

    Args:
        source: HUB or a host.
        direct: None: the launcher alone can read them.
    """

    def __init__(self, channel: Channel, kind: str, source: str, direct: Direct | None) -> None:
        self._channel, self._kind, self._source = channel, kind, source
        self._direct = direct
        self._lock = threading.Lock()
        self._stopped = False
        self._relayed = direct is None

    @property
    def name(self) -> str:
        """See `pipespec.engine.checkpoint_parts.fetching.Source`."""
        return self._source

    @property
    def max_gap(self) -> int:
        """See `pipespec.engine.checkpoint_parts.fetching.Source`."""
        return MAX_GAP_BYTES if self._source == HUB else 0

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
                    raise Unavailable(f"reading from {self._source} was stopped") from error
                if again and isinstance(error, LinkFailed) and error.reached:
                    again = False
                else:
                    self._relay(error)
        yield from self._channel.stream(
            "read", kind=self._kind, source=self._source, file=file, start=at, stop=stop
        )

    def stop(self) -> None:
        """End what is read, soon."""
        self._stopped = True
        if self._direct is not None:
            self._direct.close()

    def _relay(self, error: Exception) -> None:
        """Have the launcher read from now on."""
        with self._lock:
            first, self._relayed = not self._relayed, True
        if first and isinstance(error, LinkFailed):
            self._channel.call(
                "unreachable", source=self._source, why=str(error), reached=error.reached
            )


class DirectHub:
    """The hub, without a token."""

    def __init__(self, channel: Channel, kind: str, blueprint: Blueprint) -> None:
        self._repository = blueprint.repository
        self._client = _LocatedClient(channel, kind, self._repository.repo)

    def read(self, file: str, part: Range) -> Iterator[bytes]:
        """See `Direct`."""
        size = self._repository.weights[file].size
        return self._client.read(self._repository.commit, file, part, size)

    def close(self) -> None:
        """End what is read, soon."""
        self._client.stopped.set()


class DirectHost:
    """Another host, over connections to it."""

    def __init__(self, link: WeightLink, kind: str) -> None:
        self._link, self._kind = link, kind

    def read(self, file: str, part: Range) -> Iterator[bytes]:
        """See `Direct`."""
        start, stop = part
        return self._link.read(stop - start, kind=self._kind, file=file, start=start, stop=stop)

    def close(self) -> None:
        """End what is read, soon."""
        self._link.close()


class _LocatedClient(HubClient):
    """A client of the hub that has no token: the launcher says where files are."""

    def __init__(self, channel: Channel, kind: str, repo: str):
        super().__init__(repo)
        self._channel, self._kind = channel, kind
        self._known: dict[str, Location] = {}
        self._asking = threading.Lock()

    def locate(self, commit: str, name: str) -> Location:
        with self._asking:
            if name not in self._known:
                self._known[name] = self._ask(name, fresh=False)
            return self._known[name]

    def forget_location(self, commit: str, name: str) -> None:
        with self._asking:
            if name in self._known:
                self._known[name] = self._ask(name, fresh=True)

    def _ask(self, name: str, *, fresh: bool) -> Location:
        found = self._channel.call("locate", kind=self._kind, file=name, fresh=fresh)
        if found is None:
            raise Unavailable("the hub sends this file to holders of the token alone")
        return Location(found["url"], found["headers"])
