"""Gives every host of a deployment the weights that its ranks compute, before they start.

The launcher, one of the hosts itself, runs a `weight_host` on each of the others. It learns which
blocks of the weight files each host needs and has, and decides in rounds who gets what from where
(`weight_plan`). Hosts read from one another (`weight_server`), and from the hub at URLs that the
launcher has resolved. What a host cannot read itself passes through the launcher.

A source's record has the hash of each block. A host that gets other bytes from it drops them, and
the source is left out.
"""

from __future__ import annotations

import base64
import os
import random
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from pipespec.cluster.deployment import Deployment
from pipespec.cluster.host_weights import shares_caches
from pipespec.cluster.running_work import RunningWork
from pipespec.cluster.weight_host import url_of
from pipespec.cluster.weight_peer import (
    LocalPeer,
    OnProgress,
    Peer,
    at_once,
    connected,
    on_this_machine,
)
from pipespec.cluster.weight_plan import HUB, Block, parts_needed, plan_round
from pipespec.config.hosts import Host, HostsFile
from pipespec.config.schema import Config
from pipespec.controller.certificate import Certificate
from pipespec.engine.checkpoint.model_path import can_be_fetched
from pipespec.engine.checkpoint.partial_checkpoint import missing
from pipespec.engine.checkpoint.parts.blueprint import Blueprint, repository_of
from pipespec.engine.checkpoint.parts.folder import (
    Repository,
    StoredFile,
    folder_of_checkpoint,
    read_repository,
)
from pipespec.engine.checkpoint.parts.parts_file import BLOCK_BYTES
from pipespec.engine.checkpoint.parts.range_source import HubSource
from pipespec.errors import ModelError, RankFailed
from pipespec.system.validation import home_expanded

LAUNCHER_NAME = "the launcher"
# Seconds between two tries to lock folders, drawn anew each time, so that two starts do not meet
# for good.
PAUSE_S = (0.2, 1.0)
# Seconds within which it is known of a host that cannot be read from that its process has ended.
ENDED_S = 1.0
# Called with a sentence on a host that is left out, or cannot be reached by another one.
OnWarning = Callable[[str], None]
# The parts that a host needs of each model.
Needs = Mapping[str, set[str]]


class Distribute(Protocol):
    """What gives the hosts of a deployment the weights that they lack."""

    def __call__(self, deployment: Deployment, *, on_warning: OnWarning) -> object: ...


class SourceModel:
    """A model as the launcher has it.

    Attributes:
        shared: what other hosts call it; None: this host lacks files, so that they cannot get
            theirs from here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def shared(self) -> Repository | None:
        try:
            return repository_of(self.path)
        except ModelError:
            return None

    @property
    def files(self) -> Mapping[str, StoredFile]:
        """Its weight files. Raises ModelError if it cannot be shared."""
        return self.shared.weights if self.shared is not None else {}

    @cached_property
    def hub(self) -> HubSource | None:
        """Its commit on the hub; None: it is a folder of a host."""
        of = self.shared
        return None if of is None or not of.on_hub else HubSource(of.repo, of.commit)

    @cached_property
    def blueprint(self) -> dict[str, Any]:
        """For hosts without its folder, as JSON. Raises ModelError."""
        return Blueprint.of(self.path).as_json()


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
    own: dict[str, set[str]] = {}
    far: list[tuple[Host, Needs]] = []
    here: Host | None = None
    for host in deployment.hosts:
        needs = _needs(deployment, host, models)
        if shares_caches(host):
            here = host
            for kind, parts in needs.items():
                own.setdefault(kind, set()).update(parts)
        elif not host.by_hand and needs:
            far.append((host, needs))
    with ExitStack() as stack:
        work = _Distribution(models, on_warning)
        if running is not None:
            stack.enter_context(running.holding(work))
        name = LAUNCHER_NAME if here is None else here.name
        work.add(stack.enter_context(on_this_machine(name, here, on_progress)), own)
        for host, needs in far:
            work.add(stack.enter_context(connected(host, on_progress)), needs)
        work.run()
    return replace(deployment, shared=shared_names(deployment), fetched=True)


def _needs(deployment: Deployment, host: Host, models: Mapping[str, SourceModel]) -> Needs:
    """The parts of each model that a host is asked about."""
    needs = dict(parts_needed(deployment, host))
    for kind, model in models.items():
        given, of = getattr(host, kind), model.shared
        if given is not None or of is None:  # the model is there, or none can be got
            needs.pop(kind, None)
        # Every host reads the target's config, and one that has the folder may send it.
        if of is not None and (
            (kind == "target" and given is None)
            or (of.path is not None and given in (None, of.path))
        ):
            needs.setdefault(kind, set())
    return needs


def lock_folders(
    asked: Sequence[tuple[Peer, Needs]],
    on_warning: OnWarning,
    pause: Callable[[float], object] = time.sleep,
) -> dict[str, dict[str, set[str]]]:
    """Be the only start that fetches into the folders of these models, by host; the parts of each
    model that a host fetches into its own, also for hosts that share it. A sentence says what is
    waited for. Raises ModelError, HostFailed.

    Two starts may have folders in common, under different names of hosts and in any order. So a
    start that holds some locks waits for no other one: it gives them back, and tries again later.
    """
    run, warned = secrets.token_hex(8), False
    while True:
        owned: dict[str, dict[str, set[str]]] = {}
        taken = None
        for peer, kind, parts in [(peer, *each) for peer, of in asked for each in of.items()]:
            found = peer.call("lock", kind=kind, run=run, host=peer.name)
            if found["owner"] is None:
                taken = f"{peer.name}: {found['holder']}"
                break
            owned.setdefault(found["owner"], {}).setdefault(kind, set()).update(parts)
        if taken is None:
            return owned
        for peer, _ in asked:
            peer.call("unlock")
        if not warned:
            on_warning(f"{taken}; waiting until it has ended.")
            warned = True
        pause(random.uniform(*PAUSE_S))


class _Distribution:
    """Moves the weights of some models to hosts."""

    def __init__(self, models: Mapping[str, SourceModel], on_warning: OnWarning) -> None:
        self._models, self._on_warning = models, on_warning
        self._asked: list[tuple[Peer, Needs]] = []  # the launcher's own machine is the first
        self._left_out: set[str] = set()
        self._relayed: set[tuple[str, str]] = set()  # hosts that cannot read from a source
        self._stopping, self._failed = threading.Lock(), False

    def add(self, peer: Peer, needs: Needs) -> None:
        """Another host takes part. Raises RankFailed if all of it was stopped."""
        with self._stopping:
            if self._failed:
                raise RankFailed("The cluster has ended.")
            self._asked.append((peer, needs))

    def stop(self) -> None:
        """End what the hosts do; whoever waits for them gets an error."""
        with self._stopping:
            self._failed = True
            for model in self._models.values():
                if model.hub is not None:
                    model.hub.stopped.set()
            for peer, _ in self._asked:
                peer.end()

    def run(self) -> None:
        """Fetch for all hosts what they lack."""
        far, needs = [peer for peer, _ in self._asked[1:]], {p.name: n for p, n in self._asked}
        launcher, own = self._asked[0]
        at_once(far, lambda peer: peer.require_version())
        whole = at_once(far, lambda peer: self._prepare(peer, needs[peer.name]))
        kinds = {
            kind
            for kind, parts in own.items()
            if read_repository(folder_of_checkpoint(self._models[kind].path)) is not None
            and missing(self._models[kind].path, parts)
        }
        if not kinds and all(whole):
            return
        kinds |= {kind for _, of in self._asked[1:] for kind in of}
        self._asked[0] = launcher, {kind: own.get(kind, set()) for kind in sorted(kinds)}
        self._prepare(*self._asked[0])
        owned = lock_folders(self._asked, self._on_warning)
        peers = {peer.name: peer for peer, _ in self._asked if peer.name in owned}
        at_once([*peers.values()], lambda peer: self._offer(peer, owned[peer.name]))
        if len(peers) > 1 and any(peer.lacks for peer in peers.values()):
            certificate = Certificate.make()
            at_once([*peers.values()], lambda peer: self._listen(peer, certificate))
        while any(peer.lacks for peer in peers.values()):
            self._round(peers)
        at_once([*peers.values()], lambda peer: self._end(peer, owned[peer.name]))

    def _prepare(self, peer: Peer, needs: Needs) -> bool:
        """Have a host find the folders of the models; whether it has all that it needs."""
        whole = True
        for kind, parts in needs.items():
            model = self._models[kind]
            assert model.shared is not None, "only such models are offered"
            known = {"path": str(model.path), "repository": model.shared.as_json()}
            whole &= peer.call("prepare", kind=kind, parts=sorted(parts), **known)
        return whole

    def _offer(self, peer: Peer, needs: Needs) -> None:
        """Learn what a host has and lacks of the models."""
        for kind, parts in needs.items():
            blueprint = self._models[kind].blueprint
            found = peer.call("offer", kind=kind, blueprint=blueprint, parts=sorted(parts))
            peer.lacks |= {
                (kind, file, number) for file, some in found["lacks"].items() for number in some
            }
            peer.note(kind, found["records"])
        for kind, file, number in peer.lacks:
            size = self._models[kind].files[file].size
            peer.wanted += min(BLOCK_BYTES, size - BLOCK_BYTES * number)
        if peer.lacks:
            peer.on_moved(0)

    def _listen(self, peer: Peer, certificate: Certificate) -> None:
        try:
            peer.listen(certificate)
        except ModelError as error:
            assert peer.host is not None
            self._on_warning(
                f"{peer.name} cannot listen at {peer.host.address} ({error}), so what other hosts "
                "get from it passes through the launcher; correct its address or interface in the "
                "hosts file."
            )

    def _round(self, peers: Mapping[str, Peer]) -> None:
        """Have each host get what others have now, and the hub. Raises ModelError."""
        senders = [peer for peer in peers.values() if peer.name not in self._left_out]
        lacks = {peer.name: peer.lacks for peer in peers.values() if peer.lacks}
        wanted = set[Block]().union(*lacks.values())
        holders = {peer.name: [*filter(peer.has, wanted)] for peer in senders}
        on_hub = {kind for kind, model in self._models.items() if model.hub is not None}
        transfers: defaultdict[str, dict[tuple[str, str], list[Block]]] = defaultdict(dict)
        for (to, source), blocks in plan_round(lacks, holders, on_hub).items():
            for kind in {kind for kind, *_ in blocks}:
                transfers[to][kind, source] = [each for each in blocks if each[0] == kind]
        at_once(
            [peers[name] for name in transfers],
            lambda peer: self._get(peer, transfers[peer.name], peers),
        )

    def _get(
        self,
        peer: Peer,
        transfers: Mapping[tuple[str, str], Sequence[Block]],
        peers: Mapping[str, Peer],
    ) -> None:
        """Have a host get blocks of models from sources."""
        for kind in {kind for kind, _ in transfers}:
            direct = []
            for name in [name for of, name in transfers if of == kind]:
                blocks, source = transfers[kind, name], peers.get(name)
                urls = self._urls(peer, kind, source, {file for _, file, _ in blocks})
                if urls is None or (peer.name, name) in self._relayed:
                    self._relay(peer, source, blocks)
                    continue
                wanted = defaultdict(list)
                for block in blocks:
                    wanted[block[1]].append((block[2], source and source.hash_of(block)))
                direct.append({"name": name, "urls": urls, "host": name != HUB, "wanted": wanted})
            before = len(peer.lacks)
            found = peer.call("fetch", kind=kind, sources=direct)
            peer.note(kind, found["records"])
            for name, why in found["failed"].items():
                if (source := peers.get(name)) is None:
                    self._hub_failed(peer, why, progress=len(peer.lacks) < before)
                elif why["wrong"]:
                    self._leave_out(source, peer, kind)
                else:
                    self._cannot_reach(peer, source, why)

    def _urls(
        self, peer: Peer, kind: str, source: Peer | None, files: set[str]
    ) -> dict[str, str] | None:
        """Where a host reads files from a source, or the hub; none: with the token, as this process
        has it; None: it cannot, but the launcher."""
        if source is not None:
            return (source.url and {file: url_of(source.url, kind, file) for file in files}) or None
        if isinstance(peer, LocalPeer):
            return {}
        hub = self._models[kind].hub
        assert hub is not None, "as planned"
        signed = {file: hub.signed_url(file) for file in files}
        found = {file: url for file, url in signed.items() if url is not None}
        return found if len(found) == len(files) else None

    def _relay(self, peer: Peer, source: Peer | None, blocks: Sequence[Block]) -> None:
        """Read blocks for a host that cannot, from another one or the hub."""
        for kind, file, number in blocks:
            model = self._models[kind]
            start, size = number * BLOCK_BYTES, model.files[file].size
            part = start, min(start + BLOCK_BYTES, size)
            if source is None:
                assert model.hub is not None, "as planned"
                data = b"".join(model.hub.read(file, part, size))
            else:
                told = source.call("read", kind=kind, file=file, start=part[0], stop=part[1])
                data = base64.b64decode(told)
                if source.hash_of((kind, file, number)) not in (None, sha256(data).hexdigest()):
                    self._leave_out(source, peer, kind)
                    return
            peer.call(
                "put", kind=kind, file=file, number=number, data=base64.b64encode(data).decode()
            )

    def _hub_failed(self, peer: Peer, why: Mapping[str, Any], *, progress: bool) -> None:
        """A host could not read from the hub. It gets a new URL where one has expired."""
        if isinstance(peer, LocalPeer):
            raise ModelError(why["error"])
        if not progress:
            self._relayed.add((peer.name, HUB))

    def _leave_out(self, source: Peer, to: Peer, kind: str) -> None:
        with self._stopping:
            known = source.name in self._left_out
            self._left_out.add(source.name)
        if not known:
            self._on_warning(
                f"{source.name} sends wrong bytes of the {kind} (to {to.name}), so it is left out; "
                "check its disk, and remove its folder of that model with `pipespec cache prune` "
                "there."
            )

    def _cannot_reach(self, peer: Peer, source: Peer, why: Mapping[str, Any]) -> None:
        if (failure := source.failure(ENDED_S)) is not None:
            raise failure
        self._relayed.add((peer.name, source.name))
        at = "" if source.url is None else f" at {urlsplit(source.url).hostname}"
        advice = (
            "look at the network between them"
            if why["reached"]
            else "let the firewall admit TCP between the hosts"
        )
        self._on_warning(
            f"{peer.name} cannot read weights from {source.name}{at} ({why['why']}), so they pass "
            f"through the launcher; {advice}."
        )

    def _end(self, peer: Peer, kinds: Collection[str]) -> None:
        for kind in kinds:
            peer.call("check", kind=kind)
        peer.call("unlock")


def find_on_hosts(config: Config, hosts_file: HostsFile) -> dict[str, Path]:
    """Checkpoints without their tensors, in the parts cache here, of the models that another host
    has whole at the path that the settings or its entry name, by their names in `model.`.

    Models that are here or on the hub, or that no host has, are left out. Raises HostFailed if a
    host cannot be asked; ModelError if no host has all files of one.
    """
    needed = {
        "target": config.model.target,
        "draft": config.model.draft if config.proposer.needs_draft else None,
        "mid": config.model.mid if config.needs_mid else None,
    }
    absent = {
        kind: path
        for kind, path in needed.items()
        if path and not os.path.lexists(home_expanded(path)) and not can_be_fetched(path)
    }
    others = [host for host in hosts_file.hosts if not (host.by_hand or shares_caches(host))]
    if not absent or not others:
        return {}

    def describe(peer: Peer) -> dict[str, Blueprint | ModelError | None]:
        peer.require_version()
        return {kind: _description(peer, kind, path) for kind, path in absent.items()}

    with ExitStack() as stack:
        answers = at_once([stack.enter_context(connected(host)) for host in others], describe)
    found = {}
    for kind in absent:
        told = [each[kind] for each in answers if each[kind] is not None]
        plan = next((each for each in told if isinstance(each, Blueprint)), None)
        if plan is not None:
            found[kind] = plan.build()
        elif told:
            raise next(each for each in told if isinstance(each, ModelError))
    return found


def _description(peer: Peer, kind: str, path: str) -> Blueprint | ModelError | None:
    """The blueprint of a model on a host; None: it is not there; or why it is of no use."""
    try:
        told = peer.call("describe", path=getattr(peer.host, kind) or path)
    except ModelError as error:
        return error
    try:
        return None if told is None else Blueprint.of_other_host(told)
    except ModelError as error:
        return ModelError(f"{peer.name}: {error}")
