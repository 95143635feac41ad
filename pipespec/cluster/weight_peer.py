"""The process on another host that fetches its weights (`weight_host`), as the launcher sees it."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import IO, Any, BinaryIO, cast

from pipespec.cluster import ssh
from pipespec.cluster.byte_channel import ByteChannel, ChannelClosed
from pipespec.cluster.source_model import Key, SourceModel
from pipespec.config.hosts import Host
from pipespec.errors import HostFailed, ModelError
from pipespec.system.versions import own_version

MODULE = "pipespec.cluster.weight_host"
# Seconds that a host's process may take to end.
ENDING_S = 5.0


class WeightPeer:
    """The process on another host that fetches its weights."""

    def __init__(self, host: Host, process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
        self.host = host
        self._process, self._errors = process, errors
        self._channel: ByteChannel | None = None
        self.has: dict[Key, str] = {}  # hashes
        self.lacks: list[Key] = []

    def open(self, handlers: Mapping[str, Any]) -> None:
        """Begin to talk. Raises HostFailed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        reader, writer = cast(BinaryIO, self._process.stdout), cast(BinaryIO, self._process.stdin)
        self._channel = ByteChannel(self.host.name, reader, writer, handlers)
        version = self.call("hello")
        if version != own_version():
            raise HostFailed(
                f"{self.host.name}: pipespec there is {version}, but that of the launcher is "
                f"{own_version()}; install the same on all hosts"
            )

    @property
    def channel(self) -> ByteChannel:
        assert self._channel is not None
        return self._channel

    def call(self, function: str, **arguments: Any) -> Any:
        """An answer of the host. Raises ModelError, with its name, and HostFailed."""
        try:
            return self.channel.call(function, **arguments)
        except ModelError as error:
            raise ModelError(f"{self.host.name}: {error}") from error
        except ChannelClosed as error:
            raise self._failure() from error

    def holds(self, models: Mapping[str, SourceModel], needs: Mapping[str, set[str]]) -> bool:
        """Whether the host has all that it needs of the models."""
        for kind, parts in needs.items():
            shared = models[kind].shared
            assert shared is not None, "only such models are offered"
            arguments = {"path": str(models[kind].path), "parts": sorted(parts)}
            if not self.call("holds", shared=asdict(shared), **arguments):
                return False
        return True

    def offer(self, models: Mapping[str, SourceModel], needs: Mapping[str, set[str]]) -> None:
        """Learn what the host has and lacks of the models."""
        for kind, parts in needs.items():
            model = models[kind]
            found = self.call(
                "offer",
                kind=kind,
                path=str(model.path),
                blueprint=model.blueprint.as_json(),
                parts=sorted(parts),
            )
            if found is None:
                continue
            for file, hashes in found["has"].items():
                self.has |= {(kind, file, name): sha for name, sha in hashes.items()}
            self.lacks += [(kind, file, n) for file, names in found["lacks"].items() for n in names]

    def end(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()

    def _failure(self) -> HostFailed:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING_S)
        self._errors.seek(0)
        code = self._process.poll()
        return ssh.failure(self.host, MODULE, -9 if code is None else code, self._errors.read())


@contextmanager
def connected(host: Host) -> Iterator[WeightPeer]:
    """A host's process, which ends with the block."""
    with tempfile.TemporaryFile() as errors:
        process = ssh.start_module(
            host, MODULE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        )
        try:
            yield WeightPeer(host, process, errors)
        finally:
            assert process.stdin is not None and process.stdout is not None
            with suppress(OSError):
                process.stdin.close()
            try:
                process.wait(ENDING_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
