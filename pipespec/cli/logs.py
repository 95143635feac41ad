"""`pipespec logs`: what a cluster and its hosts have said."""

from __future__ import annotations

import argparse
import json
import time

from pipespec.client.registry import LOG, check_name, entries, entry, folder, log_of, up_here
from pipespec.console.arguments import AddParser, add_name, finish, refuse_settings
from pipespec.console.terminal import write
from pipespec.errors import ConfigError

# How often a log is read that is followed, and how much of it at once.
LOOK_S, CHARACTERS = 0.2, 1 << 16


def add(add_parser: AddParser) -> None:
    command = add_parser(
        description="Print the log of a cluster that runs in the background: starts, faults, and "
        "what the workers of all its hosts print. The log stays when the cluster has ended.",
    )
    add_name(command, "the cluster (by default the only or newest one)")
    command.add_argument(
        "--follow", action="store_true", help="print what comes, until the cluster has ended"
    )
    finish(command, run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    refuse_settings(arguments, rest)
    name = only_name() if arguments.name is None else arguments.name
    check_name(name)
    log = log_of(name)
    if log is None:
        found = entry(name)
        where = f"the terminal or service that started it (process {found.owner.pid})"
        if not found.owner.here:
            host = found.cluster.host if found.cluster else found.owner.machine
            where = f"{host}; run `pipespec logs {name}` there"
        raise ConfigError(f"The messages of the cluster {name!r} go to {where}.")
    if arguments.json:
        write(json.dumps({"name": name, "log": str(log)}) + "\n")
        return 0
    with log.open(errors="replace") as stream:
        while True:
            ended = not up_here(name)  # before it is read, so that the last lines are too
            while text := stream.read(CHARACTERS):
                write(text)
            if ended or not arguments.follow:
                return 0
            time.sleep(LOOK_S)


def only_name() -> str:
    """The only cluster, or if none is up that of the newest log. Raises ConfigError."""
    kept = sorted(folder().glob(f"*{LOG}"), key=lambda log: log.stat().st_mtime)
    return kept[-1].name.removesuffix(LOG) if kept and not entries() else entry(None).name
