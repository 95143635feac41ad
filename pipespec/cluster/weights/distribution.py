"""Gives every host of a deployment the weights that its ranks compute, before they start.

The launcher has a process on each host (`peer`), its own too. It learns which blocks of the models'
files each host has, and decides in rounds who gets what from where (`plan`): small files, headers,
and the tensors of its ranks. Hosts read from one another (`server`), and from the hub at URLs that
the launcher has resolved. What a host cannot read itself passes through the launcher.

The record of a source has the hash of each block. A host that gets other bytes from it drops them,
and the source is left out.
"""

from __future__ import annotations

import base64
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pipespec.cluster.deployment.deployment import Deployment
from pipespec.cluster.weights.local import shares_caches
from pipespec.cluster.weights.peer import (
    Needs,
    OnProgress,
    OnWarning,
    Peer,
    PeerSource,
    at_once,
    lock_folders,
)
from pipespec.cluster.weights.plan import HUB, Block, parts_needed, plan_round
from pipespec.cluster.weights.server import url_of
from pipespec.config.hosts import LOCAL, Host
from pipespec.controller.certificate import Certificate
from pipespec.engine.checkpoint.partial_checkpoint import blocks_needed, missing
from pipespec.engine.checkpoint.parts.fetching import NUM_CONNECTIONS
from pipespec.engine.checkpoint.parts.folder import (
    Repository,
    folder_of_checkpoint,
    read_repository,
)
from pipespec.engine.checkpoint.parts.opening import repository_of
from pipespec.engine.checkpoint.parts.parts_file import blocks_of, place_of
from pipespec.engine.checkpoint.parts.range_source import HubSource
from pipespec.errors import ModelError, RankFailed
from pipespec.system.network_interfaces import resolve

LAUNCHER_NAME = "the launcher"
OVER_S = 0.1  # between looks whether the cluster is over
ENDED_S = 1.0  # within which it is known that a host's process has ended
# Gives the hosts of a deployment the weights that they lack; has an `on_warning`.
Distribute = Callable[..., object]


class SourceModel:
    """A model as the launcher has it.

    Attributes:
        shared: what other hosts call it; None: this host lacks files, so that they cannot get
            theirs from here.
        hub: its commit on the hub; None: it is a folder of a host.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shared: Repository | None = None
        self.hub: HubSource | None = None
        with suppress(ModelError):
            self.shared = of = repository_of(path)
            self.hub = HubSource(of.repo, of.commit) if of.on_hub else None

    @property
    def sizes(self) -> dict[str, int]:
        """Of its files, which other hosts can get."""
        return {} if self.shared is None else {n: e.size for n, e in self.shared.files.items()}

    def blocks(self, parts: set[str]) -> Iterator[tuple[str, int]]:
        """File and number of those with small files, headers, and the tensors of these parts.
        Raises ModelError."""
        of = {file.name: blocks for file, blocks in blocks_needed(self.path, parts).items()}
        for name, size in self.sizes.items():
            for number in of.get(name, blocks_of([(0, size)])):
                yield name, number

    def lacks(self, parts: set[str]) -> bool:
        """Whether some of these parts can be fetched to this machine."""
        own = read_repository(folder_of_checkpoint(self.path))
        return own is not None and bool(missing(self.path, parts))


def shared_names(deployment: Deployment) -> dict[str, Repository]:
    """What other hosts call the models that they can get from here."""
    if deployment.open_to is None and all(map(shares_caches, deployment.hosts)):
        return {}
    found = {kind: SourceModel(info.path).shared for kind, info in deployment.models}
    return {kind: replace(each, files={}) for kind, each in found.items() if each is not None}


def distribute_weights(
    deployment: Deployment,
    on_progress: OnProgress = lambda host, done, total: None,
    on_warning: OnWarning = lambda sentence: None,
    over: threading.Event | None = None,
) -> Deployment:
    """Fetch what the hosts lack; the deployment, marked so. Hosts that are started by hand fetch
    for themselves. It ends with the cluster, which is `over` then.

    Raises ModelError, HostFailed, RankFailed.
    """
    if deployment.fetched:
        return deployment
    if over is not None and over.is_set():
        raise RankFailed("The cluster has ended.")
    models = {kind: SourceModel(info.path) for kind, info in deployment.models}
    needs = {host.name: _needs(deployment, host, models) for host in deployment.hosts}
    far = [each for each in deployment.hosts if not (each.by_hand or shares_caches(each))]
    here = next(filter(shares_caches, deployment.hosts), Host(LAUNCHER_NAME, "", LOCAL))
    with ExitStack() as stack:
        work = _Distribution(models, on_warning)
        if over is not None:
            done = threading.Event()
            stack.callback(done.set)  # the last to be called

            def stop() -> None:
                while not done.wait(OVER_S):
                    if over.is_set():
                        work.stop()
                        return

            threading.Thread(target=stop, daemon=True).start()
        for host in far:
            if needs[host.name]:
                work.add(stack.enter_context(Peer(host, on_progress)), needs[host.name])
        whole = at_once(work.peers, work.prepare)
        own: dict[str, set[str]] = {}
        for host in filter(shares_caches, deployment.hosts):
            for kind, parts in needs[host.name].items():
                own.setdefault(kind, set()).update(parts)
        lacking = {kind for kind, parts in own.items() if models[kind].lacks(parts)}
        if lacking or not all(whole):
            asked = lacking.union(*(peer.needs for peer in work.peers))
            launcher = stack.enter_context(Peer(here, on_progress))
            work.add(launcher, {kind: own.get(kind, set()) for kind in sorted(asked)})
            work.prepare(launcher)
            work.run()
    return replace(deployment, shared=shared_names(deployment), fetched=True)


def _needs(deployment: Deployment, host: Host, models: Mapping[str, SourceModel]) -> Needs:
    """The parts of each model that a host is asked about."""
    needs = dict(parts_needed(deployment, host))
    for kind, model in models.items():
        given, of = getattr(host, kind), model.shared
        if given is not None or of is None:  # the model is there, or cannot be got from here
            needs.pop(kind, None)
        # Every host reads the target's config, and one that has the folder may send it.
        sends = of is not None and of.path is not None and given in (None, of.path)
        if of is not None and (sends or (kind == "target" and given is None)):
            needs.setdefault(kind, set())
    return needs


class _Distribution:
    """Moves the weights of some models to hosts."""

    def __init__(self, models: Mapping[str, SourceModel], on_warning: OnWarning) -> None:
        self.peers: list[Peer] = []
        self._models, self._on_warning = models, on_warning
        self._left_out: set[str] = set()
        self._relayed: set[tuple[str, str]] = set()  # hosts that cannot read from a source
        self._changing, self._failed = threading.Lock(), False

    def add(self, peer: Peer, needs: Needs) -> None:
        """Another host takes part. Raises RankFailed if all of it was stopped."""
        peer.needs = needs
        with self._changing:
            if self._failed:
                raise RankFailed("The cluster has ended.")
            self.peers.append(peer)

    def stop(self) -> None:
        """End what the hosts do; whoever waits for them gets an error."""
        with self._changing:
            self._failed = True
            for model in self._models.values():
                if model.hub is not None:
                    model.hub.stopped.set()
            for peer in self.peers:
                peer.end()

    def prepare(self, peer: Peer) -> bool:
        """Have a host find the folders of the models; whether it has all that it needs."""
        peer.require_version()
        whole = []
        for kind, parts in peer.needs.items():
            model = self._models[kind]
            assert model.shared is not None, "only such models are offered"
            known = {"path": str(model.path), "repository": asdict(model.shared)}
            whole.append(peer.call("prepare", kind=kind, parts=sorted(parts), **known))
        return all(whole)

    def run(self) -> None:
        """Fetch for all hosts what they lack."""
        lock_folders(self.peers, self._on_warning)
        self.peers = [peer for peer in self.peers if peer.needs]
        needs = {
            peer.name: {
                (kind, *block)
                for kind, parts in peer.needs.items()
                for block in self._models[kind].blocks(parts)
            }
            for peer in self.peers
        }
        wanted = set[Block]().union(*needs.values())
        at_once(self.peers, lambda peer: self._offer(peer, needs[peer.name], wanted), self.stop)
        if len(self.peers) > 1 and any(peer.lacks for peer in self.peers):
            certificate = Certificate.make()
            at_once(self.peers, lambda peer: self._listen(peer, certificate), self.stop)
        while any(peer.lacks for peer in self.peers):
            self._round()
        at_once(self.peers, lambda peer: peer.call("end"), self.stop)

    def _offer(self, peer: Peer, needs: set[Block], wanted: set[Block]) -> None:
        """Learn what a host has and lacks."""
        found = peer.call("offer", kinds=sorted(peer.needs), blocks=sorted(wanted))
        peer.lacks = {each for each in needs if each[0] not in found["own"]}
        peer.note(found["has"])
        for kind, name, number in peer.lacks:
            start, stop = place_of(number, self._models[kind].sizes[name])
            peer.wanted += stop - start
        if peer.lacks:
            peer.moved(0)

    def _listen(self, peer: Peer, certificate: Certificate) -> None:
        """Let other hosts read from a host, and it from them."""
        address = peer.host.address or None
        with suppress(OSError):
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

    def _round(self) -> None:
        """Have each host get what others have now, and the hub. Raises ModelError."""
        plan = plan_round(
            {peer.name: peer.lacks for peer in self.peers},
            {peer.name: peer.has for peer in self.peers if peer.name not in self._left_out},
            {kind for kind, model in self._models.items() if model.hub is not None},
        )
        receivers = {to for to, *_ in plan}
        peers = [peer for peer in self.peers if peer.name in receivers]
        at_once(peers, lambda peer: self._get(peer, plan), self.stop)

    def _get(self, peer: Peer, plan: Mapping[tuple[str, str, str], Sequence[Block]]) -> None:
        """Have a host get blocks of models from sources."""
        peers = {each.name: each for each in self.peers}
        direct: list[dict[str, Any]] = []
        lacked = len(peer.lacks)
        for (to, name, kind), blocks in plan.items():
            if to != peer.name:
                continue
            source, wanted = peers.get(name), defaultdict[str, list[tuple[int, str | None]]](list)
            for block in blocks:
                wanted[block[1]].append((block[2], source.has[block] if source else None))
            urls = self._urls(peer, kind, source, [*wanted])
            if urls is None or (to, name) in self._relayed:
                self._relay(peer, source, blocks)
            else:
                known = {"host": source is not None, "urls": urls, "wanted": wanted}
                direct.append({"kind": kind, "name": name, **known})
        found = peer.call("fetch", sources=direct)
        peer.note(found["has"])
        for number, failed in found["failed"].items():
            of, some = direct[int(number)], len(peer.lacks) < lacked
            self._give_up(peer, peers.get(of["name"]), of["kind"], failed, some=some)

    def _urls(
        self, peer: Peer, kind: str, source: Peer | None, files: Sequence[str]
    ) -> dict[str, str] | None:
        """Where a host reads files from a source, or the hub; none: with the token, which is its
        own too; None: it cannot, but the launcher."""
        if source is not None:
            return (source.url and {file: url_of(source.url, kind, file) for file in files}) or None
        if shares_caches(peer.host):
            return {}
        hub = self._models[kind].hub
        assert hub is not None, "as planned"
        with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
            urls = [*pool.map(hub.signed_url, files)]
        found = {file: url for file, url in zip(files, urls, strict=True) if url is not None}
        return found if len(found) == len(files) else None

    def _relay(self, peer: Peer, source: Peer | None, blocks: Sequence[Block]) -> None:
        """Read blocks for a host that cannot, from another one or the hub."""
        for kind, name, number in blocks:
            of = self._models[kind].hub if source is None else PeerSource(source, kind)
            assert of is not None, "as planned"
            data, size = bytearray(), self._models[kind].sizes[name]
            of.read(name, place_of(number, size), size, data.extend)
            hash_known = source and source.has[kind, name, number]
            if source and hash_known not in (None, sha256(data).hexdigest()):
                self._leave_out(source, peer, kind)
                return
            text = base64.b64encode(data).decode()
            peer.note(peer.call("put", kind=kind, file=name, number=number, data=text))

    def _give_up(
        self, peer: Peer, source: Peer | None, kind: str, failed: Mapping[str, Any], *, some: bool
    ) -> None:
        """A host could not read from a source, or could `some`."""
        if source is None:
            hub = self._models[kind].hub
            assert hub is not None, "as planned"
            if shares_caches(peer.host):
                raise ModelError(failed["error"])
            if some:  # its URLs may have expired
                hub.located.clear()
            else:
                self._relayed.add((peer.name, HUB))
        elif failed["why"] is None:
            self._leave_out(source, peer, kind)
        elif (ended := source.failure(ENDED_S)) is not None:
            raise ended
        else:
            self._relayed.add((peer.name, source.name))
            self._on_warning(
                f"{peer.name} cannot read weights from {source.name} at "
                f"{urlsplit(source.url or '').hostname} ({failed['why']}), so they pass through "
                "the launcher; check the network between them, and let its firewalls admit TCP."
            )

    def _leave_out(self, source: Peer, to: Peer, kind: str) -> None:
        with self._changing:
            known = source.name in self._left_out
            self._left_out.add(source.name)
        if not known:
            self._on_warning(
                f"{source.name} sends wrong bytes of the {kind} (to {to.name}), so it is left out; "
                "check its disk, and remove its folder of that model with `pipespec cache prune` "
                "there."
            )
