"""Which weights each host of a deployment needs, and where they are on it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pipespec.cluster.deployment import Deployment
from pipespec.config.hosts import Host
from pipespec.engine.checkpoint import CheckpointInfo, inspect
from pipespec.engine.formats.gguf import is_gguf
from pipespec.engine.partial_checkpoint import clause, missing
from pipespec.engine.slice_tensors import parts_of
from pipespec.errors import ConfigError


def parts_needed(deployment: Deployment, host: Host) -> Mapping[str, set[str]]:
    """The parts (`pipespec.engine.slice_tensors`) of each model, by its name in `model.`, that the
    ranks of a host compute in the first epoch."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for rank, worker in enumerate(deployment.workers):
        if worker not in host.workers:
            continue
        if rank:
            found["target"] |= _parts(deployment.target, deployment.layers[rank - 1])
            continue
        for kind, info in deployment.models[1:]:
            found[kind] |= _parts(info, range(info.num_layers))
    return found


def _parts(info: CheckpointInfo, layers: range) -> set[str]:
    return parts_of(layers, info.num_layers, tied=info.tied)


def on_this_host(deployment: Deployment, host: Host) -> Deployment:
    """The deployment with the checkpoints at their paths on this host. Raises ConfigError."""

    def here(path: Path, given: str | None, kind: str) -> Path:
        found = Path(given).expanduser() if given else path
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
        if (given := getattr(host, kind)) is not None:
            own = inspect(str(here(Path(info.path), given, kind)))
            deployment = deployment.with_model(kind, own)
    return deployment


def require_weights(deployment: Deployment) -> None:
    """Raise ConfigError, which names what is missing, unless this machine has the weights that its
    ranks compute in the first epoch. Other hosts check theirs when they load them."""
    for host in deployment.hosts:
        if not host.local:
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
