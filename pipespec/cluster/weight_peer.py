"""The hosts that fetch weights (`weight_host`), as the launcher sees them."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, Any, BinaryIO, cast

from pipespec.cluster.byte_channel import ByteChannel, ChannelClosed, LocalChannel
from pipespec.cluster.host_link import programs
from pipespec.cluster.weight_host import WeightHost
from pipespec.cluster.weight_links import Address
from pipespec.cluster.weight_plan import Key
from pipespec.cluster.weight_sources import Channel
from pipespec.config.hosts import Host
from pipespec.controller.certificate import Certificate
from pipespec.errors import HostFailed, ModelError
from pipespec.system.network_interfaces import resolve
from pipespec.system.versions import has_own_protocol, own_version

MODULE = "pipespec.cluster.weight_host"
# Seconds that a host's process may take to end.
ENDING_S = 5.0


class WeightPeer:
    """A host that fetches its weights.

    Args:
        host: its entry in the hosts file; None: this machine, which is none of the hosts.
        end: ends its process, or what it does in this one.
        failure: the error for its process, which has ended.

    Attributes:
        has: the pieces that it has, with their hashes; None: it has them in a whole file.
        lacks: the pieces that it is to fetch.
        address: where other hosts can read from it; None: through the launcher.
    """

    def __init__(
        self,
        name: str,
        host: Host | None,
        channel: Channel,
        end: Callable[[], object],
        failure: Callable[[], HostFailed] | None = None,
    ) -> None:
        self.name, self.host, self.channel, self.end = name, host, channel, end
        self._failure = failure
        self.has: dict[Key, str | None] = {}
        self.lacks: list[Key] = []
        self.address: Address | None = None

    def call(self, function: str, **arguments: Any) -> Any:
        """An answer of the host. Raises ModelError, with the name of another host, and
        HostFailed."""
        try:
            return self.channel.call(function, **arguments)
        except ModelError as error:
            if self._failure is None:
                raise
            raise ModelError(f"{self.name}: {error}") from error
        except ChannelClosed as error:
            raise (self.failure or error) from error

    def read(self, **arguments: Any) -> Iterator[bytes]:
        """Bytes of a file of the host, as they come. Raises as `call`."""
        try:
            yield from self.channel.stream("read", **arguments)
        except ChannelClosed as error:
            raise (self.failure or error) from error

    @property
    def failure(self) -> HostFailed | None:
        """Why its process has ended; None: it has not."""
        if self._failure is None or not self.channel.closed.is_set():
            return None
        return self._failure()

    def require_version(self) -> None:
        """Raise HostFailed unless its pipespec and this one understand each other."""
        if not has_own_protocol(version := self.call("hello")):
            raise HostFailed(
                f"{self.name}: pipespec there is {version}, but that of the launcher is "
                f"{own_version()}; install the same on all hosts"
            )

    def listen(self, certificate: Certificate) -> None:
        """Let other hosts read from it, and it from them. Raises ModelError, whose message is a
        clause."""
        ip = None if self.host is None else self.host.address
        with suppress(OSError):
            ip = None if ip is None else resolve(ip)
        found = self.channel.call(
            "listen",
            address=ip,
            interface=None if self.host is None else self.host.interface,
            cert=certificate.cert,
            key=certificate.key,
        )
        self.address = None if found is None else (found[0], found[1])


@contextmanager
def connected(host: Host, handlers: Mapping[str, Any]) -> Iterator[WeightPeer]:
    """Another host's process, which ends with the block. `handlers` are what it may ask. Raises
    HostFailed."""
    with tempfile.TemporaryFile() as errors:
        process = programs.start_module(host, MODULE, stderr=errors)
        assert process.stdin is not None and process.stdout is not None
        reader, writer = cast(BinaryIO, process.stdout), cast(BinaryIO, process.stdin)
        try:
            channel = ByteChannel(host.name, reader, writer, handlers)
            yield WeightPeer(
                host.name, host, channel, process.kill, lambda: _failure(host, process, errors)
            )
        finally:
            with suppress(OSError):
                process.stdin.close()
            try:
                process.wait(ENDING_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def on_this_machine(
    name: str, host: Host | None, handlers: Mapping[str, Any]
) -> Iterator[WeightPeer]:
    """The launcher's own machine, whose weights are fetched in this process."""
    own = WeightHost(LocalChannel(handlers))
    try:
        yield WeightPeer(name, host, LocalChannel(own.handlers()), own.stop)
    finally:
        own.stop()
        own.unlock()  # what fetched has ended


def _failure(host: Host, process: programs.Program, errors: IO[bytes]) -> HostFailed:
    with suppress(subprocess.TimeoutExpired):
        process.wait(ENDING_S)
    errors.seek(0)
    code = process.poll()
    return programs.failure(host, MODULE, -9 if code is None else code, errors.read())
