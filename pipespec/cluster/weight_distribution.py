"""Gives every host of a deployment the weights that its ranks compute, before they start.

    launcher ─┬─ weight_host on beta  ─┐
              │                        ├─ each reads from the hub and from the others
              └─ weight_host on gamma ─┘

The launcher, one of the hosts itself, learns which pieces of the weight files (`parts_file`) each
host needs and has, decides who gets what from where (`weight_plan`), and names the sources'
addresses. Bytes go from host to host (`weight_links`), or from the hub, at URLs that the launcher
has resolved. What a host cannot read itself comes through the launcher's SSH connection to it.

At the end each host states the hashes of what it got. Where they differ from those of the host
that has them from the hub, or had them before, their source is named and left out, and the pieces
come from another one.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

from pipespec.cluster.deployment import Deployment
from pipespec.cluster.host_weights import parts_needed, shares_caches
from pipespec.cluster.running_work import RunningWork
from pipespec.cluster.weight_host import LAUNCHER_NAME
from pipespec.cluster.weight_peer import WeightPeer, connected, on_this_machine
from pipespec.cluster.weight_plan import HUB, Key, Transfer, by_file, plan_transfers
from pipespec.config.hosts import Host
from pipespec.controller.certificate import Certificate
from pipespec.engine.checkpoint.partial_checkpoint import missing
from pipespec.engine.checkpoint_parts.blueprint import Blueprint, repository_of
from pipespec.engine.checkpoint_parts.hub_client import HubClient
from pipespec.engine.checkpoint_parts.repository import (
    Repository,
    cached_commit,
    folder_of_checkpoint,
    read_repository,
)
from pipespec.errors import ModelError, PipespecError, RankFailed

# Seconds within which the end of a host's process is known once its connections have broken.
ENDED_S = 1.0
# Seconds between two tries to lock folders, drawn anew each time, so that two starts do not meet
# for good.
PAUSE_S = (0.2, 1.0)
# Called with a host's name, the bytes that it has of those it needs, and how many it needs.
OnProgress = Callable[[str, int, int], None]
# Called with a sentence on a host that is left out, or cannot be reached by another one.
OnWarning = Callable[[str], None]


class Distribute(Protocol):
    """What gives the hosts of a deployment the weights that they lack."""

    def __call__(self, deployment: Deployment, *, on_warning: OnWarning) -> object: ...


class SourceModel:
    """A model as the launcher has it.

    Attributes:
        client: of its repository on the hub; None: it is a folder of a host.
        shared: what other hosts call it; None: this host lacks files, so that they cannot get
            theirs from here.
    """

    def __init__(self, kind: str, path: Path) -> None:
        self.kind, self.path = kind, path
        self.folder = folder_of_checkpoint(path)
        found = cached_commit(self.folder)
        self.client = HubClient(found.repo) if found is not None and found.on_hub else None

    @cached_property
    def shared(self) -> Repository | None:
        try:
            return replace(repository_of(self.path), weights={})
        except ModelError:
            return None

    @cached_property
    def blueprint(self) -> Blueprint:
        """For hosts without its folder. Raises ModelError."""
        return Blueprint.of(self.path)


def shared_names(deployment: Deployment) -> dict[str, Repository]:
    """What other hosts call the models that they can get from here."""
    if deployment.open_to is None and all(map(shares_caches, deployment.hosts)):
        return {}
    models = [SourceModel(kind, info.path) for kind, info in deployment.models]
    return {each.kind: each.shared for each in models if each.shared is not None}


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
    models = {kind: SourceModel(kind, info.path) for kind, info in deployment.models}
    own: dict[str, set[str]] = {kind: set() for kind in models}
    far: list[tuple[Host, Mapping[str, set[str]]]] = []
    here: Host | None = None
    for host in deployment.hosts:
        needs = _needs(deployment, host, models)
        if shares_caches(host):
            here = host
            for kind, parts in needs.items():
                own[kind] |= parts
        elif not host.by_hand:
            needs = {kind: parts for kind, parts in needs.items() if models[kind].shared}
            far += [(host, needs)] if needs else []
    with ExitStack() as stack:
        work = _Distribution(models, on_progress, on_warning)
        if running is not None:
            stack.enter_context(running.holding(work))
        name = LAUNCHER_NAME if here is None else here.name
        launcher = stack.enter_context(on_this_machine(name, here, work.handlers(name)))
        work.add(launcher)
        for host, _ in far:
            work.add(stack.enter_context(connected(host, work.handlers(host.name))))
        asked = [(work.peers[host.name], needs) for host, needs in far]
        with ThreadPoolExecutor(max(len(work.peers), 1)) as pool, work.stopped_by_errors():
            list(pool.map(lambda each: each[0].require_version(), asked))
            held = list(pool.map(lambda each: work.holds(*each), asked))
            offered = {
                kind
                for kind, model in models.items()
                if read_repository(model.folder) is not None and missing(model.path, own[kind])
            }
            if offered or not all(held):
                offered |= {kind for _, needs in far for kind in needs}
                asked.append((launcher, {kind: own[kind] for kind in sorted(offered)}))
                blueprints = {kind: models[kind].blueprint.as_json() for kind in offered}
                list(pool.map(lambda each: work.prepare(each[0], each[1], blueprints), asked))
                owned = lock_folders(asked, on_warning)
                list(pool.map(lambda name: work.offer(name, owned[name]), owned))
                work.connect(pool)
                work.run()
    return replace(deployment, shared=shared_names(deployment), fetched=True)


def lock_folders(
    asked: Sequence[tuple[WeightPeer, Mapping[str, set[str]]]],
    on_warning: OnWarning,
    pause: Callable[[float], object] = time.sleep,
) -> dict[str, dict[str, set[str]]]:
    """Be the only start that fetches into the folders of these models, by host; the parts of each
    model that a host fetches into its own, also for hosts that share it. A sentence says what is
    waited for. Raises ModelError, HostFailed.

    Two starts may have folders in common, under different names of hosts and in any order. So a
    start that holds some locks waits for no other one: it gives them back, and tries again later.
    """
    run = secrets.token_hex(8)
    warned = False
    while True:
        owned: dict[str, dict[str, set[str]]] = {}
        taken = None
        for peer, kind in [(peer, kind) for peer, needs in asked for kind in needs]:
            found = peer.call("lock", kind=kind, run=run, host=peer.name)
            if found["owner"] is None:
                taken = f"{peer.name}: {found['holder']}"
                break
            owned.setdefault(found["owner"], {}).setdefault(kind, set())
            owned[found["owner"]][kind] |= dict(asked)[peer][kind]
        if taken is None:
            return owned
        for peer, _ in asked:
            peer.call("unlock")
        if not warned:
            on_warning(f"{taken}; waiting until it has ended.")
            warned = True
        pause(random.uniform(*PAUSE_S))


def _needs(
    deployment: Deployment, host: Host, models: Mapping[str, SourceModel]
) -> dict[str, set[str]]:
    """The parts of each model that a host is asked about."""
    needs = {kind: set(parts) for kind, parts in parts_needed(deployment, host).items()}
    for kind, model in models.items():
        given, found = getattr(host, kind), read_repository(model.folder)
        if given is not None:  # the model is there
            needs.pop(kind, None)
        elif kind == "target":  # whose config every host reads
            needs.setdefault(kind, set())
        # It may have all of it to send.
        if found is not None and found.path is not None and given in (None, found.path):
            needs.setdefault(kind, set())
    return needs


class _Distribution:
    """Decides where each tensor comes from, and passes on what hosts cannot read themselves."""

    def __init__(
        self, models: Mapping[str, SourceModel], on_progress: OnProgress, on_warning: OnWarning
    ) -> None:
        self.peers: dict[str, WeightPeer] = {}  # the launcher is the first
        self._models = models
        self._on_progress, self._on_warning = on_progress, on_warning
        self._left_out: set[str] = set()
        self._unreachable: set[tuple[str, str]] = set()
        self._hashes: dict[Key, str] = {}  # the right ones
        self._failed = False
        self._stopping = threading.Lock()

    def add(self, peer: WeightPeer) -> None:
        """Another host takes part. Raises RankFailed if all of it was stopped."""
        with self._stopping:
            if self._failed:
                raise RankFailed("The cluster has ended.")
            self.peers[peer.name] = peer

    def handlers(self, host: str) -> dict[str, Any]:
        """What a host may ask."""
        return {
            "locate": self._locate,
            "read": self._read,
            "progress": partial(self._progress, host),
            "unreachable": partial(self._cannot_reach, host),
        }

    def holds(self, peer: WeightPeer, needs: Mapping[str, set[str]]) -> bool:
        """Whether a host has all that it needs of the models."""
        for kind, parts in needs.items():
            model = self._models[kind]
            assert model.shared is not None, "only such models are offered"
            arguments = {"path": str(model.path), "parts": sorted(parts)}
            if not peer.call("holds", shared=model.shared.as_json(), **arguments):
                return False
        return True

    def prepare(
        self, peer: WeightPeer, needs: Mapping[str, set[str]], blueprints: Mapping[str, Any]
    ) -> None:
        """Have a host find the folders of the models. `blueprints`: as JSON."""
        for kind, parts in needs.items():
            arguments = {"path": str(self._models[kind].path), "parts": sorted(parts)}
            peer.call("prepare", kind=kind, blueprint=blueprints[kind], **arguments)

    def offer(self, name: str, needs: Mapping[str, set[str]]) -> None:
        """Learn what a host has and lacks of the models."""
        peer = self.peers[name]
        for kind, parts in needs.items():
            found = peer.call("offer", kind=kind, parts=sorted(parts))
            peer.has |= _hashes(kind, found["has"])
            peer.lacks += [
                (kind, file, *each) for file, some in found["lacks"].items() for each in some
            ]

    def connect(self, pool: ThreadPoolExecutor) -> None:
        """Let the hosts read from one another, if one lacks what another may have."""
        if len(self.peers) == 1 or not any(peer.lacks for peer in self.peers.values()):
            return
        certificate = Certificate.make()

        def listen(peer: WeightPeer) -> None:
            try:
                peer.listen(certificate)
            except ModelError as error:
                assert peer.host is not None
                self._on_warning(
                    f"{peer.name} cannot listen at {peer.host.address} ({error}), so what other "
                    "hosts get from it passes through the launcher; correct its address or "
                    "interface in the hosts file."
                )

        list(pool.map(listen, self.peers.values()))

    def run(self) -> None:
        """Fetch for all hosts until all that they got is right."""
        while lacking := [peer for peer in self.peers.values() if peer.lacks]:
            transfers = self._plan()
            tasks = {peer: partial(self._fetch_for, peer, transfers) for peer in lacking}
            self._compare(transfers, self._at_once(tasks))
        self._at_once({peer: partial(self._check, peer) for peer in self.peers.values()})

    def _at_once(
        self, tasks: Mapping[WeightPeer, Callable[[], dict[Key, str]]]
    ) -> dict[str, dict[Key, str]]:
        """The result of each host's task, by its name. Raises what the first one raised, and ends
        all others."""
        with ThreadPoolExecutor(max(len(tasks), 1)) as pool:
            futures = {peer.name: pool.submit(task) for peer, task in tasks.items()}
            try:
                done, _ = wait(futures.values(), return_when=FIRST_EXCEPTION)
                for task in done:
                    task.result()
            except PipespecError as error:
                # The host that has ended comes before those that wait for it.
                ended = [why for peer in self.peers.values() if (why := peer.failure) is not None]
                self.stop()
                raise (ended[0] if ended else error) from error
            except BaseException:
                self.stop()
                raise
        return {name: task.result() for name, task in futures.items()}

    @contextmanager
    def stopped_by_errors(self) -> Iterator[None]:
        """An exception in the block, a signal too, ends what the hosts do: threads wait for it."""
        try:
            yield
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End what the hosts do; whoever waits for them gets an error."""
        with self._stopping:
            self._failed = True
            peers = list(self.peers.values())
        for model in self._models.values():
            if model.client is not None:
                model.client.stopped.set()
        for peer in peers:
            peer.end()

    def _plan(self) -> list[Transfer]:
        """The transfers of what the hosts lack. Raises ModelError if a piece has no source."""
        holders = {
            name: [key for key, sha in peer.has.items() if self._agrees(key, sha)]
            for name, peer in self.peers.items()
            if name not in self._left_out
        }
        lacks = {name: peer.lacks for name, peer in self.peers.items() if peer.lacks}
        on_hub = {kind for kind, model in self._models.items() if model.client is not None}
        return plan_transfers(lacks, holders, on_hub)

    def _agrees(self, key: Key, sha: str | None) -> bool:
        """Whether a host states the hash of a piece that the first one has stated."""
        return sha is None or self._hashes.setdefault(key, sha) == sha

    def _fetch_for(self, peer: WeightPeer, transfers: list[Transfer]) -> dict[Key, str]:
        """Have a host fetch what it lacks; the hashes."""
        found: dict[Key, str] = {}
        own = [each for each in transfers if each.to == peer.name]
        # The same order everywhere, as hosts wait for what others fetch.
        for kind in (kind for kind in self._models if any(each.kind == kind for each in own)):
            sources = [
                {
                    "from": each.source,
                    "at": self.peers[each.source].address if each.source in self.peers else None,
                    "wanted": by_file(each.keys),
                }
                for each in own
                if each.kind == kind
            ]
            found |= _hashes(kind, peer.call("fetch", kind=kind, sources=sources))
        return found

    def _check(self, peer: WeightPeer) -> dict[Key, str]:
        for kind in {kind for kind, *_ in peer.has}:
            peer.call("check", kind=kind)
        return {}

    def _compare(self, transfers: list[Transfer], found: Mapping[str, Mapping[Key, str]]) -> None:
        """Compare the hashes of what each host got with the right ones, and have it drop the
        pieces that differ."""
        wrong: defaultdict[tuple[str, str], list[Key]] = defaultdict(list)
        # By depth: those that pass a piece on come before those that get it.
        for each, key in ((some, key) for some in transfers for key in some.keys):
            got = found[each.to][key]
            if each.source == HUB:
                self._hashes[key] = got
            if self._agrees(key, got):
                self.peers[each.to].has[key] = got
                continue
            wrong[each.to, each.kind].append(key)
            if key in self.peers[each.source].has:
                self._leave_out(each.source, each.to, each.kind)
        for peer in self.peers.values():
            peer.lacks = []
        for (name, kind), keys in wrong.items():
            self.peers[name].call("forget", kind=kind, wrong=by_file(keys))
            self.peers[name].lacks += keys

    def _leave_out(self, source: str, to: str, kind: str) -> None:
        if source not in self._left_out:
            self._left_out.add(source)
            self._on_warning(
                f"{source} sends wrong bytes of the {kind} (to {to}), so it is left out; check its "
                "disk, and remove its folder of that model with `pipespec cache prune` there."
            )

    # --- what hosts ask -----------------------------------------------------------------------

    def _locate(self, kind: str, file: str, fresh: bool) -> str | None:
        repository, client = self._on_hub(kind, file)
        return client.signed_url(repository.commit, file, fresh=fresh)

    def _read(self, kind: str, source: str, file: str, start: int, stop: int) -> Iterator[bytes]:
        if source != HUB:
            return self._peer(source).read(kind=kind, file=file, start=start, stop=stop)
        repository, client = self._on_hub(kind, file)
        size = repository.weights[file].size
        return client.read(repository.commit, file, (start, stop), size)

    def _on_hub(self, kind: str, file: str) -> tuple[Repository, HubClient]:
        """Where the hub has a weight file of a model. Raises ModelError for any other file: the
        token may open more than the models of this start."""
        model = self._models.get(kind)
        if model is None or model.client is None or file not in model.blueprint.repository.weights:
            raise ModelError(f"{file!r} of the {kind} is no weight file that the hub has")
        return model.blueprint.repository, model.client

    def _peer(self, name: str) -> WeightPeer:
        if name not in self.peers:
            raise ModelError(f"{name!r} is no host of this start")
        return self.peers[name]

    def _progress(self, host: str, done: int, total: int) -> None:
        self._on_progress(host, done, total)

    def _cannot_reach(self, host: str, source: str, why: str, reached: bool) -> None:
        peer = self._peer(source)
        if peer.channel.closed.wait(ENDED_S) or self._failed:
            return  # that host has ended, which is reported by itself
        with self._stopping:
            if (host, source) in self._unreachable:
                return
            self._unreachable.add((host, source))
        at = "" if peer.address is None else f" at {peer.address[0]}"
        advice = (
            "look at the network between them"
            if reached
            else "let the firewall admit TCP between the hosts"
        )
        self._on_warning(
            f"{host} cannot read weights from {source}{at} ({why}), so they pass through the "
            f"launcher; {advice}."
        )


def _hashes(kind: str, pieces: Mapping[str, Sequence[Sequence[Any]]]) -> dict[Key, Any]:
    """The hashes of pieces, as a host states them."""
    return {
        (kind, file, start, stop): sha for file, each in pieces.items() for start, stop, sha in each
    }
