"""`pipespec down`: end a cluster that `pipespec up` started."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING

from pipespec.cli.arguments import finish, overrides
from pipespec.cli.terminal import write
from pipespec.client.registry import entry
from pipespec.errors import ConfigError, PipespecError

if TYPE_CHECKING:
    from pipespec.cli.arguments import Commands

# A cluster that hangs is given up after so long.
PATIENCE_S = 30.0
LOOK_S = 0.05


def add(commands: Commands) -> None:
    """Describe the command."""
    command = commands.add_parser(
        "down",
        help="end a cluster that `pipespec up` started",
        description="End a cluster and wait until nothing of it is left. Requests that are still "
        "open fail.",
    )
    command.add_argument("name", nargs="?", metavar="NAME", help="which (the only one)")
    finish(command, run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """End a cluster."""
    if overrides(rest, arguments.known_options):
        raise ConfigError(f"`pipespec down` takes one name and no settings, but got {rest[0]!r}.")
    found = entry(arguments.name)
    owner = found.owner
    if not owner.here:
        host = found.cluster.host if found.cluster else owner.machine
        raise ConfigError(
            f"The cluster {found.name!r} was started on {host}; run `pipespec down {found.name}` "
            "there."
        )
    owner.end()
    deadline = time.monotonic() + PATIENCE_S
    while not owner.gone:
        if time.monotonic() > deadline:
            raise PipespecError(
                f"The cluster {found.name!r} (process {owner.pid}) has not ended within "
                f"{PATIENCE_S:g} seconds; end it with `kill -9 {owner.pid}`."
            )
        time.sleep(LOOK_S)
    told = json.dumps({"name": found.name}) if arguments.json else f"{found.name} has ended."
    write(told + "\n")
    return 0
