"""Signals that ask a command to end."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import pytest

from pipespec.system.end_signals import Terminated, ended_by_signals, raise_swallowed


def test_a_signal_that_was_swallowed_is_raised_by_what_waits() -> None:
    with ended_by_signals():
        raise_swallowed()
        with suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Terminated) as raised:
            raise_swallowed()
    assert raised.value.number == signal.SIGTERM


def test_what_comes_after_a_command_is_not_asked_to_end() -> None:
    with suppress(Terminated), ended_by_signals():
        os.kill(os.getpid(), signal.SIGTERM)
    raise_swallowed()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
