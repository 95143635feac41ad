"""How a command ends: its exit code, and what it says last on standard error.

What a user can mend is a PipespecError and one sentence. Anything else is a bug of ours: its
traceback goes to a file, and nobody has to read it who did not ask for it.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from pipespec.errors import PipespecError, tell
from pipespec.system.resources import state_folder

LONGEST_LINE = 200
STDERR = 2
# What a shell reports for a program that a signal ended.
SIGNALLED = 128


class OutputClosedError(Exception):
    """Whoever read our standard output has gone away."""


def concluded(run: Callable[[], int]) -> int:
    """What `run` returns, or the exit code of what it raises, once that was told."""
    fill_closed()
    hook, threading.excepthook = threading.excepthook, _told_of_thread
    try:
        if sys.stdout is None:
            raise PipespecError("Standard output is closed; open it, or send it to /dev/null.")
        return run()
    except PipespecError as error:
        tell(f"pipespec: {error}")
        return error.exit_code
    except OutputClosedError:
        # Python writes what is still buffered when it ends; let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SIGNALLED + signal.SIGPIPE
    except Exception as error:  # noqa: BLE001 - whatever nobody foresaw ends here
        tell_bug(error)
        return os.EX_SOFTWARE
    finally:
        threading.excepthook = hook


def fill_closed() -> None:
    """Put /dev/null where a standard stream is closed: else the next pipe, file or socket would
    get its number, and whatever is printed."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(number, True)
    os.close(number)


def tell_bug(error: BaseException) -> None:
    """Say what happened, and where the traceback is."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    first = ": ".join([type(error).__name__, *lines[:1]])[:LONGEST_LINE]
    text = "".join(traceback.format_exception(error))
    file = _kept(text)
    if file is None:
        tell(f"{text}pipespec: internal error: {first}; the traceback is above")
    else:
        tell(f"pipespec: internal error: {first}; the traceback is in {file}")


def _told_of_thread(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_value is not None and not isinstance(arguments.exc_value, SystemExit):
        tell_bug(arguments.exc_value)


def _kept(text: str) -> str | None:
    """The file that the text was written to, for this user alone; None if that cannot be."""
    for place in (state_folder, lambda: Path(tempfile.gettempdir())):
        try:
            place().mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(".txt", "internal-error-", place())
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
        except (OSError, RuntimeError):  # RuntimeError: there is no home folder
            continue
        return name
    return None
