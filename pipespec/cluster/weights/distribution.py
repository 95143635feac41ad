"""Gives every host of a deployment the weights that its ranks compute, before they start.

The launcher has a process (`host`) on each host, its own machine included. It learns which blocks
of the models' files each has, and moves them in the rounds that `plan` decides. Hosts read from one
another (`server`), and from the hub at URLs that the launcher has resolved. What a host cannot read
itself passes through the launcher.
"""

from __future__ import annotations

import base64
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from hashlib import sha256
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pipespec.cluster.deployment.deployment import Deployment
from pipespec.cluster.deployment.rank_assignment import RankAssignment, WeightsPending
from pipespec.cluster.weights.peer import (
    OnProgress,
    OnWarning,
    Peer,
    PeerSource,
    at_once,
    lock_folders,
)
from pipespec.cluster.weights.plan import HUB, Block, parts_asked, plan_round
from pipespec.cluster.weights.server import url_of
from pipespec.config.hosts import LOCAL, Host
from pipespec.controller.certificate import Certificate
from pipespec.engine.checkpoint.partial_checkpoint import blocks_needed, missing, repository_of
from pipespec.engine.checkpoint.parts.folder import Repository
from pipespec.engine.checkpoint.parts.parts_file import Range, blocks_of, place_of
from pipespec.engine.checkpoint.parts.sources import NUM_CONNECTIONS, HubSource
from pipespec.errors import ModelError, PipespecError, RankFailed
from pipespec.system.network_interfaces import resolve

T = TypeVar("T")
log = logging.getLogger(__name__)

LAUNCHER_NAME = "the launcher"
ENDED_S = 1.0  # within which it is known that it has ended
# Gives the hosts of a deployment the weights that they lack; has an `on_warning`.
Distribute = Callable[..., object]


def shared_models(deployment: Deployment) -> dict[str, Repository]:
    """What other hosts call the models that they can get from here, which lacks no file of them."""
    found = {}
    for kind, info in deployment.models:
        with suppress(ModelError):
            found[kind] = repository_of(info.path)
    return found


def shared_names(deployment: Deployment) -> dict[str, Repository]:
    """The same without their files; none where no host has folders of its own."""
    if deployment.open_to is None and all(host.shares_caches for host in deployment.hosts):
        return {}
    return {kind: replace(each, files={}) for kind, each in shared_models(deployment).items()}


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
    own: dict[str, set[str]] = {}
    with ExitStack() as stack:
        work = _Distribution(deployment, on_warning, over or threading.Event())
        local = [host for host in deployment.hosts if host.shares_caches]
        for host in deployment.hosts:
            needs = parts_asked(deployment, host, work.shared)
            if host.shares_caches:
                for kind, parts in needs.items():
                    own.setdefault(kind, set()).update(parts)
            elif needs and not host.by_hand:
                work.peers.append(stack.enter_context(Peer(host, needs, on_progress)))
        whole = work.at_once(work.prepare)
        paths = {kind: info.path for kind, info in deployment.models}
        asked = {kind for kind, parts in own.items() if missing(paths[kind], parts)}
        if asked or not all(whole):
            asked = asked.union(*(peer.needs for peer in work.peers))
            needs = {kind: own.get(kind, set()) for kind in sorted(asked)}
            here = local[0] if local else Host(LAUNCHER_NAME, "", LOCAL)
            work.peers.append(stack.enter_context(Peer(here, needs, on_progress)))
            work.run(work.peers[-1])
    return replace(deployment, shared=shared_names(deployment), fetched=True)


class WeightMoves:
    """Plans assignments without lost workers, for one thread, and gives their hosts the weights by
    `distribute`. `deployment` is the cluster as it is if no worker is lost."""

    def __init__(self, deployment: Deployment, distribute: Distribute) -> None:
        self.deployment = deployment
        self._distribute = distribute
        self._done: set[str] = set()  # assignments whose hosts have their weights
        self._thread: threading.Thread | None = None

    def use(self, deployment: Deployment) -> None:
        """Plan for another layout from now on: a host has joined or left."""
        self.deployment = deployment
        self._done.clear()

    def plan(self, away: set[str]) -> RankAssignment:
        """The assignment to the workers that are left, once their hosts have their weights. If
        these cannot be moved, the ranks say what is lacking when they load.

        Raises ConfigError if these workers are too few, WeightsPending before their hosts are
        ready: meanwhile the recovery goes on looking after the other hosts, and asks again.
        """
        placement = self.deployment.without(away)
        found = self.deployment.assignment(placement)
        hosts = self.deployment.hosts
        if all(host.shares_caches for host in hosts) or found.encode() in self._done:
            return found
        if self._thread is None or not self._thread.is_alive():
            changed = replace(
                self.deployment,
                fetched=False,
                placement=placement,
                layers=placement.layers,
                hosts=tuple(host for host in hosts if not away.issuperset(host.workers)),
            )
            arguments = changed, found.encode()
            self._thread = threading.Thread(target=self._move, args=arguments, daemon=True)
            self._thread.start()
        raise WeightsPending

    def _move(self, deployment: Deployment, key: str) -> None:
        warn = partial(log.warning, "weights of the new layout: %s")
        try:
            self._distribute(deployment, on_warning=warn)
        except RankFailed:  # the cluster ends
            pass
        except PipespecError as error:
            warn(str(error))
        finally:
            self._done.add(key)


class _Distribution:
    """Moves the weights of a deployment's models to hosts."""

    def __init__(
        self, deployment: Deployment, on_warning: OnWarning, over: threading.Event
    ) -> None:
        self.peers: list[Peer] = []
        self.shared = shared_models(deployment)
        self._paths = {kind: info.path for kind, info in deployment.models}
        on_hub = {kind: of for kind, of in self.shared.items() if of.on_hub}
        self._hubs = {kind: HubSource(of.repo, of.commit) for kind, of in on_hub.items()}
        self._on_warning, self._over = on_warning, over
        self._left_out: set[str] = set()
        self._leaving_out = threading.Lock()
        self._relayed: set[tuple[str, str]] = set()  # hosts that cannot read from a source

    def at_once(self, task: Callable[[Peer], T]) -> list[T]:
        """What a task returns for each host, unless another one fails, or the cluster ends."""
        return at_once(self.peers, task, self._over, self._hubs.values())

    def prepare(self, peer: Peer) -> bool:
        """Have a host find the folders of the models; whether it has all that it needs."""
        whole = []
        for kind, parts in peer.needs.items():
            known = {"path": str(self._paths[kind]), "repository": asdict(self.shared[kind])}
            whole.append(peer.call("prepare", kind=kind, parts=sorted(parts), **known))
        return all(whole)

    def run(self, launcher: Peer) -> None:
        """Fetch for all hosts what they lack."""

        def lock(peer: Peer) -> None:
            if peer is launcher:
                self.prepare(peer)
                lock_folders(self.peers, self._on_warning, pause)

        def pause(seconds: float) -> bool:
            launcher.moved(0)  # another start goes on meanwhile
            return self._over.wait(seconds)

        self.at_once(lock)
        self.peers = [peer for peer in self.peers if peer.needs]
        for peer in self.peers:
            peer.lacks = {each for kind in peer.needs for each in self._blocks(peer, kind)}
        wanted = sorted(set[Block]().union(*(peer.lacks for peer in self.peers)))
        self.at_once(partial(self._offer, wanted=wanted))
        if len(self.peers) > 1 and any(peer.lacks for peer in self.peers):
            self.at_once(partial(self._listen, certificate=Certificate.make()))
        while any(peer.lacks for peer in self.peers):
            plan = plan_round(
                {peer.name: peer.lacks for peer in self.peers},
                {peer.name: peer.has for peer in self.peers if peer.name not in self._left_out},
                self._hubs,
            )
            self.at_once(partial(self._get, plan=plan))
        self.at_once(lambda peer: peer.call("end"))

    def _blocks(self, peer: Peer, kind: str) -> Iterator[Block]:
        """Those with small files, headers, and the tensors that a host needs."""
        found = blocks_needed(self._paths[kind], peer.needs[kind])
        of = {file.name: blocks for file, blocks in found.items()}
        for name, file in self.shared[kind].files.items():
            for number in of.get(name, blocks_of([(0, file.size)])):
                yield kind, name, number

    def _place(self, block: Block) -> Range:
        kind, name, number = block
        return place_of(number, self.shared[kind].files[name].size)

    def _offer(self, peer: Peer, wanted: Sequence[Block]) -> None:
        """Learn what a host has and lacks."""
        found = peer.call("offer", kinds=sorted(peer.needs), blocks=wanted)
        peer.lacks = {each for each in peer.lacks if each[0] not in found["own"]}
        peer.note(found["has"])
        peer.wanted = sum(stop - start for start, stop in map(self._place, peer.lacks))
        if peer.lacks:
            peer.moved(0)

    def _listen(self, peer: Peer, certificate: Certificate) -> None:
        """Let other hosts read from a host, and it from them."""
        address = peer.host.address or None
        with suppress(OSError):  # a host may call itself otherwise
            address = address and resolve(address)
        where = {"address": address, "interface": peer.host.interface}
        try:
            peer.url = peer.call("listen", **where, cert=certificate.cert, key=certificate.key)
        except ModelError as error:
            self._on_warning(
                f"{peer.name} cannot listen at {address} ({error}), so what other hosts get from "
                "it passes through the launcher; correct its address or interface in the hosts "
                "file."
            )

    def _get(self, peer: Peer, plan: Mapping[tuple[str, str, str], Sequence[Block]]) -> None:
        """Have a host get blocks of models from sources. Raises ModelError."""
        peers = {each.name: each for each in self.peers}
        direct: list[dict[str, Any]] = []
        lacked = len(peer.lacks)
        for (to, name, kind), blocks in plan.items():
            if to != peer.name:
                continue
            source, files = peers.get(name), {file for _, file, _ in blocks}
            urls = None if (to, name) in self._relayed else self._urls(peer, kind, source, files)
            if urls is None:
                self._relay(peer, source, blocks)
                continue
            wanted = [(*block[1:], source and source.has[block]) for block in blocks]
            known = {"host": source is not None, "urls": urls, "wanted": wanted}
            direct.append({"kind": kind, "name": name, **known})
        if direct:
            found = peer.call("fetch", sources=direct)
            peer.note(found["has"])
            some = len(peer.lacks) < lacked
            for of, failed in zip(direct, found["failed"], strict=True):
                if failed is not None:
                    self._give_up(peer, peers.get(of["name"]), of["kind"], *failed, some=some)

    def _urls(
        self, peer: Peer, kind: str, source: Peer | None, files: set[str]
    ) -> dict[str, str] | None:
        """Where a host reads files from a source, or the hub; none: with the token, which it has;
        None: nowhere."""
        if source is not None:
            return (source.url and {file: url_of(source.url, kind, file) for file in files}) or None
        if peer.host.shares_caches:
            return {}
        with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
            urls = dict(zip(files, pool.map(self._hubs[kind].signed_url, files), strict=True))
        found = {file: url for file, url in urls.items() if url is not None}
        return found if found == urls else None

    def _relay(self, peer: Peer, source: Peer | None, blocks: Sequence[Block]) -> None:
        """Read blocks for a host that cannot, from another one or the hub."""
        for block in blocks:
            kind, name, number = block
            of = self._hubs[kind] if source is None else PeerSource(source, kind)
            data = of.read(name, self._place(block), self.shared[kind].files[name].size)
            if source and source.has[block] not in (None, sha256(data).hexdigest()):
                self._leave_out(source, peer, kind)
                return
            text = base64.b64encode(data).decode()
            peer.note(peer.call("put", kind=kind, file=name, number=number, data=text))

    def _give_up(
        self, peer: Peer, source: Peer | None, kind: str, error: str, why: str | None, *, some: bool
    ) -> None:
        """A host could not read from a source, but perhaps `some` of what it was to read."""
        if source is None:
            if peer.host.shares_caches:
                raise ModelError(error)
            self._hubs[kind].located.clear()  # its URLs may have expired
            if not some:
                self._relayed.add((peer.name, HUB))
        elif why is None:
            self._leave_out(source, peer, kind)
        elif (ended := source.failure(ENDED_S)) is not None:
            raise ended
        else:
            self._relayed.add((peer.name, source.name))
            self._on_warning(
                f"{peer.name} cannot read weights from {source.name} at "
                f"{urlsplit(source.url or '').hostname} ({why}), so they pass through the "
                "launcher; check the network between them, and let its firewalls admit TCP."
            )

    def _leave_out(self, source: Peer, to: Peer, kind: str) -> None:
        with self._leaving_out:
            known = source.name in self._left_out
            self._left_out.add(source.name)
        if not known:
            self._on_warning(
                f"{source.name} sends wrong bytes of the {kind} (to {to.name}), so it is left out; "
                "check its disk, and remove its folder of that model with `pipespec cache prune` "
                "there."
            )
