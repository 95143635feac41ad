"""Finds the models that the launcher's machine lacks on other hosts."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pipespec.cluster.weights.local import shares_caches
from pipespec.cluster.weights.peer import Peer, PeerSource, at_once
from pipespec.config.hosts import HostsFile
from pipespec.config.schema import Config
from pipespec.engine.checkpoint.model_path import can_be_fetched
from pipespec.engine.checkpoint.parts.folder import Repository
from pipespec.engine.checkpoint.parts.opening import open_repository
from pipespec.engine.checkpoint.parts.parts_file import RECORDS
from pipespec.engine.checkpoint.parts.range_source import COMMIT
from pipespec.engine.formats.gguf_file import part_names
from pipespec.errors import ModelError
from pipespec.system.validation import home_expanded

MOST_BYTES = 2**50  # of a file that another host describes


def find_on_hosts(config: Config, hosts_file: HostsFile) -> dict[str, Path]:
    """Checkpoints without their tensors, in the parts cache here, of the models that another host
    has whole at the path that the settings or its entry name, by their names in `model.`.

    Models that are here or on the hub, or that no host has, are left out. Raises HostFailed if a
    host cannot be asked; ModelError if no host has all files of one.
    """
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
    others = [host for host in hosts_file.hosts if not (host.by_hand or shares_caches(host))]
    if not absent or not others:
        return {}
    errors: dict[str, ModelError] = {}

    def describe(peer: Peer) -> dict[str, tuple[Peer, Repository, str | None]]:
        peer.require_version()
        found = {}
        for kind, path in absent.items():
            try:
                told = peer.call("describe", kind=kind, path=getattr(peer.host, kind) or path)
                if told is not None:
                    found[kind] = peer, *described(told, peer.name)
            except ModelError as error:
                errors.setdefault(kind, error)
        return found

    with ExitStack() as stack:
        answers = at_once([stack.enter_context(Peer(host)) for host in others], describe)
        # Of several hosts that have one, the first in the hosts file.
        found = {kind: each for answer in reversed(answers) for kind, each in answer.items()}
        for kind in errors.keys() - found.keys():
            raise errors[kind]
        return {
            kind: open_repository(PeerSource(peer, kind), repository, file) / (file or "")
            for kind, (peer, repository, file) in found.items()
        }


def described(told: Any, host: str) -> tuple[Repository, str | None]:
    """What another host says that its checkpoint is, and its GGUF file if it is one: its folder
    here is never one of the hub, and no file is outside that. Raises ModelError."""
    try:
        found, file = Repository.from_json(told["repository"]), told["file"]
        sized = found.files.values()
        safe = (
            all(name == os.path.basename(name) and name.strip(".") for name in found.files)
            and all(type(each.size) is int and 0 <= each.size < MOST_BYTES for each in sized)
            and RECORDS not in found.files
            and (file is None or found.files.keys() >= {*part_names(file)})
            and "/" not in found.repo
            and isinstance(found.path, str)
            and COMMIT.fullmatch(found.commit) is not None
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ModelError(
            f"{host}: what it says about its checkpoint is of no use ({type(error).__name__}); "
            "look at pipespec there"
        ) from error
    if not safe:
        raise ModelError(f"{host}: {found.repo!r} is no folder of one checkpoint; look there")
    return found, file
