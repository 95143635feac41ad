"""The command line: `pipespec generate`, `bench`, `up` and the others in `COMMANDS`. Each command
is a module of `pipespec.cli`, or of `pipespec.extras.commands` if that is there. torch and
transformers are imported only by the commands that need them, so that help and mistakes are
answered at once."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType

from pipespec.cli import cache, down, generate, invite, join, logs, serve, status, up
from pipespec.console.arguments import Parser
from pipespec.console.terminal import write
from pipespec.errors import ConfigError, is_of_extras
from pipespec.system.end_signals import ended_by_signals
from pipespec.system.exit_codes import SIGNALLED, exit_code_of


def _commands() -> tuple[ModuleType, ...]:
    extra = []
    for name in ("bench", "plan", "doctor"):
        try:
            extra.append(import_module(f"pipespec.extras.commands.{name}"))
        except ModuleNotFoundError as error:
            if not is_of_extras(error):
                raise
    return (generate, *extra, cache, up, invite, join, serve, down, status, logs)


COMMANDS = _commands()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the process's exit code."""
    try:
        with ended_by_signals():
            return exit_code_of(_run, sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt as interrupt:
        return SIGNALLED + getattr(interrupt, "number", signal.SIGINT)


def _run(argv: list[str]) -> int:
    arguments, rest = _parser().parse_known_args(argv)
    if arguments.version:
        from pipespec.system.versions import package_version

        write(f"pipespec {package_version('pipespec') or '(not installed)'}\n")
        return 0
    run_command: Callable[[argparse.Namespace, list[str]], int] | None = arguments.command
    if run_command is None:
        raise ConfigError("No command was given; see pipespec --help.")
    try:
        return run_command(arguments, rest)
    except ModuleNotFoundError as error:
        if not is_of_extras(error):
            raise
        raise ConfigError(f"This needs {error.name}, which is not installed here.") from error


def _parser() -> Parser:
    parser = Parser(
        prog="pipespec",
        description="Lossless speculative decoding of one large model over a pipeline of stages.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and end")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser
