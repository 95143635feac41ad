"""Finds models that this machine lacks in the folders of other hosts."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from pipespec.cluster.host_weights import shares_caches
from pipespec.cluster.weight_peer import WeightPeer, connected
from pipespec.config.hosts import HostsFile
from pipespec.config.schema import Config
from pipespec.engine.checkpoint.model_path import can_be_fetched
from pipespec.engine.checkpoint_parts.blueprint import Blueprint
from pipespec.errors import ModelError
from pipespec.system.validation import home_expanded


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
    with ExitStack() as stack, ThreadPoolExecutor(len(others)) as pool:
        peers = [stack.enter_context(connected(host, {})) for host in others]

        def describe(peer: WeightPeer) -> dict[str, Blueprint | ModelError | None]:
            peer.require_version()
            return {kind: _description(peer, kind, path) for kind, path in absent.items()}

        try:
            answers = [*pool.map(describe, peers)]
        except BaseException:
            for peer in peers:  # threads wait for them
                peer.end()
            raise
    found = {}
    for kind in absent:
        described = [each[kind] for each in answers]
        plans = [each for each in described if isinstance(each, Blueprint)]
        errors = [each for each in described if isinstance(each, ModelError)]
        if plans:
            found[kind] = plans[0].build()
        elif errors:
            raise errors[0]
    return found


def _description(peer: WeightPeer, kind: str, path: str) -> Blueprint | ModelError | None:
    """The blueprint of a model on a host; None: it is not there; or why it is of no use."""
    try:
        described = peer.call("describe", path=getattr(peer.host, kind) or path)
    except ModelError as error:
        return error
    try:
        return None if described is None else Blueprint.of_other_host(described)
    except ModelError as error:
        return ModelError(f"{peer.name}: {error}")
