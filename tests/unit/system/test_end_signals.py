import os
import signal
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest

from pipespec.system.end_signals import Terminated, ended_by_signals, raise_swallowed
from tests.helpers.waiting import until


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


# A command that has started a process which ignores signals, and waits for its end for ever.
STUCK = """
import subprocess, sys, time
from pipespec.cli import main
from pipespec.extras.commands import doctor

def run(arguments, rest):
    ignores = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True)"
    child = subprocess.Popen([sys.executable, "-c", ignores + "; time.sleep(600)"],
        stdout=subprocess.PIPE, start_new_session=True)
    child.stdout.readline()
    try:
        print(child.pid, flush=True)
        time.sleep(600)
    finally:
        {clean_up}

doctor.run = run
sys.exit(main.main(["doctor"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("clean_up", ["child.wait()", "time.sleep(600)"])
def test_second_signal_ends_a_command_that_waits_and_what_computes_for_it(clean_up: str) -> None:
    command = [sys.executable, "-c", STUCK.replace("{clean_up}", clean_up)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        child = psutil.Process(int(process.stdout.readline()))
        process.send_signal(signal.SIGINT)
        said = process.stderr.readline()
        assert said == "ending what was started; Ctrl-C again ends it at once\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 128 + signal.SIGINT  # 1.5 s on a machine with nothing else
        assert process.stderr.read() == ""
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
