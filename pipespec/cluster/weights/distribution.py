"""Gives every host of a deployment the weights that its ranks compute, before they start.

The launcher has a process (`host`) on each host, its own machine included. It learns which blocks
of the models' files each has, and moves them in the rounds that `plan` decides. Hosts read from one
another (`server`), and from the hub where the launcher has found the files. What a host cannot read
itself passes through the launcher.
"""

from __future__ import annotations

import base64
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pipespec.cluster.deployment.deployment import Deployment
from pipespec.cluster.deployment.rank_assignment import RankAssignment, WeightsPending
from pipespec.cluster.weights.peer import OnProgress, OnWarning, Peer, at_once
from pipespec.cluster.weights.plan import HUB, Block, Needs, Transfers, parts_asked, plan_round
from pipespec.cluster.weights.server import url_of
from pipespec.config.hosts import LOCAL, Host
from pipespec.controller.certificate import Certificate
from pipespec.engine.checkpoint.partial_checkpoint import blocks_needed, missing, repository_of
from pipespec.engine.checkpoint.parts.folder import Repository
from pipespec.engine.checkpoint.parts.parts_file import Range, blocks_of, place_of
from pipespec.engine.checkpoint.parts.sources import HubSource
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
    with ExitStack() as stack:
        work = _Distribution(deployment, on_warning, over or threading.Event())

        def add(host: Host, needs: Needs) -> None:
            peer = Peer(host, needs, on_progress, on_warning)
            work.peers.append(stack.enter_context(peer))

        here, own = list[Host](), {kind: set[str]() for kind in work.shared}
        for host in deployment.hosts:
            needs = parts_asked(deployment, host, work.shared)
            if host.shares_caches:
                here.append(host)
                for kind, parts in needs.items():
                    own[kind] |= parts
            elif needs and not host.by_hand:
                add(host, needs)
        whole = work.at_once(work.prepare)
        if not all(whole) or any(missing(work.paths[kind], own[kind]) for kind in own):
            add(here[0] if here else Host(LAUNCHER_NAME, "", LOCAL), own)
            work.run()
    return replace(deployment, shared=shared_names(deployment), fetched=True)


class WeightMoves:
    """Plans assignments without lost workers, for one thread, and gives their hosts the weights by
    `distribute`. `deployment` is the cluster as it is if no worker is lost."""

    def __init__(self, deployment: Deployment, distribute: Distribute) -> None:
        self._distribute = distribute
        self._thread: threading.Thread | None = None
        self.use(deployment)

    def use(self, deployment: Deployment) -> None:
        """Plan for another layout from now on: a host has joined or left."""
        self.deployment = deployment
        self._done = set[str]()  # assignments whose hosts have their weights

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
            arguments = changed, found.encode(), self._done
            self._thread = threading.Thread(target=self._move, args=arguments, daemon=True)
            self._thread.start()
        raise WeightsPending

    def _move(self, deployment: Deployment, key: str, done: set[str]) -> None:
        warn = partial(log.warning, "weights of the new layout: %s")
        try:
            self._distribute(deployment, on_warning=warn)
        except RankFailed:  # the cluster ends
            pass
        except PipespecError as error:
            warn(str(error))
        finally:
            done.add(key)


class _Distribution:
    """Moves the weights of a deployment's models to hosts, of which the launcher's is the last."""

    def __init__(
        self, deployment: Deployment, on_warning: OnWarning, over: threading.Event
    ) -> None:
        self.peers: list[Peer] = []
        self.shared = shared_models(deployment)
        self.paths = {kind: info.path for kind, info in deployment.models}
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
            known = {"path": str(self.paths[kind]), "repository": asdict(self.shared[kind])}
            whole.append(peer.call("prepare", kind=kind, parts=sorted(parts), **known))
        return all(whole)

    def run(self) -> None:
        """Fetch for all hosts what they lack."""
        at_once(self.peers[-1:], self.prepare, self._over)
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
        found = blocks_needed(self.paths[kind], peer.needs[kind])
        of = {file.name: blocks for file, blocks in found.items()}
        for name, file in self.shared[kind].files.items():
            for number in of.get(name, blocks_of([(0, file.size)])):
                yield kind, name, number

    def _place(self, block: Block) -> Range:
        kind, name, number = block
        return place_of(number, self.shared[kind].files[name].size)

    def _offer(self, peer: Peer, wanted: Sequence[Block]) -> None:
        """Learn what a host has and lacks."""
        found = peer.call("offer", blocks=wanted)
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

    def _get(self, peer: Peer, plan: Mapping[str, Transfers]) -> None:
        """Have a host get blocks of models from sources, or read them for it. Raises ModelError."""
        peers = {each.name: each for each in self.peers}
        direct: list[dict[str, Any]] = []
        for (name, kind), blocks in plan.get(peer.name, {}).items():
            source = peers.get(name)
            wanted = [(*block[1:], source and source.has[block]) for block in blocks]
            known = {"kind": kind, "name": name, "host": source is not None}
            places = self._places(peer, kind, source, {file for _, file, _ in blocks})
            if places is not None:
                direct.append({**known, "places": places, "wanted": wanted})
                continue
            of = self._hubs[kind] if source is None else source.source(kind)
            for block, one in zip(blocks, wanted, strict=True):
                data = of.read(block[1], self._place(block), self.shared[kind].files[block[1]].size)
                text = base64.b64encode(data).decode()
                self._fetch(peer, peers, [{**known, "data": text, "wanted": [one]}])
        if direct:
            self._fetch(peer, peers, direct)

    def _places(
        self, peer: Peer, kind: str, source: Peer | None, files: set[str]
    ) -> Mapping[str, Any] | None:
        """Where a host reads files from a source, or the hub; None: it cannot."""
        if (peer.name, HUB if source is None else source.name) in self._relayed:
            return None
        if source is None:
            return self._hubs[kind].places(files, with_token=peer.host.shares_caches)
        return (source.url and {e: (url_of(source.url, kind, e), {}) for e in files}) or None

    def _fetch(
        self, peer: Peer, peers: Mapping[str, Peer], sources: Sequence[Mapping[str, Any]]
    ) -> None:
        lacked = len(peer.lacks)
        found = peer.call("fetch", sources=sources)
        peer.note(found["has"])
        for of, why in zip(sources, found["failed"], strict=True):
            if why is not None and (source := peers.get(of["name"])) is not None:
                self._give_up(peer, source, of["kind"], why)
            elif why is not None:
                self._hubs[of["kind"]].located.clear()  # its URLs may have expired
                if len(peer.lacks) == lacked:
                    self._relayed.add((peer.name, HUB))

    def _give_up(self, peer: Peer, source: Peer, kind: str, why: str) -> None:
        """A host could not read from another one, which has perhaps sent wrong bytes."""
        if why:
            if (ended := source.failure(ENDED_S)) is not None:
                raise ended
            self._relayed.add((peer.name, source.name))
            self._on_warning(
                f"{peer.name} cannot read weights from {source.name} at "
                f"{urlsplit(source.url or '').hostname} ({why}), so they pass through the "
                "launcher; check the network between them, and let its firewalls admit TCP."
            )
            return
        with self._leaving_out:
            known = source.name in self._left_out
            self._left_out.add(source.name)
        if not known:
            self._on_warning(
                f"{source.name} sends wrong bytes of the {kind} (to {peer.name}), so it is left "
                "out; check its disk, and remove its folder of that model with `pipespec cache "
                "prune` there."
            )
