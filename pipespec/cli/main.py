"""The command line: `pipespec generate`, `bench`, `up` and the others in `COMMANDS`, of which each
is a module that is imported only when it is asked for. No module imports torch or Transformers
before it needs them, so that help and mistakes are answered at once."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

from pipespec.console.arguments import Parser
from pipespec.console.terminal import write
from pipespec.errors import ConfigError, is_of_extras
from pipespec.system.end_signals import ended_by_signals
from pipespec.system.exit_codes import SIGNALLED, exit_code_of

PACKAGE = Path(__file__).parents[1]
# The folder of each command's module, and what the help says of it. Those of extras may be missing.
COMMANDS = {
    "generate": ("cli", "decode one prompt"),
    "bench": ("extras/commands", "decode a data set of prompts and measure"),
    "plan": (
        "extras/commands",
        "predict what a cluster will do, and say how to lay it out and how to decode",
    ),
    "doctor": (
        "extras/commands",
        "say what this machine can run, or whether hosts can work together",
    ),
    "cache": (
        "cli",
        "fetch weights to the hosts that compute them; list or remove what this host has",
    ),
    "up": ("cli", "start a cluster that stays up for many requests"),
    "invite": ("cli", "print a command with which one more host joins a cluster"),
    "join": ("cli", "let this host compute a part of a cluster that runs on another one"),
    "serve": ("cli", "answer HTTP requests as OpenAI does"),
    "down": ("cli", "end a cluster that `pipespec up` or `serve` started"),
    "status": ("cli", "the state of the clusters that `pipespec up` started"),
    "logs": ("cli", "what a cluster and its hosts have said"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the process's exit code."""
    try:
        with ended_by_signals():
            return exit_code_of(_run, sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt as interrupt:
        return SIGNALLED + getattr(interrupt, "number", signal.SIGINT)


def _run(argv: list[str]) -> int:
    try:
        arguments, rest = _parser(argv).parse_known_args(argv)
        if arguments.version:
            from pipespec.system.versions import package_version

            write(f"pipespec {package_version('pipespec') or '(not installed)'}\n")
            return 0
        run_command: Callable[[argparse.Namespace, list[str]], int] | None = arguments.command
        if run_command is None:
            raise ConfigError("No command was given; see pipespec --help.")
        return run_command(arguments, rest)
    except ModuleNotFoundError as error:
        if not is_of_extras(error):
            raise
        raise ConfigError(f"This needs {error.name}, which is not installed here.") from error


def _parser(argv: Sequence[str]) -> Parser:
    """A parser that knows the options of the command that is asked for."""
    parser = Parser(
        prog="pipespec",
        description="Lossless speculative decoding of one large model over a pipeline of stages.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and end")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(metavar="COMMAND")
    asked = next((word for word in argv if not word.startswith("-")), None)
    for name, (folder, sentence) in COMMANDS.items():
        add_parser = partial(commands.add_parser, name, help=sentence)
        if name == asked:
            import_module(f"pipespec.{folder.replace('/', '.')}.{name}").add(add_parser)
        elif (PACKAGE / folder / f"{name}.py").exists():
            add_parser()
    return parser
