"""`pipespec launch`: start the hosts of a hosts file, show their output, end them together."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pipespec.cli.up import refuse_trace, stay
from pipespec.client.registry import check_name
from pipespec.config.hosts import load_hosts
from pipespec.console.arguments import finish, overrides

if TYPE_CHECKING:
    from pipespec.console.arguments import Commands


def add(commands: Commands) -> None:
    """Describe the command."""
    command = commands.add_parser(
        "launch",
        show_settings=True,
        help="start the hosts of a hosts file and stay with them",
        usage="pipespec launch [--measure] [--name NAME] [--json] HOSTS.YAML [SETTING=VALUE ...]",
        description="Start every rank of a hosts file over SSH, each host through torchrun's "
        "launcher, and write their output to standard error, with worker and rank in front. "
        "Ctrl-C, or a fault from which the cluster cannot recover, ends all of them. Meanwhile "
        "`pipespec generate --on NAME` sends requests to it.",
    )
    command.add_argument("hosts", metavar="HOSTS.YAML", help="the file that names the hosts")
    command.add_argument("--name", help="its name (that in the file)")
    command.add_argument(
        "--measure", action="store_true", help="place layers and draft by measured times"
    )
    finish(command, run, starts=True)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Start the cluster and stay with it."""
    settings = [f"cluster={arguments.hosts}", *overrides(rest, arguments.known_options)]
    refuse_trace(settings, "launch")
    name = load_hosts(arguments.hosts).name if arguments.name is None else arguments.name
    check_name(name)
    return stay(name, settings, as_json=arguments.json, measure=arguments.measure)
