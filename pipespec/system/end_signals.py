"""Signals that ask a command to end: the first one unwinds the stack, so that no process is left
behind, and the second one ends what computes for the command at once, and the command soon."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from pipespec.system.exit_codes import SIGNALLED, STDERR

# Seconds until a signal is delivered again that met a callback.
AGAIN_S = 0.01
# Seconds until a command that goes on ending says so; and that it may last after a second signal.
QUIET_S, AT_ONCE_S = 0.5, 1.5

_command = False  # whether a command runs
_asked: int | None = None  # the signal that has come to it
_said = False  # whether it was said what is waited for


class Terminated(KeyboardInterrupt):
    """A signal other than Ctrl-C; everything is cleaned up as for Ctrl-C."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP unwind the stack, and the second of them ends the process
    (`end_at_once`). A signal that comes while Python runs a callback which must not raise, as it
    does at every import, would be lost; it is delivered once more. One that a library swallows is
    raised by `raise_swallowed`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    global _asked, _command, _said
    here = threading.get_ident()

    def end(number: int, _: FrameType | None) -> None:
        if not first_signal(number):
            return
        if number == signal.SIGINT:
            _thread.start_new_thread(explain, ())
            raise KeyboardInterrupt
        raise Terminated(number)

    def explain() -> None:
        time.sleep(QUIET_S)
        if _asked is not None and not _said:
            say_ending("ending what was started; Ctrl-C again ends it at once")

    def again(number: int) -> None:
        global _asked
        _asked = None  # it counts once
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
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # And not what nohup or a caller has set.
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            before[number] = signal.signal(number, end)
    hook, sys.unraisablehook = sys.unraisablehook, swallowed
    _command = True
    try:
        yield
    finally:
        _asked, _said, _command = None, False, False
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


def say_ending(sentence: str) -> None:
    """Say what is waited for after a signal, and what a second one does; from a handler, too."""
    global _said
    _said = True
    os.write(STDERR, f"{sentence}\n".encode())


def first_signal(number: int) -> bool:
    """Whether this is the first signal that asks the command to end; a further one ends it."""
    global _asked
    if _asked is None:
        _asked = number if _command else None
        return True
    end_at_once(number)
    return False


def end_at_once(number: int) -> None:
    """End what computes for this process now, so that its clean-up waits for nothing, and the
    process itself within AT_ONCE_S, as what it has started then notices. From any thread."""

    def exit_soon() -> None:
        time.sleep(AT_ONCE_S)
        os._exit(SIGNALLED + number)

    def kill() -> None:
        import psutil

        for process in psutil.Process().children(recursive=True):
            # Those that look after others clean up for them; others remove a folder.
            with suppress(psutil.Error):
                if not process.children() and process.name() not in ("sh", "rm"):
                    process.kill()

    for each in (exit_soon, kill):
        _thread.start_new_thread(each, ())


def raise_swallowed() -> None:
    """Raise Terminated if a signal has come and the stack was not unwound, for what waits for long.
    Code that calls this would not run any more, had nothing between it and the signal caught what
    the handler raised: C code that asks whether an object has an attribute, for one."""
    if _asked is not None and threading.current_thread() is threading.main_thread():
        raise Terminated(_asked)
