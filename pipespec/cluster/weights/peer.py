"""The process by which the launcher has a host move weights (`host`), the launcher's own machine
included, as the launcher sees it."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from pipespec.cluster.host_link.programs import Conversation
from pipespec.cluster.weights.plan import Block
from pipespec.cluster.weights.server import url_of
from pipespec.config.hosts import Host
from pipespec.engine.checkpoint.parts.parts_file import Range
from pipespec.engine.checkpoint.parts.sources import HubSource
from pipespec.errors import ModelError, RankFailed

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
        self._moved = self.wanted = 0

    def refusal(self, sentence: str) -> ModelError:
        return ModelError(sentence if self.host.shares_caches else f"{self.name}: {sentence}")

    def noted(self, **said: Any) -> None:
        """It warns, or has got so many bytes more."""
        if "warning" in said:
            self._on_warning(f"{self.name}: {said['warning']}")
        elif "moved" in said:
            self._moved += said["moved"]
            self._on_progress(self.name, self._moved, self.wanted)

    def add(self, has: Iterable[tuple[str, int, str | None]]) -> None:
        """These blocks are here, with their hashes."""
        self.has.update({(file, number): sha for file, number, sha in has})
        self.lacks -= self.has.keys()

    def urls(self, files: Iterable[str]) -> Mapping[str, str]:
        """Where other hosts read its files; nothing: they cannot."""
        return {} if self.url is None else {each: url_of(self.url, each) for each in files}

    def read(self, file: str, part: Range, size: int) -> bytes:
        """A part of one of its files, read through its process."""
        data = base64.b64decode(self.call("read", file=file, start=part[0], stop=part[1]))
        if len(data) != part[1] - part[0]:
            raise ModelError(f"{self.name}: {file} has changed; start again")
        return data


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
