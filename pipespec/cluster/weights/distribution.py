"""Gives every host of a deployment the weights that its ranks compute, before they start.

The launcher runs a `weight_host` on each host, its own too. It learns which blocks of the weight
files each host needs and has, and decides in rounds who gets what from where (`weight_plan`). Hosts
read from one another (`weight_server`), and from the hub at URLs that the launcher has resolved.
What a host cannot read itself passes through the launcher.

The record of a source has the hash of each block. A host that gets other bytes from it drops them,
and the source is left out.
"""

from __future__ import annotations

import base64
import os
import random
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from pipespec.cluster.deployment.deployment import Deployment
from pipespec.cluster.host_link.running_work import RunningWork
from pipespec.cluster.weights.local import shares_caches
from pipespec.cluster.weights.peer import Needs, OnProgress, Peer, at_once, connected
from pipespec.cluster.weights.plan import HUB, Block, parts_needed, plan_round
from pipespec.cluster.weights.server import url_of
from pipespec.config.hosts import LOCAL, Host, HostsFile
from pipespec.config.schema import Config
from pipespec.controller.certificate import Certificate
from pipespec.engine.checkpoint.fetching import NUM_CONNECTIONS
from pipespec.engine.checkpoint.model_path import can_be_fetched
from pipespec.engine.checkpoint.partial_checkpoint import missing
from pipespec.engine.checkpoint.parts.blueprint import Blueprint, repository_of
from pipespec.engine.checkpoint.parts.folder import (
    Repository,
    folder_of_checkpoint,
    read_repository,
)
from pipespec.engine.checkpoint.parts.parts_file import BLOCK_BYTES
from pipespec.engine.checkpoint.parts.range_source import HubSource
from pipespec.errors import ModelError, RankFailed
from pipespec.system.network_interfaces import resolve
from pipespec.system.validation import home_expanded

LAUNCHER_NAME = "the launcher"
ENDED_S = 1.0  # within which it is known that a host's process has ended
# Seconds between two tries to lock folders, drawn anew each time, so that two starts do not meet
# for good.
PAUSE_S = (0.2, 1.0)
# Called with a sentence on a host that is left out, or cannot be reached by another one.
OnWarning = Callable[[str], None]


class Distribute(Protocol):
    """What gives the hosts of a deployment the weights that they lack."""

    def __call__(self, deployment: Deployment, *, on_warning: OnWarning) -> object: ...


class SourceModel:
    """A model as the launcher has it. `shared`: what other hosts call it; None: this host lacks
    files, so that they cannot get theirs from here."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shared: Repository | None = None
        with suppress(ModelError):
            self.shared = repository_of(path)

    @cached_property
    def hub(self) -> HubSource | None:
        """Its commit on the hub; None: it is a folder of a host."""
        of = self.shared
        return None if of is None or not of.on_hub else HubSource(of.repo, of.commit)

    @cached_property
    def blueprint(self) -> dict[str, Any]:
        """For hosts without its folder, as JSON. Raises ModelError."""
        return Blueprint.of(self.path).as_json()

    def place(self, block: Block) -> tuple[int, int, int]:
        """Where the bytes of a block are, and the size of their file."""
        assert self.shared is not None, "only such models are offered"
        start, size = block[2] * BLOCK_BYTES, self.shared.weights[block[1]].size
        return start, min(start + BLOCK_BYTES, size), size

    def lacks(self, parts: set[str]) -> bool:
        """Whether some of these parts can be fetched to this machine."""
        own = read_repository(folder_of_checkpoint(self.path))
        return own is not None and bool(missing(self.path, parts))


def shared_names(deployment: Deployment) -> dict[str, Repository]:
    """What other hosts call the models that they can get from here."""
    if deployment.open_to is None and all(map(shares_caches, deployment.hosts)):
        return {}
    found = {kind: SourceModel(info.path).shared for kind, info in deployment.models}
    return {kind: replace(each, weights={}) for kind, each in found.items() if each is not None}


def distribute_weights(
    deployment: Deployment,
    on_progress: OnProgress = lambda host, done, total: None,
    on_warning: OnWarning = lambda sentence: None,
    running: RunningWork | None = None,
) -> Deployment:
    """Fetch what the hosts lack; the deployment, marked so. Hosts that are started by hand fetch
    for themselves. `running` may stop it.

    Raises ModelError, HostFailed.
    """
    if deployment.fetched:
        return deployment
    models = {kind: SourceModel(info.path) for kind, info in deployment.models}
    needs = {host.name: _needs(deployment, host, models) for host in deployment.hosts}
    far = [each for each in deployment.hosts if not (each.by_hand or shares_caches(each))]
    here = next(filter(shares_caches, deployment.hosts), Host(LAUNCHER_NAME, "", LOCAL))
    with ExitStack() as stack:
        work = _Distribution(models, on_warning)
        if running is not None:
            stack.enter_context(running.holding(work))
        for host in far:
            if needs[host.name]:
                work.add(stack.enter_context(connected(host, on_progress)), needs[host.name])
        whole = at_once(work.peers, work.prepare)
        own: dict[str, set[str]] = {}
        for host in filter(shares_caches, deployment.hosts):
            for kind, parts in needs[host.name].items():
                own.setdefault(kind, set()).update(parts)
        lacking = {kind for kind, parts in own.items() if models[kind].lacks(parts)}
        if lacking or not all(whole):
            asked = lacking.union(*(peer.needs for peer in work.peers))
            launcher = stack.enter_context(connected(here, on_progress))
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
            known = {"path": str(model.path), "repository": model.shared.as_json()}
            whole.append(peer.call("prepare", kind=kind, parts=sorted(parts), **known))
        return all(whole)

    def run(self) -> None:
        """Fetch for all hosts what they lack."""
        lock_folders(self.peers, self._on_warning)
        peers = [peer for peer in self.peers if peer.needs]
        at_once(peers, self._offer, self.stop)
        if len(peers) > 1 and any(peer.lacks for peer in peers):
            certificate = Certificate.make()
            at_once(peers, lambda peer: self._listen(peer, certificate), self.stop)
        while any(peer.lacks for peer in peers):
            self._round({peer.name: peer for peer in peers})
        at_once(peers, lambda peer: peer.call("end"), self.stop)

    def _offer(self, peer: Peer) -> None:
        """Learn what a host has and lacks of the models."""
        for kind, parts in peer.needs.items():
            blueprint = self._models[kind].blueprint
            found = peer.call("offer", kind=kind, blueprint=blueprint, parts=sorted(parts))
            peer.lacks |= {(kind, file, each) for file, of in found["lacks"].items() for each in of}
            peer.note(kind, found["records"])
        for block in peer.lacks:
            start, stop, _ = self._models[block[0]].place(block)
            peer.wanted += stop - start
        if peer.lacks:
            peer.moved(0)

    def _listen(self, peer: Peer, certificate: Certificate) -> None:
        """Let other hosts read from a host, and it from them."""
        address = peer.host.address or None
        with suppress(OSError):
            address = address and resolve(address)
        pem = {"cert": certificate.cert, "key": certificate.key}
        try:
            where = {"address": address, "interface": peer.host.interface}
            peer.url = peer.call("listen", **where, **pem)
        except ModelError as error:
            self._on_warning(
                f"{peer.name} cannot listen at {address} ({error}), so what other hosts get from "
                "it passes through the launcher; correct its address or interface in the hosts "
                "file."
            )

    def _round(self, peers: Mapping[str, Peer]) -> None:
        """Have each host get what others have now, and the hub. Raises ModelError."""
        lacks = {name: peer.lacks for name, peer in peers.items() if peer.lacks}
        wanted = set[Block]().union(*lacks.values())
        senders = [peer for peer in peers.values() if peer.name not in self._left_out]
        holders = {peer.name: [*filter(peer.has, wanted)] for peer in senders}
        on_hub = {kind for kind, model in self._models.items() if model.hub is not None}
        plan: defaultdict[str, dict[tuple[str, str], list[Block]]] = defaultdict(dict)
        for (to, source), blocks in plan_round(lacks, holders, on_hub).items():
            for block in blocks:
                plan[to].setdefault((block[0], source), []).append(block)
        at_once(
            [peers[name] for name in plan],
            lambda peer: self._get(peer, plan[peer.name], peers),
            self.stop,
        )

    def _get(
        self,
        peer: Peer,
        transfers: Mapping[tuple[str, str], Sequence[Block]],
        peers: Mapping[str, Peer],
    ) -> None:
        """Have a host get blocks of models from sources."""
        direct, lacked = defaultdict(list), len(peer.lacks)
        for (kind, name), blocks in transfers.items():
            source = peers.get(name)
            urls = self._urls(peer, kind, source, {file for _, file, _ in blocks})
            if urls is None or (peer.name, name) in self._relayed:
                self._relay(peer, source, blocks)
                continue
            wanted = defaultdict(list)
            for block in blocks:
                wanted[block[1]].append((block[2], source and source.hash_of(block)))
            host = source is not None
            direct[kind].append({"name": name, "urls": urls, "host": host, "wanted": wanted})
        for kind in {kind for kind, _ in transfers}:
            found = peer.call("fetch", kind=kind, sources=direct[kind])
            peer.note(kind, found["records"])
            for name, failed in found["failed"].items():
                self._give_up(peer, peers.get(name), kind, failed, some=len(peer.lacks) < lacked)

    def _urls(
        self, peer: Peer, kind: str, source: Peer | None, files: set[str]
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
            signed = zip(files, pool.map(hub.signed_url, files), strict=True)
            found = {file: url for file, url in signed if url is not None}
        return found if len(found) == len(files) else None

    def _relay(self, peer: Peer, source: Peer | None, blocks: Sequence[Block]) -> None:
        """Read blocks for a host that cannot, from another one or the hub."""
        for block in blocks:
            kind, file, number = block
            model = self._models[kind]
            start, stop, size = model.place(block)
            if source is not None:
                told = source.call("read", kind=kind, file=file, start=start, stop=stop)
                data = base64.b64decode(told)
                if source.hash_of(block) not in (None, sha256(data).hexdigest()):
                    self._leave_out(source, peer, kind)
                    return
            else:
                assert model.hub is not None, "as planned"
                data = b"".join(model.hub.read(file, (start, stop), size))
            text = base64.b64encode(data).decode()
            peer.call("put", kind=kind, file=file, number=number, data=text)

    def _give_up(
        self, peer: Peer, source: Peer | None, kind: str, failed: Mapping[str, Any], *, some: bool
    ) -> None:
        """A host could not read from a source, or could `some`."""
        if source is None:
            if shares_caches(peer.host):
                raise ModelError(failed["error"])
            hub = self._models[kind].hub
            if some and hub is not None:  # its URLs may have expired
                hub.located.clear()
            else:
                self._relayed.add((peer.name, HUB))
            return
        if failed["why"] is None:
            self._leave_out(source, peer, kind)
            return
        if (ended := source.failure(ENDED_S)) is not None:
            raise ended
        self._relayed.add((peer.name, source.name))
        why, reached = failed["why"]
        at = "" if source.url is None else f" at {urlsplit(source.url).hostname}"
        firewall = "let the firewall admit TCP between the hosts"
        self._on_warning(
            f"{peer.name} cannot read weights from {source.name}{at} ({why}), so they pass through "
            f"the launcher; {'look at the network between them' if reached else firewall}."
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


def find_on_hosts(config: Config, hosts_file: HostsFile) -> dict[str, Path]:
    """Checkpoints without their tensors, in the parts cache here, of the models that another host
    has whole at the path that the settings or its entry name, by their names in `model.`.

    Models that are here or on the hub, or that no host has, are left out. Raises HostFailed if a
    host cannot be asked; ModelError if no host has all files of one.
    """
    needed = {
        "target": config.model.target,
        "draft": config.model.draft if config.proposer.needs_draft else None,
        "mid": config.model.mid if config.proposer.needs_mid else None,
    }
    absent = {
        kind: path
        for kind, path in needed.items()
        if path and not os.path.lexists(home_expanded(path)) and not can_be_fetched(path)
    }
    others = [host for host in hosts_file.hosts if not (host.by_hand or shares_caches(host))]
    if not absent or not others:
        return {}

    errors: dict[str, ModelError] = {}

    def describe(peer: Peer) -> dict[str, Blueprint]:
        peer.require_version()
        plans = {}
        for kind, path in absent.items():
            try:
                if (
                    told := peer.call("describe", path=getattr(peer.host, kind) or path)
                ) is not None:
                    plans[kind] = Blueprint.of_other_host(told, peer.name)
            except ModelError as error:
                errors.setdefault(kind, error)
        return plans

    with ExitStack() as stack:
        answers = at_once([stack.enter_context(connected(host)) for host in others], describe)
    plans = {kind: plan for each in reversed(answers) for kind, plan in each.items()}
    for kind in errors.keys() - plans.keys():
        raise errors[kind]
    return {kind: plan.build() for kind, plan in plans.items()}
