"""The process by which the launcher has a host move weights (`host`), the launcher's own machine
included, as the launcher sees it."""

from __future__ import annotations

import base64
import json
import random
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from pipespec.cluster.host_link.programs import Conversation
from pipespec.cluster.weights.host import ALIVE_S, lines_of
from pipespec.cluster.weights.local import shares_caches
from pipespec.cluster.weights.plan import Block
from pipespec.config.hosts import Host
from pipespec.engine.checkpoint.parts.parts_file import Range
from pipespec.engine.checkpoint.parts.range_source import RangeSource, Sink
from pipespec.errors import HostFailed, ModelError
from pipespec.system.versions import has_own_protocol, own_version

T = TypeVar("T")
MODULE = "pipespec.cluster.weights.host"
ENDING_S = 5.0  # that a host's process may take to end
# Called with a host's name, the bytes that it has got of those it lacked, and how many these are.
OnProgress = Callable[[str, int, int], None]
# Seconds between two tries to lock folders, drawn anew each time, so that two starts do not meet
# for good.
PAUSE_S = (0.2, 1.0)
# Called with a sentence on a host that is left out, or cannot be reached by another one.
OnWarning = Callable[[str], None]
# The parts that a host needs of each model.
Needs = Mapping[str, set[str]]


class Peer(Conversation):
    """The process of a host, which ends with the block. Raises HostFailed.

    Attributes:
        needs: the parts that it fetches of each model.
        has: the blocks that are here, with their hashes; None of a file that is whole.
        lacks: the blocks that it is to get.
        url: where other hosts can read from it; None: through the launcher.
        wanted: the bytes that it lacked.
    """

    def __init__(self, host: Host, on_progress: OnProgress = lambda *_: None) -> None:
        super().__init__(host, MODULE, ENDING_S)
        self.name = host.name
        self.needs: Needs = {}
        self.has: dict[Block, str | None] = {}
        self.lacks: set[Block] = set()
        self.url: str | None = None
        self._on_progress, self._lines = on_progress, lines_of(self._output)
        self._calling, self._over = threading.Lock(), threading.Event()
        self._moved = self.wanted = 0
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
                if "moved" in found:
                    self.moved(found["moved"])
                elif "error" in found:
                    prefix = "" if shares_caches(self.host) else f"{self.name}: "
                    raise ModelError(f"{prefix}{found['error']}")
                else:
                    return found["result"]
        raise self.silence()

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

    def note(self, has: Sequence[tuple[str, str, int, str | None]]) -> None:
        """These blocks are here, with their hashes."""
        self.has.update({(kind, file, number): sha for kind, file, number, sha in has})
        self.lacks -= self.has.keys()

    def _show_life(self) -> None:
        while not self._over.wait(ALIVE_S):
            self.write("")


class PeerSource(RangeSource):
    """The files of a model of a host, read through its process."""

    def __init__(self, peer: Peer, kind: str) -> None:
        super().__init__(peer.name, {})
        self._peer, self._kind = peer, kind

    def read(self, file: str, part: Range, size: int, sink: Sink) -> None:
        """See RangeSource. Raises ModelError, HostFailed."""
        start, stop = part
        data = self._peer.call("read", kind=self._kind, file=file, start=start, stop=stop)
        if len(found := base64.b64decode(data)) != stop - start:
            raise ModelError(f"{self.name}: {file} has changed; start again")
        sink(found)


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


def lock_folders(
    peers: Sequence[Peer],
    on_warning: OnWarning,
    pause: Callable[[float], object] = time.sleep,
) -> None:
    """Be the only start that fetches into the folders of these hosts. Of hosts that share one, the
    first fetches what all need. A sentence says what is waited for. Raises ModelError, HostFailed.

    Two starts may have folders in common, under different names of hosts and in any order. So a
    start that holds some locks waits for no other one: it gives them back, and tries again later.
    """
    run, warned = secrets.token_hex(8), False
    while True:
        needs: dict[str, dict[str, set[str]]] = {peer.name: {} for peer in peers}
        taken = None
        for peer in peers:
            found = peer.call("lock", run=run, host=peer.name)
            if taken := found.get("holder"):
                taken = f"{peer.name}: {taken}"
                break
            for kind, owner in found["owners"].items():
                needs[owner].setdefault(kind, set()).update(peer.needs[kind])
        if taken is None:
            break
        for peer in peers:
            peer.call("unlock")
        if not warned:
            on_warning(f"{taken}; waiting until it has ended.")
            warned = True
        pause(random.uniform(*PAUSE_S))
    for peer in peers:
        peer.needs = needs[peer.name]
