"""Where the models of a deployment are: on this host, or on another one."""

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


def on_this_host(
    deployment: Deployment, host: Host, needed: Mapping[str, Collection[str]] | None = None
) -> Deployment:
    """The deployment with the checkpoints at their paths on this host, which computes the parts
    `needed` of each model; None: those of the first epoch. Raises ConfigError."""
    needed = parts_needed(deployment, host) if needed is None else needed

    def here(path: Path, given: str | None, kind: str) -> Path:
        found = Path(given or "").expanduser()
        if given is None:
            found = own_path(path, deployment.shared.get(kind), needed.get(kind, ())) or path
        if not is_checkpoint(found):
            what = "folder" if folder_of_checkpoint(found) == found else "file"
            raise ConfigError(
                f"Host {host.name} has no {what} {found}; put the {kind} model there, or name its "
                f"{what} as {kind} of that host in the hosts file."
            )
        return found

    own: dict[str, Any] = {}
    for kind, info in deployment.models:
        given = getattr(host, kind)
        if kind == "target" or given is not None or (kind in needed and kind in deployment.shared):
            path = here(info.path, given, kind)
            same = path.absolute() == info.path.absolute()
            own[kind] = info if same else inspect(str(path))
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
