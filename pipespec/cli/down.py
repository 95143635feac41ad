"""`pipespec down`: end a cluster that `pipespec up` started."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING

from pipespec.cli.arguments import finish, overrides
from pipespec.cli.terminal import write
from pipespec.client.registry import clear, entry, left
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
        description="End a cluster and wait until nothing of it is left but its log. Requests that "
        "are still open fail. Of one that was killed, remove what it left; what it had not "
        "finished is then forgotten.",
    )
    command.add_argument("name", nargs="?", metavar="NAME", help="which (the only one)")
    finish(command, run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """End a cluster."""
    if overrides(rest, arguments.known_options):
        raise ConfigError(f"`pipespec down` takes one name and no settings, but got {rest[0]!r}.")
    name = arguments.name
    if name is not None and left(name):
        clear(name)
        tell(name, f"{name} had ended already; what it left is removed.", arguments)
        return 0
    found = entry(name)
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
    tell(found.name, f"{found.name} has ended.", arguments)
    return 0


def tell(name: str, sentence: str, arguments: argparse.Namespace) -> None:
    """Say what was done to the cluster of a name."""
    write((json.dumps({"name": name}) if arguments.json else sentence) + "\n")
