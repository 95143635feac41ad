"""Gives every host of a deployment the weights that its ranks compute, before they start.

    launcher ─┬─ weight_host on beta  ── the hub, at URLs that the launcher has resolved
              └─ weight_host on gamma ── the launcher: its own files, what it fetched for several
                                         hosts, or what another host has

The launcher knows which tensors each host needs and has. A tensor comes to a host

- from the launcher, if that has it, or several hosts need it: then the launcher fetches it once;
- from another host that has it, through the launcher;
- else from the hub.

So the hub sends every byte once. All that hosts send each other passes through the launcher's SSH
connections, encrypted. The hashes of what the launcher or a host has go along; a host that sends
other bytes is named, left out, and its part of the work done by another source.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from pipespec.cluster.deployment import Deployment
from pipespec.cluster.host_weights import parts_needed, shares_caches
from pipespec.cluster.source_model import Key, SourceModel, shared_name_of
from pipespec.cluster.weight_host import HUB, LAUNCHER, is_here, read_file
from pipespec.cluster.weight_peer import WeightPeer, connected
from pipespec.config.hosts import Host
from pipespec.engine.parts.fetching import HubSource, check_whole, fetch
from pipespec.engine.parts.repository import SharedName, read_repository
from pipespec.errors import ModelError

# Called with a host's name, the bytes that it has of those it needs, and how many it needs.
OnProgress = Callable[[str, int, int], None]
# Called with a sentence on a host that is left out.
OnWarning = Callable[[str], None]


def shared_names(deployment: Deployment) -> dict[str, SharedName]:
    """The names, in the parts cache of other hosts, of the models that these can get from here."""
    found: dict[str, SharedName] = {}
    if all(map(shares_caches, deployment.hosts)):
        return found
    for kind, info in deployment.models:
        name = shared_name_of(info.path)
        if name is not None:
            found[kind] = name
    return found


def distribute_weights(
    deployment: Deployment,
    on_progress: OnProgress = lambda host, done, total: None,
    on_warning: OnWarning = lambda sentence: None,
) -> Deployment:
    """Fetch what the hosts lack; the deployment, marked so. Hosts that are started by hand fetch
    for themselves.

    Raises ModelError, HostFailed.
    """
    if deployment.fetched:
        return deployment
    models = {kind: SourceModel(kind, info.path) for kind, info in deployment.models}
    own: dict[str, set[str]] = {kind: set() for kind in models}
    far: list[tuple[Host, Mapping[str, set[str]]]] = []
    here = LAUNCHER
    for host in deployment.hosts:
        needs = parts_needed(deployment, host)
        # Where the hosts file names a path, the model is there.
        needs = {kind: parts for kind, parts in needs.items() if getattr(host, kind) is None}
        if not needs and any(worker in deployment.spares for worker in host.workers):
            needs = {"target": set()} if host.target is None else {}
        if shares_caches(host):
            here = host.name
            for kind, parts in needs.items():
                own[kind] |= parts
        elif not host.by_hand:
            needs = {kind: parts for kind, parts in needs.items() if models[kind].shared}
            far += [(host, needs)] if needs else []
    with ExitStack() as stack:
        peers = {host.name: stack.enter_context(connected(host)) for host, _ in far}
        work = _Distribution(models, peers, here, on_progress, on_warning)
        for peer in peers.values():
            peer.open(work.handlers(peer.host.name))
        with ThreadPoolExecutor(max(len(far), 1)) as pool:
            asked = [(peers[host.name], needs) for host, needs in far]
            if not all(pool.map(lambda each: each[0].holds(models, each[1]), asked)):
                list(pool.map(lambda each: each[0].offer(models, each[1]), asked))
        work.run(own)
    return replace(deployment, shared=shared_names(deployment), fetched=True)


class _Distribution:
    """Decides where each tensor comes from, and passes bytes on."""

    def __init__(
        self,
        models: Mapping[str, SourceModel],
        peers: Mapping[str, WeightPeer],
        here: str,
        on_progress: OnProgress,
        on_warning: OnWarning,
    ) -> None:
        self._models, self._peers, self._here = models, peers, here
        self._on_progress, self._on_warning = on_progress, on_warning
        self._left_out: set[str] = set()
        self._own: set[Key] = set()  # what the launcher fetches

    def handlers(self, host: str) -> dict[str, Any]:
        """What a host may ask."""
        return {
            "locate": self._locate,
            "read": self._read,
            "progress": partial(self._progress, host),
        }

    def run(self, own: Mapping[str, set[str]]) -> None:
        """Fetch for the launcher's own parts, and for all hosts."""
        for kind, model in self._models.items():
            self._own |= set(model.absent(model.wanted(own[kind])))
        counts = Counter(key for peer in self._peers.values() for key in peer.lacks)
        for key, count in counts.items():
            several = count > 1 and not any(key in peer.has for peer in self._peers.values())
            if several and self._models[key[0]].client is not None:
                self._own |= set(self._models[key[0]].absent({key[1]: [key[2]]}))
        with ThreadPoolExecutor(1 + len(self._peers)) as pool:
            tasks = [pool.submit(self._fetch_own)]
            tasks += [
                pool.submit(self._fetch_for, peer) for peer in self._peers.values() if peer.lacks
            ]
            try:
                done, _ = wait(tasks, return_when=FIRST_EXCEPTION)
                for task in done:
                    task.result()
            except BaseException:
                for model in self._models.values():
                    if model.client is not None:
                        model.client.stopped.set()
                for peer in self._peers.values():
                    peer.end()
                raise

    def _fetch_own(self) -> None:
        """Fetch what this host needs, and what several need."""
        for kind, model in self._models.items():
            wanted = _by_file(key for key in self._own if key[0] == kind)
            try:
                repository = read_repository(model.folder)
                if wanted and repository is not None and model.client is not None:
                    source = HubSource(model.client, repository)
                    fetch(model.folder, wanted, source, partial(self._on_progress, self._here))
                    check_whole(model.folder, repository)
            except ModelError as error:
                model.failure = error
                raise
            finally:
                model.fetched.set()

    def _fetch_for(self, peer: WeightPeer) -> None:
        """Have a host fetch what it lacks, until all of it is right."""
        lacks = list(peer.lacks)
        while lacks:
            again: list[Key] = []
            for kind in dict.fromkeys(key[0] for key in lacks):
                plan = self._plan(peer, [key for key in lacks if key[0] == kind])
                sources = [
                    {
                        "from": source,
                        "wanted": _by_file(keys),
                        "expected": self._expected(source, keys),
                    }
                    for source, keys in plan.items()
                ]
                wrong = peer.call("fetch", kind=kind, sources=sources)
                bad = {(kind, file, name) for file, names in wrong.items() for name in names}
                for source, keys in plan.items():
                    if bad & set(keys):
                        self._leave_out(source, peer, kind)
                again += sorted(bad)
            lacks = again

    def _plan(self, peer: WeightPeer, keys: Sequence[Key]) -> dict[str, list[Key]]:
        """The source of each tensor. Raises ModelError if there is none."""
        found: defaultdict[str, list[Key]] = defaultdict(list)
        by_file: defaultdict[str, list[Key]] = defaultdict(list)
        for key in keys:
            by_file[key[1]].append(key)
        for file, some in by_file.items():
            model = self._models[some[0][0]]
            absent = set(model.absent({file: [key[2] for key in some]}))
            for key in some:
                found[self._source(peer, key, here=key not in absent)].append(key)
        return found

    def _source(self, peer: WeightPeer, key: Key, *, here: bool) -> str:
        if here or key in self._own:
            return LAUNCHER
        for name, other in self._peers.items():
            if key in other.has and name not in self._left_out and other is not peer:
                return name
        if self._models[key[0]].client is None:
            raise ModelError(
                f"{peer.host.name} needs {key[2]} of the {key[0]}, which no host has whole; copy "
                f"{key[1]} to one of them"
            )
        return HUB

    def _expected(self, source: str, keys: Sequence[Key]) -> dict[str, dict[str, str]]:
        """The hashes that a host has stated for its tensors."""
        found: defaultdict[str, dict[str, str]] = defaultdict(dict)
        if source in self._peers:
            for key in keys:
                found[key[1]][key[2]] = self._peers[source].has[key]
        return found

    def _leave_out(self, source: str, peer: WeightPeer, kind: str) -> None:
        if source in self._peers and source not in self._left_out:
            self._left_out.add(source)
            self._on_warning(
                f"{source} sends wrong bytes of the {kind} (to {peer.host.name}), so it is left "
                "out; check its disk, and remove its folder of that model with `pipespec cache "
                "prune` there."
            )

    # --- what hosts ask -----------------------------------------------------------------------

    def _locate(self, kind: str, file: str, fresh: bool) -> dict[str, Any] | None:
        model = self._models[kind]
        assert model.client is not None
        found = model.client.location(model.blueprint.repository.commit, file, fresh=fresh)
        return None if found.has_token else {"url": found.url, "headers": dict(found.headers)}

    def _read(self, kind: str, source: str, file: str, start: int, stop: int) -> Iterator[bytes]:
        if source in self._peers:
            peer = self._peers[source].channel
            return peer.stream("read", kind=kind, file=file, start=start, stop=stop)
        model = self._models[kind]
        path = model.file(file)
        if source == LAUNCHER and not is_here(path, (start, stop)):
            model.fetched.wait()
            if model.failure is not None:
                raise model.failure
        if is_here(path, (start, stop)):
            return read_file(path, (start, stop))
        assert model.client is not None
        repository = model.blueprint.repository
        size = repository.weights[file].size
        return model.client.read(repository.commit, file, (start, stop), size)

    def _progress(self, host: str, done: int, total: int) -> None:
        self._on_progress(host, done, total)


def _by_file(keys: Collection[Key] | Iterator[Key]) -> dict[str, list[str]]:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for _, file, name in sorted(keys):
        found[file].append(name)
    return found
