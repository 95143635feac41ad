"""Which weights each host of a deployment needs, and where they are on it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from pipespec.cluster.deployment import Deployment
from pipespec.config.hosts import Host
from pipespec.engine.checkpoint.formats.gguf import is_gguf
from pipespec.engine.checkpoint.inspection import CheckpointInfo, inspect
from pipespec.engine.checkpoint.model_path import cached_model
from pipespec.engine.checkpoint.partial_checkpoint import clause, missing
from pipespec.engine.checkpoint.slice_tensors import parts_of
from pipespec.engine.checkpoint_parts.repository import Repository, read_repository
from pipespec.errors import ConfigError


def shares_caches(host: Host) -> bool:
    """Whether a host is this machine, with the folders of this process."""
    return host.local and not host.env


def parts_needed(deployment: Deployment, host: Host) -> Mapping[str, set[str]]:
    """The parts (`slice_tensors`) of each model, by its name in `model.`, that the ranks of a host
    compute in the first epoch."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for rank, worker in enumerate(deployment.workers):
        if worker not in host.workers:
            continue
        for kind, parts in parts_of_rank(deployment, rank).items():
            found[kind] |= parts
    return found


def _parts(info: CheckpointInfo, layers: range) -> set[str]:
    return parts_of(layers, info.num_layers, tied=info.tied)


def own_path(
    path: Path, given: str | None, shared: Repository | None, parts: Collection[str]
) -> Path | None:
    """Where a host has a checkpoint of the launcher's; None: nowhere. Called on that host.

    Args:
        path: where the launcher has it.
        given: what the hosts file says for this host.
        shared: what other hosts call it.
        parts: what the host computes of it.
    """
    if given:
        return Path(given).expanduser()
    found = [path] if shared is None else []
    if shared is not None:
        found += [] if shared.path is None else [Path(shared.path)]
        file = path.name if is_gguf(path) else None
        if shared.on_hub:
            cached = cached_model(shared.repo, shared.commit, file)
            found += [] if cached is None else [cached]
        if read_repository(shared.folder) is not None:
            found.append(shared.folder if file is None else shared.folder / file)
    here = [each for each in found if each.is_dir() or (is_gguf(each) and each.is_file())]
    return next((each for each in here if not missing(each, parts)), here[0] if here else None)


def parts_of_rank(deployment: Deployment, rank: int) -> Mapping[str, set[str]]:
    """The same for a rank, in the epoch whose layers the deployment has."""
    if rank:
        return {"target": _parts(deployment.target, deployment.layers[rank - 1])}
    return {kind: _parts(info, range(info.num_layers)) for kind, info in deployment.models[1:]}


def on_this_host(
    deployment: Deployment, host: Host, needed: Mapping[str, Collection[str]] | None = None
) -> Deployment:
    """The deployment with the checkpoints at their paths on this host. Raises ConfigError.

    `needed` are the parts that it computes of each model; None: those of the first epoch.
    """
    needed = parts_needed(deployment, host) if needed is None else needed

    def here(path: Path, given: str | None, kind: str) -> Path:
        shared = deployment.shared.get(kind)
        found = own_path(path, given, shared, needed.get(kind, ())) or path
        if not (found.is_dir() or (is_gguf(found) and found.is_file())):
            what = "file" if is_gguf(found) else "folder"
            raise ConfigError(
                f"Host {host.name} has no {what} {found}; put the {kind} model there, or name its "
                f"{what} as {kind} of that host in the hosts file."
            )
        return found

    folder = here(Path(deployment.target.path), host.target, "target")
    if str(folder) != str(deployment.target.path):
        target = inspect(str(folder))
        if target.kind != deployment.target.kind:
            raise ConfigError(
                f"Host {host.name} has another target in {folder} than the other hosts "
                f"({target.kind}, not {deployment.target.kind}); put the same there."
            )
        deployment = replace(deployment, target=target)
    for kind, info in deployment.models[1:]:
        given = getattr(host, kind)
        if given is not None or (kind in needed and kind in deployment.shared):
            own = inspect(str(here(Path(info.path), given, kind)))
            deployment = deployment.with_model(kind, own)
    return deployment


def require_weights(deployment: Deployment) -> None:
    """Raise ConfigError, which names what is missing, unless this machine has the weights that its
    ranks compute in the first epoch. Other hosts check theirs when they load them."""
    for host in deployment.hosts:
        if not shares_caches(host):
            continue
        needed = parts_needed(deployment, host)
        here = on_this_host(deployment, host) if needed else deployment
        for kind, info in here.models:
            lacking = missing(info.path, needed.get(kind, ()))
            if lacking:
                raise ConfigError(
                    f"The {kind} {info.path} {clause(lacking)}, which this machine computes; copy "
                    "the files there, or divide the layers differently."
                )
