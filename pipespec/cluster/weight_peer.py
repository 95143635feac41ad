"""The hosts that fetch weights (`weight_host`), as the launcher sees them."""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import IO, Any, TypeVar

from pipespec.cluster import ssh
from pipespec.cluster.weight_host import ALIVE_S, SILENCE_S, WeightHost
from pipespec.cluster.weight_plan import Block
from pipespec.config.hosts import Host
from pipespec.controller.certificate import Certificate
from pipespec.engine.checkpoint.parts.parts_file import ABSENT, DIGEST_BYTES
from pipespec.errors import HostFailed, ModelError
from pipespec.system.network_interfaces import resolve
from pipespec.system.versions import has_own_protocol, own_version

T = TypeVar("T")
MODULE = "pipespec.cluster.weight_host"
# Seconds that a host's process may take to end.
ENDING_S = 5.0
# Called with a host's name, the bytes that it has got of those it lacked, and how many these are.
OnProgress = Callable[[str, int, int], None]


class Peer(ABC):
    """A host that takes part, as the launcher sees it.

    Attributes:
        records: of each weight file, by model and name: that of its blocks; None: it is whole.
        lacks: the blocks that it is to get.
        url: where other hosts can read from it; None: through the launcher.
        moved: bytes that it got, of `wanted` ones.
    """

    def __init__(self, name: str, host: Host | None, on_progress: OnProgress) -> None:
        self.name, self.host = name, host
        self.records: dict[tuple[str, str], bytes | None] = {}
        self.lacks: set[Block] = set()
        self.url: str | None = None
        self.moved = self.wanted = 0
        self._on_progress, self._moving = on_progress, threading.Lock()

    @abstractmethod
    def call(self, do: str, **arguments: Any) -> Any:
        """What a function of the host returns. Raises ModelError, HostFailed."""

    @abstractmethod
    def end(self) -> None:
        """End what it does, soon."""

    def failure(self, within_s: float) -> HostFailed | None:
        """Why its process ends within so many seconds; None: it does not."""
        return None

    def require_version(self) -> None:
        """Raise HostFailed unless the host's pipespec and this one understand each other."""
        if not has_own_protocol(version := self.call("hello")):
            raise HostFailed(
                f"{self.name}: pipespec there is {version}, but that of the launcher is "
                f"{own_version()}; install the same on all hosts"
            )

    def on_moved(self, count: int) -> None:
        """It has got so many bytes more."""
        with self._moving:
            self.moved += count
            self._on_progress(self.name, self.moved, self.wanted)

    def has(self, block: Block) -> bool:
        """Whether a block is here."""
        kind, file, _ = block
        return (kind, file) in self.records and self.hash_of(block) != ABSENT.hex()

    def hash_of(self, block: Block) -> str | None:
        """The recorded hash of a block; None: the file is whole and has no record."""
        kind, file, number = block
        record = self.records[kind, file]
        at = DIGEST_BYTES * number
        return None if record is None else record[at : at + DIGEST_BYTES].hex()

    def note(self, kind: str, records: Mapping[str, str | None]) -> None:
        """The records of files of a model."""
        for name, record in records.items():
            self.records[kind, name] = None if record is None else bytes.fromhex(record)
        self.lacks = {each for each in self.lacks if not self.has(each)}

    def listen(self, certificate: Certificate) -> None:
        """Let other hosts read from it, and it from them. Raises ModelError, whose message is a
        clause."""
        host, ip = self.host, None if self.host is None else self.host.address
        with suppress(OSError):
            ip = None if ip is None else resolve(ip)
        interface = None if host is None else host.interface
        pem = {"cert": certificate.cert, "key": certificate.key}
        self.url = self.call("listen", address=ip, interface=interface, **pem)


class LocalPeer(Peer):
    """The launcher's own machine, whose weights are fetched in this process."""

    def __init__(self, name: str, host: Host | None, on_progress: OnProgress) -> None:
        super().__init__(name, host, on_progress)
        self.own = WeightHost(self.on_moved)

    def call(self, do: str, **arguments: Any) -> Any:
        return getattr(self.own, do)(**arguments)

    def end(self) -> None:
        self.own.stop()


class _FarPeer(Peer):
    """Another host's process."""

    def __init__(
        self, host: Host, process: subprocess.Popen[bytes], errors: IO[bytes], on: OnProgress
    ) -> None:
        super().__init__(host.name, host, on)
        self._far, self._process, self._errors = host, process, errors
        self._calling, self._writing = threading.Lock(), threading.Lock()
        self._heard_at = time.monotonic()
        self.over = threading.Event()
        threading.Thread(target=self._show_life, daemon=True).start()

    def call(self, do: str, **arguments: Any) -> Any:
        with self._calling:
            self._write(json.dumps({"do": do, **arguments}))
            assert self._process.stdout is not None
            for line in self._process.stdout:
                self._heard_at = time.monotonic()
                found = json.loads(line) if line.strip() else {}
                if "moved" in found:
                    self.on_moved(found["moved"])
                elif "error" in found:
                    raise ModelError(f"{self.name}: {found['error']}")
                elif found:
                    return found["result"]
            if (failure := self.failure(ENDING_S)) is not None:
                raise failure
            raise HostFailed(f"{self.name}: {MODULE} answers no more; start again")

    def end(self) -> None:
        self._process.kill()

    def failure(self, within_s: float) -> HostFailed | None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        if (code := self._process.poll()) is None:
            return None
        self._errors.seek(0)
        return ssh.failure(self._far, MODULE, code, self._errors.read())

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with self._writing, suppress(OSError, ValueError):  # its end is read from its output
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def _show_life(self) -> None:
        while not self.over.wait(ALIVE_S):
            self._write("")
            if self._calling.locked() and time.monotonic() - self._heard_at > SILENCE_S:
                self.end()


@contextmanager
def connected(host: Host, on_progress: OnProgress = lambda *_: None) -> Iterator[Peer]:
    """Another host's process, which ends with the block. Raises HostFailed."""
    with tempfile.TemporaryFile() as errors:
        process = ssh.start_module(
            host, MODULE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        )
        assert process.stdin is not None and process.stdout is not None
        peer = _FarPeer(host, process, errors, on_progress)
        try:
            yield peer
        finally:
            peer.over.set()
            with suppress(OSError):
                process.stdin.close()
            try:
                process.wait(ENDING_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


@contextmanager
def on_this_machine(name: str, host: Host | None, on_progress: OnProgress) -> Iterator[Peer]:
    """The launcher's own machine."""
    peer = LocalPeer(name, host, on_progress)
    try:
        yield peer
    finally:
        peer.end()
        peer.own.unlock()  # what fetched has ended


def at_once(peers: Sequence[Peer], task: Callable[[Peer], T]) -> list[T]:
    """What a task returns for each host. Raises what the first one raised, also a signal, and then
    ends what all hosts do."""
    with ThreadPoolExecutor(max(len(peers), 1)) as pool:
        futures = [pool.submit(task, peer) for peer in peers]
        try:
            for each in wait(futures, return_when=FIRST_EXCEPTION).done:
                each.result()
            return [each.result() for each in futures]
        except BaseException:
            for peer in peers:
                peer.end()
            raise
