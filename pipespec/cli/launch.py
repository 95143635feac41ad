"""`pipespec launch`: start the hosts of a hosts file, show what they say, end them together."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pipespec.cli.arguments import finish, overrides
from pipespec.cli.up import stay
from pipespec.client.registry import check_name
from pipespec.config.hosts import load_hosts

if TYPE_CHECKING:
    from pipespec.cli.arguments import Commands


def add(commands: Commands) -> None:
    """Describe the command."""
    command = commands.add_parser(
        "launch",
        show_settings=True,
        help="start the hosts of a hosts file and stay with them",
        usage="pipespec launch [--measure] [--name NAME] [--json] HOSTS.YAML [SETTING=VALUE ...]",
        description="Start every rank of a hosts file over SSH, each host through torchrun's "
        "launcher, and write what they say to standard error, with worker and rank in front. "
        "Ctrl-C, or an error that the cluster cannot mend, ends all of them. Meanwhile `pipespec "
        "generate --on NAME` asks it.",
    )
    command.add_argument("hosts", metavar="HOSTS.YAML", help="the file that names the hosts")
    command.add_argument("--name", help="what to call it (the name in the file)")
    command.add_argument(
        "--measure", action="store_true", help="place layers and draft by measured times"
    )
    finish(command, run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Start the cluster and stay with it."""
    settings = [f"cluster={arguments.hosts}", *overrides(rest, arguments.known_options)]
    name = load_hosts(arguments.hosts).name if arguments.name is None else arguments.name
    check_name(name)
    return stay(name, settings, as_json=arguments.json, measure=arguments.measure)
