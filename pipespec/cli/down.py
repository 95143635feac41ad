"""`pipespec down`: end a cluster that `pipespec up` started."""

from __future__ import annotations

import argparse
import json
import time

from pipespec.client.registry import Owner, clear, entry, left, note_end, server_of
from pipespec.console.arguments import AddParser, add_name, finish, refuse_settings
from pipespec.console.terminal import write
from pipespec.errors import ConfigError, PipespecError

# How long to wait for a cluster that does not end.
PATIENCE_S, LOOK_S = 30.0, 0.05


def add(add_parser: AddParser) -> None:
    command = add_parser(
        description="End a cluster and wait until nothing of it is left but its log; the server "
        "too, if `pipespec serve` started it. Requests that are still open fail. Of a "
        "cluster that was killed, remove the files and the unfinished requests.",
    )
    add_name(command)
    finish(command, run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    refuse_settings(arguments, rest)
    name = arguments.name
    if name is not None and left(name):
        server = server_of(name)
        if server is None:
            clear(name)
            sentence = f"{name} had ended already; its files are removed."
        else:  # it is about to start the cluster again
            note_end(name)
            server.end()
            await_end(name, server)
            sentence = f"{name} has ended, and its server too."
        report_done(name, sentence, arguments)
        return 0
    found = entry(name)
    owner = found.owner
    if not owner.here:
        host = found.cluster.host if found.cluster else owner.machine
        raise ConfigError(
            f"The cluster {found.name!r} was started on {host}; run `pipespec down {found.name}` "
            "there."
        )
    server = server_of(found.name)
    note_end(found.name)
    owner.end()
    await_end(found.name, owner)
    if server is not None:  # it ends by itself with a cluster that was asked to
        await_end(found.name, server)
    also = "" if server is None else ", and its server too"
    report_done(found.name, f"{found.name} has ended{also}.", arguments)
    return 0


def await_end(name: str, owner: Owner) -> None:
    """Wait until a process of the cluster of a name has ended. Raises PipespecError."""
    deadline = time.monotonic() + PATIENCE_S
    while not owner.gone:
        if time.monotonic() > deadline:
            raise PipespecError(
                f"The cluster {name!r} (process {owner.pid}) has not ended within "
                f"{PATIENCE_S:g} seconds; end it with `kill -9 {owner.pid}`."
            )
        time.sleep(LOOK_S)


def report_done(name: str, sentence: str, arguments: argparse.Namespace) -> None:
    write((json.dumps({"name": name}) if arguments.json else sentence) + "\n")
