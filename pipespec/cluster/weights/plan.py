"""Decides which weights each host needs, where they are on it, and from where it gets them.

Weights move in rounds. In each, a block (`parts_file`) is sent to as many hosts as have it now, and
to the others in the next rounds, when more have it. So one host does not send the same bytes to
several if others can. What no host has, the hub sends once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipespec.cluster.deployment.deployment import Deployment
from pipespec.config.hosts import Host
from pipespec.engine.checkpoint.partial_checkpoint import clause, missing, own_path
from pipespec.engine.checkpoint.parts.folder import (
    Repository,
    folder_of_checkpoint,
    is_checkpoint,
)
from pipespec.engine.formats.slice_tensors import parts_of
from pipespec.engine.inspection.inspection import inspect
from pipespec.errors import ConfigError, ModelError

# File and number of a block.
Block = tuple[str, int]
# The parts (`slice_tensors`) of each model, by its name in `model.`.
Needs = Mapping[str, set[str]]
# What a host gets in a round, by source.
Transfers = Mapping[str, list[Block]]
# Among the names of sources, of which hosts' have no blanks.
HUB = "the hub"


def parts_needed(deployment: Deployment, host: Host) -> Needs:
    """What the ranks of a host compute in the first epoch."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for rank, worker in enumerate(deployment.workers):
        if worker in host.workers:
            for kind, parts in parts_of_rank(deployment, rank).items():
                found[kind] |= parts
    return found


def parts_of_rank(deployment: Deployment, rank: int) -> Needs:
    """What a rank computes in the epoch whose layers the deployment has."""
    computed = [("target", deployment.target, deployment.layers[rank - 1])]
    if not rank:
        computed = [(kind, of, range(of.num_layers)) for kind, of in deployment.models[1:]]
    found = {kind: parts_of(own, of.num_layers, tied=of.tied) for kind, of, own in computed}
    if not rank and (head := deployment.head) is not None:
        found["draft"] = set(head.parts)
        found["target"] = set(head.target_parts)
    return found


def parts_asked(
    deployment: Deployment, host: Host, kind: str, shared: Repository
) -> set[str] | None:
    """What a host is asked about of a model that hosts can get from one another or the hub; None:
    it is not asked."""
    if host.by_hand:
        return None
    if (given := getattr(host, kind)) is not None:  # the model is there, and may be sent
        return set() if given == shared.path else None
    needs = parts_needed(deployment, host)
    if kind in needs or kind == "target" or not shared.on_hub:  # all read the target's config
        return needs.get(kind, set())
    return None


def on_this_host(
    deployment: Deployment, host: Host, needed: Mapping[str, Collection[str]] | None = None
) -> Deployment:
    """The deployment with the checkpoints at their paths on this host, which computes the parts
    `needed` of each model; None: those of the first epoch. Raises ConfigError."""
    needed = parts_needed(deployment, host) if needed is None else needed
    own: dict[str, Any] = {}
    for kind, info in deployment.models:
        given, shared = getattr(host, kind), deployment.shared.get(kind)
        if kind != "target" and given is None and (kind not in needed or shared is None):
            continue
        path = Path(given or info.path).expanduser()
        if given is None:
            path = own_path(path, shared, needed.get(kind, ())) or path
        if not is_checkpoint(path):
            what = "folder" if folder_of_checkpoint(path) == path else "file"
            raise ConfigError(
                f"Host {host.name} has no {what} {path}; put the {kind} model there, or name its "
                f"{what} as {kind} of that host in the hosts file."
            )
        same = path.absolute() == info.path.absolute()
        if same:
            own[kind] = info
        elif info.head is None:
            own[kind] = inspect(str(path))
        else:
            own[kind] = replace(info, path=path)
    if own["target"].kind != deployment.target.kind:
        raise ConfigError(
            f"Host {host.name} has another target in {own['target'].path} than the other hosts "
            f"({own['target'].kind}, not {deployment.target.kind}); put the same there."
        )
    return replace(deployment, **own)


def require_weights(deployment: Deployment) -> None:
    """Raise ConfigError, which names what is missing, unless this machine has the weights that its
    ranks compute in the first epoch. Other hosts check theirs when they load them."""
    for host in deployment.hosts:
        if host.shares_caches and (needed := parts_needed(deployment, host)):
            for kind, info in on_this_host(deployment, host).models:
                if lacking := missing(info.path, needed.get(kind, ())):
                    raise ConfigError(
                        f"The {kind} {info.path} {clause(lacking)}, which this machine computes; "
                        "copy the files there, or divide the layers differently."
                    )


def plan_round(
    lacks: Mapping[str, Collection[Block]],
    holders: Mapping[str, Collection[Block]],
    *,
    on_hub: Collection[str],
) -> Mapping[str, Transfers]:
    """What each host gets of a model in the next round. `on_hub`: the hosts that can read all of it
    from the hub. Raises ModelError if no host has a block, and none can read it there."""
    lacking = set[Block]().union(*lacks.values())
    having = {block: [host for host in holders if block in holders[host]] for block in lacking}
    needing = {block: [host for host in lacks if block in lacks[host]] for block in lacking}
    sent, got = Counter[str](), Counter[str]()
    found: defaultdict[str, defaultdict[str, list[Block]]]
    found = defaultdict(lambda: defaultdict(list))

    # Few sources first: what several have goes by the less busy of them.
    for block in sorted(lacking, key=lambda each: (len(having[each]), each)):
        has, needs = having[block], needing[block]
        able = needs if has else [each for each in needs if each in on_hub]
        if not able:
            raise ModelError(
                f"{needs[0]} needs bytes of {block[0]} that no host has; copy it to one of them"
            )
        sources = has or [HUB]
        for to in sorted(able, key=got.__getitem__)[: len(sources)]:
            source = min(sources, key=sent.__getitem__)
            found[to][source].append(block)
            sent[source] += 1
            got[to] += 1
    return found
