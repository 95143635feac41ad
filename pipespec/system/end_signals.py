"""Signals that ask a command to end: they unwind the stack, so that no process is left behind."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# Seconds until a signal is delivered again that met a callback.
AGAIN_S = 0.01

_asked: int | None = None  # the signal that has come


class Terminated(KeyboardInterrupt):
    """A signal other than Ctrl-C; everything is cleaned up as for Ctrl-C."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the stack as Ctrl-C does. A signal that comes while Python runs a
    callback which must not raise, as it does at every import, would be lost; it is delivered once
    more. One that a library swallows is raised by `raise_swallowed`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    global _asked
    here = threading.get_ident()

    def end(number: int, _: FrameType | None) -> None:
        global _asked
        _asked = number
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
        _asked = None
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


def raise_swallowed() -> None:
    """Raise Terminated if a signal has come and the stack was not unwound, for what waits for long.
    Code that calls this would not run any more, had nothing between it and the signal caught what
    the handler raised: C code that asks whether an object has an attribute, for one."""
    if _asked is not None and threading.current_thread() is threading.main_thread():
        raise Terminated(_asked)
