"""A process is told apart from others that have had its number."""

from __future__ import annotations

import os
import subprocess

import psutil
import pytest

from pipespec.system.process import CLOCK_DRIFT_S, is_ours, running, started


def test_this_process_runs_and_is_ours():
    found = running(os.getpid(), started())
    assert found is not None
    assert found.pid == os.getpid()
    assert is_ours(found)


def test_a_process_that_began_at_another_time_is_another():
    assert running(os.getpid(), started() - 2 * CLOCK_DRIFT_S) is None
    assert running(os.getpid(), started() + CLOCK_DRIFT_S / 2) is not None


@pytest.mark.parametrize("pid", [0, -1, 2**22 + 1, 2**70])
def test_a_number_that_no_process_has(pid):
    assert running(pid, started()) is None


def test_a_process_that_has_ended_runs_no_more_though_nobody_asked_how():
    with subprocess.Popen(["true"]) as child:
        created = psutil.Process(child.pid).create_time()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert running(child.pid, created) is None
    assert running(child.pid, created) is None
