"""Where the weights of a deployment are on a host."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipespec.cluster.deployment.deployment import Deployment
from pipespec.cluster.weights.plan import parts_needed
from pipespec.config.hosts import Host
from pipespec.engine.checkpoint.partial_checkpoint import clause, missing, own_path
from pipespec.engine.checkpoint.parts.folder import folder_of_checkpoint, is_checkpoint
from pipespec.engine.inspection.inspection import inspect
from pipespec.errors import ConfigError


def shares_caches(host: Host) -> bool:
    """Whether a host is this machine, with the folders of this process."""
    return host.local and not host.env


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
        if not is_checkpoint(found):
            what = "folder" if folder_of_checkpoint(found) == found else "file"
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
            own: dict[str, Any] = {kind: inspect(str(here(Path(info.path), given, kind)))}
            deployment = replace(deployment, **own)
    return deployment


def require_weights(deployment: Deployment) -> None:
    """Raise ConfigError, which names what is missing, unless this machine has the weights that its
    ranks compute in the first epoch. Other hosts check theirs when they load them."""
    for host in filter(shares_caches, deployment.hosts):
        needed = parts_needed(deployment, host)
        here = on_this_host(deployment, host) if needed else deployment
        for kind, info in here.models:
            if lacking := missing(info.path, needed.get(kind, ())):
                raise ConfigError(
                    f"The {kind} {info.path} {clause(lacking)}, which this machine computes; copy "
                    "the files there, or divide the layers differently."
                )
