"""The hosts that fetch weights (`weight_host`), as the launcher sees them."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import IO, Any, BinaryIO, cast

from pipespec.cluster import ssh
from pipespec.cluster.byte_channel import ByteChannel, ChannelClosed, LocalChannel
from pipespec.cluster.source_model import SourceModel
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
        has: the tensors that it has, with their hashes; None: it has them in a whole file.
        lacks, fetched: the tensors that it is to fetch, and those that it has fetched.
        owners: the host that fetches into its folder of a model.
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
        self.fetched: dict[Key, None] = {}
        self.owners: dict[str, str] = {}
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

    def holds(self, models: Mapping[str, SourceModel], needs: Mapping[str, set[str]]) -> bool:
        """Whether the host has all that it needs of the models."""
        for kind, parts in needs.items():
            shared = models[kind].shared
            assert shared is not None, "only such models are offered"
            arguments = {"path": str(models[kind].path), "parts": sorted(parts)}
            if not self.call("holds", shared=asdict(shared), **arguments):
                return False
        return True

    def prepare(
        self,
        models: Mapping[str, SourceModel],
        blueprints: Mapping[str, Any],
        needs: Mapping[str, set[str]],
    ) -> None:
        """Have the host find the folders of the models. `blueprints`: as JSON."""
        for kind, parts in needs.items():
            arguments = {"path": str(models[kind].path), "parts": sorted(parts)}
            self.call("prepare", kind=kind, blueprint=blueprints[kind], **arguments)

    def lock(self, kind: str, run: str) -> str | None:
        """Have the host, or one that shares its folder, be the only one to fetch into it. A clause
        if a process of another run does."""
        found = self.call("lock", kind=kind, run=run, host=self.name)
        if found["owner"] is None:
            return str(found["holder"])
        self.owners[kind] = found["owner"]
        return None

    def offer(self, *, owned: bool) -> None:
        """Learn what the host has and lacks of the models, of which it has the folder, or of which
        another host does."""
        for kind, owner in self.owners.items():
            if (owner == self.name) != owned:
                continue
            found = self.call("offer", kind=kind)
            for file, hashes in found["has"].items():
                self.has |= {(kind, file, name): sha for name, sha in hashes.items()}
            self.lacks += [(kind, file, n) for file, names in found["lacks"].items() for n in names]

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
        process = ssh.start_module(
            host, MODULE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        )
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


def _failure(host: Host, process: subprocess.Popen[bytes], errors: IO[bytes]) -> HostFailed:
    with suppress(subprocess.TimeoutExpired):
        process.wait(ENDING_S)
    errors.seek(0)
    code = process.poll()
    return ssh.failure(host, MODULE, -9 if code is None else code, errors.read())
