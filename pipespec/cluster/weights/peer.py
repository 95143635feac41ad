"""The process by which the launcher has a host move weights (`weight_host`), the launcher's own
machine included, and what calls it."""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import IO, Any, TypeVar

from pipespec.cluster.host_link import programs
from pipespec.cluster.weights.host import ALIVE_S, SILENCE_S, lines_of
from pipespec.cluster.weights.local import shares_caches
from pipespec.cluster.weights.plan import Block
from pipespec.config.hosts import Host
from pipespec.engine.checkpoint.parts.parts_file import ABSENT, DIGEST_BYTES
from pipespec.errors import HostFailed, ModelError
from pipespec.system.versions import has_own_protocol, own_version

T = TypeVar("T")
MODULE = "pipespec.cluster.weights.host"
ENDING_S = 5.0  # that a host's process may take to end
# Called with a host's name, the bytes that it has got of those it lacked, and how many these are.
OnProgress = Callable[[str, int, int], None]
# The parts that a host needs of each model.
Needs = Mapping[str, set[str]]


class Peer:
    """The process of a host.

    Attributes:
        needs: the parts that it fetches of each model.
        records: of each weight file, by model and name: that of its blocks; None: it is whole.
        lacks: the blocks that it is to get.
        url: where other hosts can read from it; None: through the launcher.
        wanted: the bytes that it lacked.
    """

    def __init__(
        self, host: Host, process: programs.Program, errors: IO[bytes], on: OnProgress
    ) -> None:
        self.name, self.host = host.name, host
        self.needs: Needs = {}
        self.records: dict[tuple[str, str], bytes | None] = {}
        self.lacks: set[Block] = set()
        self.url: str | None = None
        self.over = threading.Event()
        self._process, self._errors, self._on_progress = process, errors, on
        self._calling, self._writing = threading.Lock(), threading.Lock()
        self._heard_at = time.monotonic()
        self._moved = self.wanted = 0
        threading.Thread(target=self._show_life, daemon=True).start()

    def call(self, do: str, **arguments: Any) -> Any:
        """What a function of the host returns. Raises ModelError, HostFailed."""
        with self._calling:
            self._write(json.dumps({"do": do, **arguments}))
            assert self._process.stdout is not None
            for line in lines_of(self._process.stdout, self._hears):
                found = json.loads(line) if line.strip() else {}
                if "moved" in found:
                    self.moved(found["moved"])
                elif "error" in found:
                    prefix = "" if shares_caches(self.host) else f"{self.name}: "
                    raise ModelError(f"{prefix}{found['error']}")
                elif found:
                    return found["result"]
            raise self.failure(ENDING_S) or HostFailed(f"{self.name}: {MODULE} answers no more")

    def moved(self, count: int) -> None:
        """It has got so many bytes more."""
        self._moved += count
        self._on_progress(self.name, self._moved, self.wanted)

    def require_version(self) -> None:
        """Raise HostFailed unless the host's pipespec and this one understand each other."""
        if not has_own_protocol(version := self.call("hello")):
            raise HostFailed(
                f"{self.name}: pipespec there is {version}, but that of the launcher is "
                f"{own_version()}; install the same on all hosts"
            )

    def end(self) -> None:
        """End its process; who waits for it gets an error."""
        self._process.kill()

    def failure(self, within_s: float) -> HostFailed | None:
        """Why its process ends within so many seconds; None: it does not."""
        try:
            code = self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return None
        self._errors.seek(0)
        return programs.failure(self.host, MODULE, code, self._errors.read())

    def hash_of(self, block: Block) -> str | None:
        """The recorded hash of a block of a file that is here; None: it is whole."""
        record, at = self.records[block[:2]], DIGEST_BYTES * block[2]
        return None if record is None else record[at : at + DIGEST_BYTES].hex()

    def has(self, block: Block) -> bool:
        """Whether a block is here."""
        return block[:2] in self.records and self.hash_of(block) != ABSENT.hex()

    def note(self, kind: str, records: Mapping[str, str | None]) -> None:
        """The records of files of a model."""
        for name, record in records.items():
            self.records[kind, name] = None if record is None else bytes.fromhex(record)
        self.lacks = {each for each in self.lacks if not self.has(each)}

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with self._writing, suppress(OSError, ValueError):  # its end is read from its output
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
            if line:  # which may have taken long, and what was said meanwhile was not read
                self._hears()

    def _hears(self) -> None:
        self._heard_at = time.monotonic()

    def _show_life(self) -> None:
        while not self.over.wait(ALIVE_S):
            self._write("")
            if self._calling.locked() and time.monotonic() - self._heard_at > SILENCE_S:
                self.end()


@contextmanager
def connected(host: Host, on_progress: OnProgress = lambda *_: None) -> Iterator[Peer]:
    """The process of a host, which ends with the block. Raises HostFailed."""
    with tempfile.TemporaryFile() as errors:
        process = programs.start_module(host, MODULE, stderr=errors)
        assert process.stdin is not None and process.stdout is not None
        peer = Peer(host, process, errors, on_progress)
        try:
            yield peer
        finally:
            peer.over.set()
            with suppress(OSError):
                process.stdin.close()
            if peer.failure(ENDING_S) is None:
                process.kill()
                process.wait()
            process.stdout.close()


def at_once(
    peers: Sequence[Peer],
    task: Callable[[Peer], T],
    stop: Callable[[], object] = lambda: None,
) -> list[T]:
    """What a task returns for each host. Raises what the first one raised, also a signal, and then
    ends what all hosts do, and calls `stop`."""
    with ThreadPoolExecutor(max(len(peers), 1)) as pool:
        futures = [pool.submit(task, peer) for peer in peers]
        try:
            for each in wait(futures, return_when=FIRST_EXCEPTION).done:
                each.result()
            return [each.result() for each in futures]
        except BaseException:
            stop()
            for peer in peers:
                peer.end()
            raise
