"""A child whose progress its parent watches, with limits of a fraction of a second."""

import os
import signal
import subprocess
import sys
import threading
import time
from mmap import mmap
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from pipespec.system import liveness
from pipespec.system.liveness import LATE_S, LOADING_S, USUAL_STEPS, StepTimes, Waiting, Watch
from tests.helpers.waiting import until

CHILD = """
import collections, itertools, sys, threading, time
from mmap import mmap
from pipespec.system.liveness import SIZE, Waiting, progress
def loop():
    while True: pass
def loop_holding_the_gil():
    collections.deque(itertools.repeat(0), maxlen=0)
def beside(do):
    threading.Thread(target=do, daemon=True).start()
def beat():
    while True:
        progress.beat()
        time.sleep(.01)
progress.share(mmap(int(sys.argv[1]), SIZE))
beside(beat)
print("ready", flush=True)
exec(sys.argv[2])
"""
WORKING, WAITING, LOADING = (
    "progress.begin(.3)\n",
    "Waiting().__enter__()\n",
    "progress.begin(.5)\n",
)
READ = "file = open('/dev/zero', 'rb')\nwhile True: file.read(2**21); time.sleep(.02)"
COUNT = "while True: progress.count(); time.sleep(.02)"
NO_PROGRESS, LOOPED, STOPPED = "it made no progress", "it looped", "a signal had stopped it"
LOOKS = 60


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "stop", "expected"),
    [
        (WORKING + "loop()", False, NO_PROGRESS),
        (WORKING + "loop_holding_the_gil()", False, NO_PROGRESS),
        (WORKING + "time.sleep(99)", False, NO_PROGRESS),
        (WORKING + COUNT, False, None),
        (WORKING + COUNT, True, STOPPED),
        (WAITING + "time.sleep(99)", False, None),
        (WAITING + "time.sleep(99)", True, STOPPED),
        (WAITING + "loop()", False, LOOPED),
        (WAITING + "beside(loop_holding_the_gil)\ntime.sleep(99)", False, LOOPED),
        # Such as a grammar that is compiled.
        (WAITING + "beside(loop)\ntime.sleep(99)", False, None),
        (LOADING + READ, False, None),
        (LOADING + "loop()", False, NO_PROGRESS),
    ],
)
def test_process_is_ended_if_it_makes_no_progress_and_else_not(
    program: str, stop: bool, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"LOOK_S": 0.1, "LOOP_S": 0.3, "STOPPED_S": 0.2, "LOADING_S": 0.5}
    for name, value in limits.items():
        monkeypatch.setattr(liveness, name, value)
    said: list[str | None] = []
    with TemporaryFile() as file:
        os.ftruncate(file.fileno(), liveness.SIZE)
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(file.fileno()), program],
            pass_fds=[file.fileno()],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[3],
        )
        try:
            assert child.stdout is not None and child.stdout.readline()
            if stop:
                child.send_signal(signal.SIGSTOP)
            watch = Watch(mmap(file.fileno(), liveness.SIZE), child.pid)

            def look() -> bool:
                said.append(watch.look())
                return said[-1] is not None or (expected is None and len(said) > LOOKS)

            until(look)
        finally:
            child.kill()
            child.communicate()
        assert watch.look() is None, "it has ended"
    assert (said[-1] or "").startswith(expected or "") and bool(said[-1]) == bool(expected)


def shared() -> tuple[liveness.Progress, memoryview]:
    progress, memory = liveness.Progress(), memoryview(bytearray(liveness.SIZE))
    progress.share(memory)
    return progress, memory.cast("q")


def test_a_step_is_late_after_many_times_its_usual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, cells = shared()
    now = [0.0]
    monkeypatch.setattr(liveness, "progress", progress)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress.begin(LATE_S)
    times = StepTimes()

    def late_s(rows: int, took_s: float) -> float:
        with times.step(rows):
            now[0] += took_s
            return cells[1] / 1000

    assert late_s(1, 0.1) == LOADING_S, "the first one is not known"
    assert late_s(1, 0.1) == LATE_S
    assert late_s(64, 5.0) == 20 * 0.1 * 64, "as of so many single rows"
    assert late_s(100, 5.0) == USUAL_STEPS * 5.0, "as of about as many"
    with Waiting():
        assert cells[1] == 0
    assert cells[1] == LATE_S * 1000
    with progress.part(LOADING_S):
        assert late_s(1, 0.1) == LOADING_S
    assert cells[1] == LATE_S * 1000


def test_only_the_thread_that_shares_its_progress_counts() -> None:
    progress, cells = shared()
    before = cells[:2].tolist()
    for call in (progress.count, lambda: progress.begin(1.0), lambda: progress.count_step(1.0)):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert cells[:2].tolist() == before
    assert progress.describe() == f"{before[0]} 1 0"
    progress.beat()
    assert cells[2] == 1
