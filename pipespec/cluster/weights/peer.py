"""The process by which the launcher has a host move weights (`host`), the launcher's own machine
included, as the launcher sees it."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from pipespec.cluster.host_link.programs import Conversation
from pipespec.cluster.weights.host import ALIVE_S, lines_of
from pipespec.cluster.weights.plan import Block
from pipespec.config.hosts import Host
from pipespec.engine.checkpoint.parts.parts_file import Range
from pipespec.engine.checkpoint.parts.sources import GivenSource, HubSource
from pipespec.errors import HostFailed, ModelError, RankFailed
from pipespec.system.versions import has_own_protocol, own_version

T = TypeVar("T")
MODULE = "pipespec.cluster.weights.host"
ENDING_S = 5.0  # that a host's process may take to end
OVER_S = 0.1  # between looks whether the cluster is over
# Called with a host's name, the bytes that it has got of those it lacked, and how many these are.
OnProgress = Callable[[str, int, int], None]
# Called with a sentence on a host that waits, is left out, or cannot be reached by another one.
OnWarning = Callable[[str], None]


class Peer(Conversation):
    """The process of a host, which ends with the block. Of one model after another it needs
    `parts`, has blocks, with their hashes (None of a file that is whole), and lacks others; of all
    it lacked `wanted` bytes. Other hosts can read from it at its `url`; None: through the launcher.
    Raises HostFailed."""

    def __init__(
        self,
        host: Host,
        on_progress: OnProgress = lambda *_: None,
        on_warning: OnWarning = lambda _: None,
    ) -> None:
        super().__init__(host, MODULE, ENDING_S)
        self.name, self.parts = host.name, set[str]()
        self.has: dict[Block, str | None] = {}
        self.lacks: set[Block] = set()
        self.url: str | None = None
        self.has_listened = False
        self._on_progress, self._on_warning = on_progress, on_warning
        self._lines = lines_of(self._output)
        self._calling, self._over = threading.Lock(), threading.Event()
        self._moved = self.wanted = 0
        self._understood = False  # it has told its version, which is known to be this one's
        threading.Thread(target=self._show_life, daemon=True).start()

    def __exit__(self, *details: object) -> None:
        self._over.set()
        super().__exit__(*details)

    def call(self, do: str, **arguments: Any) -> Any:
        """What a function of the host returns. Raises ModelError, HostFailed."""
        with self._calling:
            self.write(json.dumps({"do": do, **arguments}))
            for line in self._lines:
                found = json.loads(line)
                if not self._understood:
                    self._require(found.get("version", "of another version"))
                elif "result" in found:
                    return found["result"]
                elif "moved" in found:
                    self.moved(found["moved"])
                elif "warning" in found:
                    self._on_warning(f"{self.name}: {found['warning']}")
                else:
                    prefix = "" if self.host.shares_caches else f"{self.name}: "
                    raise ModelError(f"{prefix}{found['error']}")
        raise self.silence()

    def _require(self, version: str) -> None:
        if not has_own_protocol(version):
            raise HostFailed(
                f"{self.name}: pipespec there is {version}, but that of the launcher is "
                f"{own_version()}; install the same on all hosts"
            )
        self._understood = True

    def moved(self, count: int) -> None:
        """It has got so many bytes more."""
        self._moved += count
        self._on_progress(self.name, self._moved, self.wanted)

    def note(self, has: Iterable[tuple[str, int, str | None]]) -> None:
        """These blocks are here, with their hashes."""
        self.has.update({(file, number): sha for file, number, sha in has})
        self.lacks -= self.has.keys()

    def source(self) -> GivenSource:
        """The files of the model on this host, read through its process."""

        def read(file: str, part: Range) -> bytes:
            data = self.call("read", file=file, start=part[0], stop=part[1])
            if len(found := base64.b64decode(data)) != part[1] - part[0]:
                raise ModelError(f"{self.name}: {file} has changed; start again")
            return found

        return GivenSource(self.name, read)

    def _show_life(self) -> None:
        while not self._over.wait(ALIVE_S):
            self.write("")


def at_once(
    peers: Sequence[Peer],
    task: Callable[[Peer], T],
    over: threading.Event | None = None,
    hub: HubSource | None = None,
) -> list[T]:
    """What a task returns for each host. Raises what the first one raised, also a signal, or
    RankFailed if the cluster is `over`, and then ends what all hosts do."""
    with ThreadPoolExecutor(max(len(peers), 1)) as pool:
        futures = [pool.submit(task, peer) for peer in peers]
        try:
            while True:
                done, left = wait(futures, OVER_S, FIRST_EXCEPTION)
                for each in done:
                    each.result()
                if over is not None and over.is_set():
                    raise RankFailed("The cluster has ended.")
                if not left:
                    return [each.result() for each in futures]
        except BaseException:
            if hub is not None:
                hub.stopped.set()
            for peer in peers:
                peer.end()
            raise
