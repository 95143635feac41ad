"""The exit codes of commands, and the last line that they write to standard error. An error that
the user can remedy is a PipespecError, which is shown as one sentence. Any other exception is a bug
of pipespec, which is shown with its traceback."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable

from pipespec.errors import PipespecError, interrupt_cause, print_error
from pipespec.system.result_cache import cache_compiled_code

LONGEST_LINE, LONGEST_MESSAGE = 200, 2000
STDERR = 2  # the file descriptor
# What a shell reports for a program that a signal ended.
SIGNALLED = 128


class OutputClosedError(Exception):
    """The reader of standard output has closed it."""


def exit_code_of(command: Callable[..., int], *args: object) -> int:
    """Run `command(*args)`. Returns its exit code, or that of its error, which is printed."""
    cache_compiled_code()
    hook, threading.excepthook = threading.excepthook, _report_thread_bug
    try:
        return command(*args)
    except Exception as error:  # noqa: BLE001 - any error ends here
        if (interrupt := interrupt_cause(error)) is not None:
            raise interrupt from None
        return _report(error)
    finally:
        threading.excepthook = hook


def _report(error: Exception) -> int:
    if isinstance(error, PipespecError):
        print_error(f"pipespec: {one_line(str(error))}")
        return error.exit_code
    if isinstance(error, OutputClosedError):
        # Python writes what is still buffered when it ends; let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SIGNALLED + signal.SIGPIPE
    report_bug(error)
    return os.EX_SOFTWARE


def one_line(message: str) -> str:
    """A message as a terminal may show it: names in it may have any characters, and any length."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
    if len(text) <= LONGEST_MESSAGE:
        return text
    return f"{text[: LONGEST_MESSAGE // 2]}…{text[-LONGEST_MESSAGE // 2 :]}"


def report_bug(error: BaseException) -> None:
    """Print the traceback of an unexpected error, and a last line that says what it is."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    first = ": ".join([type(error).__name__, *lines[:1]])[:LONGEST_LINE]
    text = "".join(traceback.format_exception(error))
    print_error(f"{text}pipespec: internal error: {first}; the traceback is above")


def _report_thread_bug(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_value is not None and not isinstance(arguments.exc_value, SystemExit):
        report_bug(arguments.exc_value)
