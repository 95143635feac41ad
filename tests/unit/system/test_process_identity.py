"""A process is told apart from others that have had its number."""

import os
import subprocess

import psutil
import pytest

from pipespec.system.process_identity import (
    ROUNDING_S,
    find_process,
    is_ours,
    own_start_time,
    since_boot,
)


def test_this_process_runs_and_is_ours():
    found = find_process(os.getpid(), own_start_time())
    assert found.pid == os.getpid()
    assert is_ours(found)


def test_a_process_that_began_at_another_time_is_another():
    assert find_process(os.getpid(), own_start_time() - 2 * ROUNDING_S) is None
    assert find_process(os.getpid(), own_start_time() + ROUNDING_S / 2) is not None


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
def test_process_is_recognised_after_the_system_clock_was_set(step_s, monkeypatch):
    begun = own_start_time()
    boot_s = psutil.boot_time()
    # The kernel states its start by the wall clock: setting that clock moves it.
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: boot_s + step_s)
    assert find_process(os.getpid(), begun) is not None


@pytest.mark.parametrize("pid", [0, -1, 2**22 + 1, 2**70])
def test_a_number_that_no_process_has(pid):
    assert find_process(pid, own_start_time()) is None


def test_ended_process_that_was_not_reaped_counts_as_ended():
    with subprocess.Popen(["true"]) as child:
        created = since_boot(psutil.Process(child.pid))
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert find_process(child.pid, created) is None
    assert find_process(child.pid, created) is None
