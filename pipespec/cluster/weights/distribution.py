"""Gives every host of a deployment the weights that its ranks compute, before they start.

The launcher has a process (`host`) on each host, its own machine included. Of one model after
another it learns which blocks of the files each has, and moves them in the rounds that `plan`
decides. Hosts read from one another (`server`), and from the hub where the launcher has found the
files. What a host cannot read itself passes through the launcher.
"""

from __future__ import annotations

import base64
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pipespec.cluster.deployment.deployment import Deployment
from pipespec.cluster.deployment.rank_assignment import RankAssignment, WeightsPending
from pipespec.cluster.host_link.programs import Conversation
from pipespec.cluster.weights.plan import HUB, Block, Transfers, parts_asked, plan_round
from pipespec.cluster.weights.server import url_of
from pipespec.config.hosts import LOCAL, Host
from pipespec.controller.certificate import Certificate
from pipespec.engine.checkpoint.partial_checkpoint import blocks_needed, missing
from pipespec.engine.checkpoint.parts.folder import Repository
from pipespec.engine.checkpoint.parts.parts_file import Range, blocks_of, place_of
from pipespec.engine.checkpoint.parts.sources import HubSource
from pipespec.errors import ModelError, PipespecError, RankFailed
from pipespec.system.network_interfaces import resolve

T = TypeVar("T")
log = logging.getLogger(__name__)

MODULE = "pipespec.cluster.weights.host"
ENDING_S, ENDED_S = 5.0, 1.0  # that a host's process may take to end, and to show that it has
OVER_S = 0.1  # between looks whether the cluster is over
# Called with a host's name, the bytes that it has got of those it lacked, and how many these are.
OnProgress = Callable[[str, int, int], None]
# Called with a sentence on a host that waits, is left out, or cannot be reached by another one.
OnWarning = Callable[[str], None]
LAUNCHER_NAME = "the launcher"
# Gives the hosts of a deployment the weights that they lack; has an `on_warning`.
Distribute = Callable[..., object]


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
        self.url: str | None = ""  # until it was asked to listen
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
        return {each: url_of(self.url, each) for each in files} if self.url else {}

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


def distribute_weights(
    deployment: Deployment,
    on_progress: OnProgress = lambda host, done, total: None,
    on_warning: OnWarning = lambda sentence: None,
    over: threading.Event | None = None,
) -> Deployment:
    """Fetch what the hosts lack; the deployment, marked so. Hosts that are started by hand fetch
    for themselves. Raises ModelError, HostFailed; RankFailed once the cluster is `over`."""
    if deployment.fetched:
        return deployment
    here = [host for host in deployment.hosts if host.shares_caches]
    launcher = here[0] if here else Host(LAUNCHER_NAME, "", LOCAL)
    peers: dict[str, Peer] = {}
    certificate = cache(Certificate.make)
    with ExitStack() as stack:

        def peer_of(host: Host, parts: set[str]) -> Peer:
            if host.name not in peers:
                peers[host.name] = stack.enter_context(Peer(host, on_progress, on_warning))
            peers[host.name].parts = parts
            return peers[host.name]

        for kind, shared in deployment.shared.items():
            path, own, others = dict(deployment.models)[kind].path, set[str](), list[Peer]()
            for host in deployment.hosts:
                parts = parts_asked(deployment, host, kind, shared)
                if parts is not None and host.shares_caches:
                    own |= parts
                elif parts is not None and not host.by_hand:
                    others.append(peer_of(host, parts))
            more = certificate, on_warning, over or threading.Event()
            model = _Model(kind, path, shared, others, *more)
            if not all(model.at_once(model.prepare)) or missing(path, own):
                model.distribute(peer_of(launcher, own))
    return replace(deployment, fetched=True)


class WeightMoves:
    """Plans assignments without lost workers, for one thread, and gives their hosts the weights by
    `distribute`. `deployment` is the cluster as it is if no worker is lost."""

    def __init__(self, deployment: Deployment, distribute: Distribute) -> None:
        self.distribute = distribute
        self._thread: threading.Thread | None = None
        self.use(deployment)

    def use(self, deployment: Deployment) -> None:
        """Plan for another layout from now on: a host has joined or left."""
        self.deployment = deployment
        self._key = ""  # the assignment whose hosts got their weights last, or do

    def plan(self, away: set[str]) -> RankAssignment:
        """The assignment to the workers that are left, once their hosts have their weights. If
        these cannot be moved, the ranks say what is lacking when they load.

        Raises ConfigError if these workers are too few, WeightsPending before their hosts are
        ready: meanwhile the recovery goes on looking after the other hosts, and asks again.
        """
        placement = self.deployment.without(away)
        found = self.deployment.assignment(placement)
        hosts = self.deployment.hosts
        if all(host.shares_caches for host in hosts):
            return found
        if self._thread is None or not self._thread.is_alive():
            if self._key == found.encode():
                return found
            self._key = found.encode()
            changed = replace(
                self.deployment,
                fetched=False,
                placement=placement,
                layers=placement.layers,
                hosts=tuple(host for host in hosts if not away.issuperset(host.workers)),
            )
            self._thread = threading.Thread(target=self._move, args=(changed,), daemon=True)
            self._thread.start()
        raise WeightsPending

    def _move(self, deployment: Deployment) -> None:
        warn = partial(log.warning, "weights of the new layout: %s")
        try:
            self.distribute(deployment, on_warning=warn)
        except RankFailed:  # the cluster ends
            pass
        except PipespecError as error:
            warn(str(error))


@dataclass
class _Model:
    """Moves the weights of one model to hosts, which call it `shared`, and the launcher `kind`."""

    kind: str
    path: Path
    shared: Repository
    peers: list[Peer]
    certificate: Callable[[], Certificate]
    on_warning: OnWarning
    over: threading.Event

    def __post_init__(self) -> None:
        self._hub = HubSource(self.shared.repo, self.shared.commit) if self.shared.on_hub else None
        self._sources: dict[str, Peer | HubSource] = {HUB: self._hub} if self._hub else {}
        self._left_out: dict[str, str] = {}  # hosts, and who has got wrong bytes from each
        self._relayed: set[tuple[str, str]] = set()  # hosts that cannot read from a source

    def at_once(self, task: Callable[[Peer], T]) -> list[T]:
        """What a task returns for each host, unless another one fails, or the cluster ends."""
        return at_once(self.peers, task, self.over, self._hub)

    def prepare(self, peer: Peer) -> bool:
        """Have a host find the folder of the model; whether it has all that it needs."""
        peer.has = {}
        known = {"repository": asdict(self.shared), "parts": sorted(peer.parts)}
        whole = peer.call("prepare", **known)
        peer.lacks = set() if whole else {*self._blocks(peer)}
        return bool(whole)

    def distribute(self, launcher: Peer) -> None:
        """Fetch for all hosts, and for the launcher's, what they lack."""
        self.prepare(launcher)
        self.peers.append(launcher)
        self._sources |= {peer.name: peer for peer in self.peers}
        wanted = sorted(set[Block]().union(*(peer.lacks for peer in self.peers)))
        self.at_once(partial(self._offer, wanted=wanted))
        if len(self.peers) > 1 and any(peer.lacks for peer in self.peers):
            self.at_once(partial(self._listen, certificate=self.certificate()))
        while any(peer.lacks for peer in self.peers):
            plan = plan_round(
                {peer.name: peer.lacks for peer in self.peers},
                {peer.name: peer.has for peer in self.peers if peer.name not in self._left_out},
                on_hub=self._hub is not None,
            )
            self.at_once(partial(self._get, plan=plan))
        self.at_once(lambda peer: peer.call("end"))

    def _blocks(self, peer: Peer) -> Iterator[Block]:
        """Those with small files, headers, and the tensors that a host needs."""
        needed = blocks_needed(self.path, peer.parts)
        for name, file in self.shared.files.items():
            for number in needed.get(name, blocks_of([(0, file.size)])):
                yield name, number

    def _place(self, block: Block) -> Range:
        return place_of(block[1], self.shared.files[block[0]].size)

    def _offer(self, peer: Peer, wanted: Sequence[Block]) -> None:
        """Learn what a host has and lacks."""
        peer.add(peer.call("offer", blocks=wanted))
        peer.wanted += sum(stop - start for start, stop in map(self._place, peer.lacks))
        if peer.lacks:
            peer.noted(moved=0)

    def _listen(self, peer: Peer, certificate: Certificate) -> None:
        """Let other hosts read from a host, and it from them, for this model and the next ones."""
        if peer.url != "":
            return
        peer.url = None
        address = peer.host.address or None
        with suppress(OSError):  # a host may call itself otherwise
            address = address and resolve(address)
        where = {"address": address, "interface": peer.host.interface}
        try:
            peer.url = peer.call("listen", **where, **asdict(certificate))
        except ModelError as error:
            self.on_warning(
                f"{peer.name} cannot listen at {address} ({error}), so what other hosts get from "
                "it passes through the launcher; correct its address or interface in the hosts "
                "file."
            )

    def _get(self, peer: Peer, plan: Mapping[str, Transfers]) -> None:
        """Have a host get blocks from sources, or read them for it. Raises ModelError."""
        direct: list[dict[str, Any]] = []
        for name, blocks in plan.get(peer.name, {}).items():
            source = self._sources[name]
            hashes = source.has if isinstance(source, Peer) else {}
            wanted = [(*block, hashes.get(block)) for block in blocks]
            relayed = (peer.name, name) in self._relayed
            if urls := {} if relayed else source.urls({file for file, _ in blocks}):
                direct.append({"name": name, "urls": urls, "wanted": wanted})
                continue
            for block, one in zip(blocks, wanted, strict=True):
                data = source.read(block[0], self._place(block), self.shared.files[block[0]].size)
                text = base64.b64encode(data).decode()
                self._fetch(peer, [{"name": name, "data": text, "wanted": [one]}])
        if direct:
            self._fetch(peer, direct)

    def _fetch(self, peer: Peer, sources: Sequence[Mapping[str, Any]]) -> None:
        lacked = len(peer.lacks)
        found = peer.call("fetch", sources=sources)
        peer.add(found["has"])
        for name, why in found["failed"].items():
            source = self._sources[name]
            if isinstance(source, Peer):
                self._give_up(peer, source, why)
            else:
                source.located.clear()  # its URLs may have expired
                if len(peer.lacks) == lacked:
                    self._relayed.add((peer.name, name))

    def _give_up(self, peer: Peer, source: Peer, why: str) -> None:
        """A host could not read from another one, which has perhaps sent wrong bytes."""
        if why:
            if (ended := source.failure(ENDED_S)) is not None:
                raise ended
            self._relayed.add((peer.name, source.name))
            self.on_warning(
                f"{peer.name} cannot read weights from {source.name} at "
                f"{urlsplit(source.url or '').hostname} ({why}), so they pass through the "
                "launcher; check the network between them, and let its firewalls admit TCP."
            )
        elif self._left_out.setdefault(source.name, peer.name) == peer.name:
            self.on_warning(
                f"{source.name} sends wrong bytes of the {self.kind} (to {peer.name}), so it is "
                "left out; check its disk, and remove its folder of that model with `pipespec "
                "cache prune` there."
            )
