"""The workers of a host, which its agent forks and watches. Another one is forked when a signal has
ended one; one that makes no progress is ended. All end with the agent, a process of one thread
without a CUDA context that has imported torch, the models and the entrypoint, so that seventeen
workers start almost as fast as one."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from mmap import mmap
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any, NoReturn

import psutil

from pipespec.errors import RankFailed
from pipespec.system import liveness
from pipespec.system.process_identity import die_with_parent

# Seconds for which a rank that lost a neighbour leaves the agent time to notice the neighbour.
_LINGER_S = 3.0
# Python or the agent handle these signals, and forked processes inherit the handlers: they raise,
# and a worker that raises ends the cluster.
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM)
CHUNK_BYTES = 2**16
# Seconds in which workers that were killed must be gone.
ENDING_S = 1.0
_NOT_RUNNING = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
# The variable in which a worker finds its name.
WORKER = "PIPESPEC_WORKER"


@dataclass(frozen=True)
class WorkerJob:
    """What the workers run: `entrypoint(*args)`, with the worker's name in the environment. Only
    the workers import the entrypoint, "module:function", and read the pickled tuple `args`.
    `titles` and `host` are names in messages. `logs`: the output of the workers is forwarded, line
    by line. A worker that a signal ended is replaced."""

    entrypoint: str
    args: bytes
    workers: tuple[str, ...]
    titles: tuple[str, ...]
    host: str
    logs: bool


def send_message(message: dict[str, Any]) -> None:
    """Write a message to the launcher."""
    with suppress(OSError):  # The launcher is gone; standard input ends then.
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(1, data) :]


def run_workers(
    directory: Path, job: WorkerJob, launcher: int, on_sign: Callable[[], object]
) -> dict[str, Any]:
    """Run workers until all have finished or one has failed; the last message. `launcher`: the
    descriptor of the launcher's signs of life, of which `on_sign` is called, and at whose end this
    ends. Raises EOFError then."""
    # Before the first fork: the system's library is loaded here.
    die_with_us = die_with_parent(os.getpid())

    def forked(number: int) -> _Worker:
        return _Worker(directory, number, job, die_with_us)

    running = {number: forked(number) for number in range(len(job.workers))}
    log = _Log(directory) if job.logs else None
    outcome: dict[str, Any] = {"ended": True}
    try:
        while running and "ended" in outcome:
            sentinels = [worker.process.sentinel for worker in running.values()]
            if launcher in connection.wait([launcher, *sentinels], liveness.LOOK_S):
                if not os.read(launcher, CHUNK_BYTES):
                    raise EOFError
                on_sign()
            present = []
            for number, worker in list(running.items()):
                if (code := worker.process.exitcode) is None:
                    present += [number] * worker.runs()
                    continue
                if code > 0:
                    outcome = {"failed": _failure(directory, number, job, code)}
                    break
                del running[number]
                if code < 0:
                    how, pid = worker.hung or how_it_ended(code), worker.process.pid
                    hung = worker.hung is not None
                    send_message({"died": number, "pid": pid, "how": how, "hung": hung})
                    running[number] = forked(number)
            send_message({"present": present})
            if log is not None:
                log.forward()
    finally:
        for worker in running.values():
            worker.process.kill()
        for worker in running.values():
            worker.process.join(ENDING_S)
    if log is not None:
        log.forward(last=True)
    return outcome


class _Worker:
    """A worker that this process has forked. `hung`: why it was ended, if it made no progress."""

    def __init__(
        self, directory: Path, number: int, job: WorkerJob, die_with_us: Callable[[], None]
    ) -> None:
        memory = mmap(-1, liveness.SIZE)
        self.process = multiprocessing.get_context("fork").Process(
            target=_work, args=(directory, number, job, die_with_us, memory)
        )
        self.process.start()
        assert self.process.pid is not None
        self._watch = liveness.Watch(memory, self.process.pid)
        self.hung: str | None = None

    def runs(self) -> bool:
        """Whether it was seen to run; one that makes no progress is ended."""
        if self.hung is None and (hung := self._watch.look()) is not None:
            self.hung = hung
            self.process.kill()
        with suppress(psutil.Error):  # it has just ended
            return psutil.Process(self.process.pid).status() not in _NOT_RUNNING
        return False


class _Log:
    """Forwards the output of the workers, line by line."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[Path, int] = {}  # bytes that were forwarded

    def forward(self, *, last: bool = False) -> None:
        """Forward what has come; `last`: a line that is not complete, too."""
        for path in sorted(self._directory.glob("*.std*")):
            with path.open("rb") as log:
                log.seek(self._read.get(path, 0))
                text = log.read()
            whole = len(text) if last else text.rfind(b"\n") + 1
            self._read[path] = self._read.get(path, 0) + whole
            for line in text[:whole].decode(errors="replace").splitlines():
                send_message({"log": int(path.stem), "line": line})


def _failure(directory: Path, number: int, job: WorkerJob, code: int) -> str:
    """The sentence about a worker that has failed: what it raised, or wrote last."""
    try:
        reason = (directory / f"{number}.raised").read_text()
    except FileNotFoundError:
        reason = last_line((directory / f"{number}.stderr").read_bytes())
    return f"{job.titles[number]} on host {job.host} ({how_it_ended(code)}): {reason}"


def last_line(output: bytes) -> str:
    """The last line that a process wrote, or the one with which the interpreter reports a crash."""
    lines = [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip()]
    # The interpreter follows a crash's cause with the stacks of its threads.
    crashes = [line for line in lines if line.startswith("Fatal Python error")]
    return (crashes or lines or ["it left no message."])[-1]


def how_it_ended(exitcode: int) -> str:
    return f"exit code {exitcode}" if exitcode >= 0 else signal.Signals(-exitcode).name


# --- in the workers -----------------------------------------------------------------------------


def _work(
    directory: Path, number: int, job: WorkerJob, die_with_us: Callable[[], None], memory: mmap
) -> NoReturn:
    """Run the entrypoint of the job, and end this process."""
    for handled in _HANDLED:
        signal.signal(handled, signal.SIG_DFL)
    die_with_us()
    # Where the system does not end it, a thread does, which a long call of C may hold up.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    liveness.progress.share(memory)
    os.environ[WORKER] = job.workers[number]
    os.dup(1)  # the agent's output ends with the last process that has it
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        with (directory / f"{number}.{name}").open("ab") as file:
            os.dup2(file.fileno(), descriptor)
    code = 1
    try:
        module, _, function = job.entrypoint.partition(":")
        getattr(import_module(module), function)(*pickle.loads(job.args))
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except Exception as error:  # noqa: BLE001 - any error is reported to the launcher
        lines = [line for line in str(error).splitlines() if line.strip()]
        sys.excepthook(type(error), error, error.__traceback__)
        raised = ": ".join([type(error).__name__, *lines[:1]])
        (directory / f"{number}.raised").write_text(raised)
        if isinstance(error, RankFailed):
            time.sleep(_LINGER_S)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
