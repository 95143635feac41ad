"""Gives every host of a deployment the weights that its ranks compute, before they start, and the
launcher the small files and headers of a model that only another host has.

The launcher has a process (`host`) on each host, its own machine included. Of one model after
another it learns which blocks of the files each has, and moves them in the rounds that `plan`
decides. Hosts read from one another (`server`), and from the hub at URLs that the launcher has
found. What a host cannot read from the hub, the launcher's host fetches first.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from pipespec.cluster.deployment.deployment import Deployment, own_address
from pipespec.cluster.deployment.rank_assignment import RankAssignment, WeightsPending
from pipespec.cluster.host_link.programs import Conversation
from pipespec.cluster.weights.plan import HUB, Block, Transfers, parts_asked, plan_round
from pipespec.cluster.weights.server import tls_context, url_of
from pipespec.config.hosts import LOCAL, Host, HostsFile
from pipespec.controller.certificate import Certificate
from pipespec.engine.checkpoint.model_path import can_be_fetched
from pipespec.engine.checkpoint.partial_checkpoint import blocks_needed, missing, open_repository
from pipespec.engine.checkpoint.parts.folder import Repository
from pipespec.engine.checkpoint.parts.parts_file import RECORDS, blocks_of, place_of
from pipespec.engine.checkpoint.parts.sources import COMMIT, HubSource, RangeSource
from pipespec.errors import ModelError, PipespecError, RankFailed
from pipespec.system.network_interfaces import LOOPBACK, resolve
from pipespec.system.validation import Unreadable, from_fields, home_expanded

T = TypeVar("T")
log = logging.getLogger(__name__)

MODULE = "pipespec.cluster.weights.host"
ENDING_S, ENDED_S = 5.0, 1.0  # that a host's process may take to end, and to show that it has
OVER_S = 0.1  # between looks whether the cluster is over
MOST_BYTES = 2**50  # of a file that another host describes
# Called with a host's name, the bytes that it has got of those it lacked, and how many these are.
OnProgress = Callable[[str, int, int], None]
LAUNCHER_NAME = "the launcher"
# Gives the hosts of a deployment the weights that they lack.
Distribute = Callable[..., object]
# A host that could not read blocks from a source, whose name is given, and why.
Failure = tuple["Peer", str, str, Sequence[Block]]


class Peer(Conversation):
    """The process of a host, which ends with the block. Of one model after another it computes
    `parts`, and needs, has and lacks blocks; of all it has got `moved` bytes. It can read from the
    hub, or not, and others with the same `certificate` read from it. Raises HostFailed."""

    def __init__(
        self, host: Host, certificate: Certificate, on_progress: OnProgress = lambda *_: None
    ) -> None:
        super().__init__(host, MODULE, ENDING_S)
        self.name, self.parts = host.name, set[str]()
        self.certificate = asdict(certificate)
        self.needs, self.has, self.lacks = set[Block](), set[Block](), set[Block]()
        self._url, self.reads_hub = "", True
        self.moved = self.wanted = 0
        self._on_progress = on_progress

    def refusal(self, sentence: str) -> ModelError:
        return ModelError(sentence if self.host.shares_caches else f"{self.name}: {sentence}")

    def noted(self, **said: Any) -> None:
        """It warns, or has got so many bytes more."""
        if "warning" in said:
            log.warning("%s: %s", self.name, said["warning"])
        elif "moved" in said:
            self.moved += said["moved"]
            self._on_progress(self.name, self.moved, self.wanted)

    def listen(self, files: Iterable[str]) -> dict[str, str]:
        """Let other hosts read from it, of this model and the next ones; the URLs of files."""
        if not self._url:
            address = self.host.address
            with suppress(OSError):  # a host may call itself otherwise
                address = resolve(address)
            where = {"address": address, "interface": self.host.interface}
            self._url = self.call("listen", **where, certificate=self.certificate)
        return {each: url_of(self._url, each) for each in files}


def distribute_weights(
    deployment: Deployment,
    on_progress: OnProgress = lambda host, done, total: None,
    over: threading.Event | None = None,
) -> Deployment:
    """Fetch what the hosts lack; the deployment, marked so. Hosts that are started by hand fetch
    for themselves. Raises ModelError, HostFailed; RankFailed once the cluster is `over`."""
    if deployment.fetched:
        return deployment
    here = [host for host in deployment.hosts if host.shares_caches]
    launcher = (
        here[0] if here else Host(LAUNCHER_NAME, own_address(deployment.hosts) or LOOPBACK, LOCAL)
    )
    certificate = cache(Certificate.make)
    peers: dict[str, Peer] = {}
    with ExitStack() as stack:
        for kind, shared in deployment.shared.items():
            path = dict(deployment.models)[kind].path
            asked = {launcher.name: (launcher, set[str]())}
            for host in deployment.hosts:
                if (parts := parts_asked(deployment, host, kind, shared)) is not None:
                    name = launcher.name if host.shares_caches else host.name
                    asked.setdefault(name, (host, set()))[1].update(parts)
            if len(asked) == 1 and not missing(path, asked[launcher.name][1]):
                continue
            for name, (host, parts) in asked.items():
                if name not in peers:
                    peers[name] = stack.enter_context(Peer(host, certificate(), on_progress))
                peers[name].parts = parts
            _Model(path, shared, [peers[name] for name in asked], over).distribute()
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
        try:
            self.distribute(deployment)
        except RankFailed:  # the cluster ends
            pass
        except PipespecError as error:
            log.warning("weights of the new layout: %s", error)


@dataclass
class _Model:
    """Moves the weights of one model to hosts, which call it `shared`, the launcher's first."""

    path: Path
    shared: Repository
    peers: list[Peer]
    over: threading.Event | None

    def at_once(self, task: Callable[[Peer], T]) -> list[T]:
        """What a task returns for each host. Raises what the first one raised, also a signal, or
        RankFailed if the cluster is over, and then ends what all hosts do."""
        with ThreadPoolExecutor(len(self.peers)) as pool:
            futures = [pool.submit(task, peer) for peer in self.peers]
            try:
                while True:
                    done, left = wait(futures, OVER_S, FIRST_EXCEPTION)
                    for each in done:
                        each.result()
                    if self.over is not None and self.over.is_set():
                        raise RankFailed("The cluster has ended.")
                    if not left:
                        return [each.result() for each in futures]
            except BaseException:
                for peer in self.peers:
                    peer.end()
                raise

    def distribute(self) -> None:
        """Fetch what hosts lack, in rounds, in each of which some sources may fail."""
        self.at_once(self._prepare)
        known, failed = None, list[Failure]()
        while wanted := sorted(set[Block]().union(*(peer.needs for peer in self.peers))):
            self.at_once(partial(self._offer, wanted=wanted))
            if not any(peer.lacks for peer in self.peers):
                return
            found = [(peer.has, peer.lacks) for peer in self.peers]
            if found == known:  # nothing has come by that round
                for each in failed:
                    self._give_up(*each)
                known = None
                continue
            plan = plan_round(
                {peer.name: peer.lacks for peer in self.peers},
                {peer.name: peer.has for peer in self.peers},
                on_hub=[peer.name for peer in self.peers if self.shared.on_hub and peer.reads_hub],
            )
            known, failed = found, self._round(plan)

    def _prepare(self, peer: Peer) -> None:
        """Have a host find the folder of the model. Unless it has another one, it needs small
        files, headers, and the tensors of its parts."""
        peer.needs = set()
        if peer.call("prepare", repository=asdict(self.shared), parts=sorted(peer.parts)):
            return
        needed = blocks_needed(self.path, peer.parts)
        for name, file in self.shared.files.items():
            blocks = needed.get(name, blocks_of([(0, file.size)]))
            peer.needs |= {(name, number) for number in blocks}

    def _offer(self, peer: Peer, wanted: Sequence[Block]) -> None:
        """Learn what a host has and lacks."""
        found = peer.call("offer", wanted=wanted, own=sorted(peer.needs))
        peer.has = {(file, number) for file, number in found}
        peer.lacks = peer.needs - peer.has
        places = (place_of(number, self.shared.files[file].size) for file, number in peer.lacks)
        peer.wanted = peer.moved + sum(stop - start for start, stop in places)
        if peer.wanted:
            peer.noted(moved=0)

    def _round(self, plan: Mapping[str, Transfers]) -> list[Failure]:
        """Have the hosts get what is planned; which of them could not read from which sources."""
        senders = {name for transfers in plan.values() for name in transfers}
        urls = dict[str, Mapping[str, str]]()
        if HUB in senders:
            files = {file for each in plan.values() for file, _ in each.get(HUB, ())}
            urls[HUB] = HubSource(self.shared.repo, self.shared.commit).signed_urls(files)

        def listen(peer: Peer) -> None:
            if peer.name in senders:
                urls[peer.name] = peer.listen(self.shared.files)

        def get(peer: Peer) -> list[Failure]:
            planned = plan.get(peer.name, {})
            asked = {name: (urls[name], blocks) for name, blocks in planned.items()}
            failed = peer.call("fetch", sources=asked, certificate=peer.certificate)
            return [(peer, name, why, planned[name]) for name, why in failed.items()]

        self.at_once(listen)
        return [failure for each in self.at_once(get) for failure in each]

    def _give_up(self, peer: Peer, name: str, why: str, blocks: Sequence[Block]) -> None:
        """A host cannot read these blocks from a source. Raises ModelError, HostFailed, unless the
        launcher can fetch them from the hub instead, to pass them on."""
        launcher = self.peers[0]
        if name == HUB and peer is not launcher:
            peer.reads_hub = False
            launcher.needs.update(blocks)
            return
        ended = [each.failure(ENDED_S) for each in self.peers if each.name == name]
        raise next(filter(None, ended), peer.refusal(why))


def find_on_hosts(named: Mapping[str, str], hosts_file: HostsFile) -> dict[str, Path]:
    """Checkpoints without their tensors, in the parts cache here, of the models that another host
    has whole at the path that the settings (`named`) or its entry name, by their names in `model.`.
    Models that are here or on the hub, or that no host has, are left out. Raises HostFailed if a
    host cannot be asked; ModelError if it cannot be read, or no host has all files of one."""
    absent = {
        kind: path
        for kind, path in named.items()
        if not os.path.lexists(home_expanded(path)) and not can_be_fetched(path)
    }
    others = [host for host in hosts_file.hosts if not (host.by_hand or host.shares_caches)]
    if not absent or not others:
        return {}
    opened: dict[str, Path] = {}
    refused: dict[str, ModelError] = {}  # another one may have all of its files
    with ExitStack() as stack:
        certificate = Certificate.make()
        peers = [stack.enter_context(Peer(host, certificate)) for host in others]
        context = tls_context(certificate, server=False)
        for kind, peer in product(absent, peers):
            if kind in opened:
                continue
            try:
                told = peer.call("describe", path=getattr(peer.host, kind) or absent[kind])
            except ModelError as error:
                refused.setdefault(kind, error)
                continue
            if told is not None:
                found = described(told, peer.name)
                source = RangeSource(peer.name, peer.listen(found.files), context)
                opened[kind] = open_repository(source, found, found.gguf)
    for kind, why in refused.items():
        if kind not in opened:
            raise why
    return opened


def described(told: Any, host: str) -> Repository:
    """What another host says that its checkpoint is: its folder here is never one of the hub, and
    no file is outside that. Raises ModelError."""
    with suppress(Unreadable):
        found = from_fields(Repository, told)
        if (
            all(name == os.path.basename(name) and name.strip(".") for name in found.files)
            and all(0 <= each.size < MOST_BYTES for each in found.files.values())
            and RECORDS not in found.files
            and "/" not in found.repo
            and found.path is not None
            and COMMIT.fullmatch(found.commit) is not None
        ):
            return found
    raise ModelError(f"{host}: what it says about its checkpoint is of no use; look there")
