"""Where the models of a deployment are: on this host, or on another one."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pipespec.cluster.deployment.deployment import Deployment
from pipespec.cluster.weights.distribution import Peer, at_once
from pipespec.cluster.weights.plan import parts_needed
from pipespec.config.hosts import Host, HostsFile
from pipespec.config.schema import Config
from pipespec.engine.checkpoint.model_path import can_be_fetched
from pipespec.engine.checkpoint.partial_checkpoint import clause, missing, open_repository, own_path
from pipespec.engine.checkpoint.parts.folder import Repository, folder_of_checkpoint, is_checkpoint
from pipespec.engine.checkpoint.parts.parts_file import RECORDS
from pipespec.engine.checkpoint.parts.sources import COMMIT, GivenSource
from pipespec.engine.inspection.inspection import inspect
from pipespec.errors import ConfigError, ModelError
from pipespec.system.validation import Unreadable, from_fields, home_expanded

MOST_BYTES = 2**50  # of a file that another host describes


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


def find_on_hosts(config: Config, hosts_file: HostsFile) -> dict[str, Path]:
    """Checkpoints without their tensors, in the parts cache here, of the models that another host
    has whole at the path that the settings or its entry name, by their names in `model.`. Models
    that are here or on the hub, or that no host has, are left out. Raises HostFailed if a host
    cannot be asked; ModelError if no host has all files of one."""
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
    others = [host for host in hosts_file.hosts if not (host.by_hand or host.shares_caches)]
    if not absent or not others:
        return {}
    found: dict[str, Path] = {}
    with ExitStack() as stack:
        peers = [stack.enter_context(Peer(host)) for host in others]
        for kind, path in absent.items():
            told = zip(peers, at_once(peers, partial(_asked, kind, path)), strict=True)
            # Of several hosts that have one, the first in the hosts file; if none has, an error.
            for peer, each in sorted(told, key=lambda pair: isinstance(pair[1], ModelError)):
                if isinstance(each, ModelError):
                    raise each
                if each is not None:
                    source = GivenSource(peer.name, peer.read)
                    found[kind] = open_repository(source, each, each.gguf)
                    break
    return found


def _asked(kind: str, path: str, peer: Peer) -> Repository | ModelError | None:
    """What a host says of its checkpoint; None: it has none; or why it is of no use."""
    try:
        told = peer.call("describe", path=getattr(peer.host, kind) or path)
        return None if told is None else described(told, peer.name)
    except ModelError as error:
        return error


def described(told: Any, host: str) -> Repository:
    """What another host says that its checkpoint is: its folder here is never one of the hub, and
    no file is outside that. Raises ModelError."""
    try:
        found = from_fields(Repository, told)
        safe = (
            all(name == os.path.basename(name) and name.strip(".") for name in found.files)
            and all(0 <= each.size < MOST_BYTES for each in found.files.values())
            and RECORDS not in found.files
            and "/" not in found.repo
            and found.path is not None
            and COMMIT.fullmatch(found.commit) is not None
        )
    except Unreadable as error:
        raise ModelError(
            f"{host}: what it says about its checkpoint is of no use ({type(error).__name__}); "
            "look at pipespec there"
        ) from error
    if not safe:
        raise ModelError(f"{host}: {found.repo!r} is no folder of one checkpoint; look there")
    return found
