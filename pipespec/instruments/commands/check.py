"""`pipespec check`: what this machine can run."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from pipespec.console.arguments import finish, overrides
from pipespec.console.terminal import show, write
from pipespec.errors import ConfigError, print_error

if TYPE_CHECKING:
    from pipespec.console.arguments import Commands


def add(commands: Commands) -> None:
    """Describe the command."""
    finish(commands.add_parser("check", help="say what this machine can run"), run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Say what this machine can run; 0 if `generate` can."""
    if overrides(rest, arguments.known_options):
        raise ConfigError(f"`pipespec check` takes no settings, but got {rest[0]!r}.")

    from pipespec.instruments.diagnostics.machine_check import check_machine, table

    findings = check_machine()
    if arguments.json:
        write(json.dumps(findings, indent=2) + "\n")
    else:
        show(table(findings))
    for problem in findings["problems"]:
        print_error(f"pipespec: {problem}")
    return 0 if findings["ok"] else 1
