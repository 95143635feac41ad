"""The command line: `pipespec generate`, `bench`, `up` and the others in `COMMANDS`.

Each command is a module of `pipespec.cli` or `pipespec.instruments.commands`. torch and
transformers are imported only by the commands that need them, so that help and mistakes are
answered at once.
"""

from __future__ import annotations

import _thread
import argparse
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from pipespec.cli import (
    cache,
    down,
    fetch,
    generate,
    invite,
    join,
    launch,
    serve,
    status,
    up,
    upgrade,
)
from pipespec.console.arguments import Parser
from pipespec.console.terminal import write
from pipespec.errors import ConfigError
from pipespec.instruments.commands import bench, check, compare, doctor, partition, plan, profile
from pipespec.system.exit_codes import SIGNALLED, exit_code_of
from pipespec.system.resource_limits import require_resources

# Seconds until a signal is delivered again that met a callback.
AGAIN_S = 0.01

COMMANDS = (
    generate,
    bench,
    compare,
    plan,
    profile,
    check,
    doctor,
    partition,
    fetch,
    cache,
    launch,
    up,
    invite,
    join,
    serve,
    upgrade,
    down,
    status,
)


class Terminated(KeyboardInterrupt):
    """A signal other than Ctrl-C; everything is cleaned up as for Ctrl-C."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the process's exit code."""
    try:
        with _ended_by_signals():
            return exit_code_of(_run, sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt as interrupt:
        return SIGNALLED + getattr(interrupt, "number", signal.SIGINT)


def _run(argv: list[str]) -> int:
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if arguments.version:
        from pipespec.system.versions import package_version

        write(f"pipespec {package_version('pipespec') or '(not installed)'}\n")
        return 0
    run_command: Callable[[argparse.Namespace, list[str]], int] | None = arguments.command
    if run_command is None:
        raise ConfigError("No command was given; see pipespec --help.")
    if arguments.starts and getattr(arguments, "on", None) is None:
        require_resources()  # before anything is imported that needs it
    return run_command(arguments, rest)


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


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that no process is left behind.

    A signal that comes while Python runs a callback which must not raise, as it does at every
    import, would be lost; it is delivered once more.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    here = threading.get_ident()

    def end(number: int, _: FrameType | None) -> None:
        raise Terminated(number)

    def again(number: int) -> None:
        time.sleep(AGAIN_S)
        signal.pthread_kill(here, number)

    def swallowed(unraisable: sys.UnraisableHookArgs) -> None:
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            # This can be within any lock, so no `threading`.
            number = getattr(unraisable.exc_value, "number", signal.SIGINT)
            _thread.start_new_thread(again, (number,))
        else:
            hook(unraisable)

    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # and not what nohup or a caller has set
            before[number] = signal.signal(number, end)
    hook, sys.unraisablehook = sys.unraisablehook, swallowed
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)
