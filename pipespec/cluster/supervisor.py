"""What torchrun takes for a rank: it forks the worker that works, and another if need be."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import threading
import time
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any, NoReturn

from pipespec.errors import RankFailed
from pipespec.system.writing import write_whole

# Seconds for which a rank that lost a neighbour leaves the agent time to notice the neighbour.
_LINGER_S = 3.0
# The variable in which a worker finds its name.
WORKER = "PIPESPEC_WORKER"


@dataclass(frozen=True)
class Job:
    """What the workers run: `entrypoint(*args)`, with the worker's name in the environment.

    Attributes:
        entrypoint: "module:function"; only the workers import it.
        args: a pickled tuple; only the workers read it, who have imported its types.
        workers: their names, and what messages call them.
        restart: whether one that a signal ended is replaced by another.
        logs: whether what the workers write is passed on, line by line.
    """

    entrypoint: str
    args: bytes
    workers: tuple[str, ...]
    titles: tuple[str, ...]
    restart: bool
    logs: bool


def supervise(directory: str, job: Job, agent: int) -> Any:
    """Have a worker at work until it has done it; its result.

    It ends with torchrun's process, and with the agent, at whose end the descriptor `agent` ends.
    """
    torchrun = parent_process()
    assert torchrun is not None
    number = int(os.environ["LOCAL_RANK"])
    os.environ[WORKER] = job.workers[number]
    here, lives = Path(directory), 0
    while True:
        # Each of the two ends of a pipe tells the other process when this one is gone.
        ours, theirs = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ours[0])
            os.close(theirs[1])
            _live(here, number, job, theirs[0])
        os.close(ours[1])
        os.close(theirs[0])
        write_whole(here / f"{number}.pid", str(pid).encode())
        if connection.wait([ours[0], torchrun.sentinel, agent]) != [ours[0]]:
            os.kill(pid, signal.SIGKILL)
            os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        (here / f"{number}.pid").unlink()
        os.close(ours[0])
        os.close(theirs[1])
        if code == 0:
            return pickle.loads((here / f"result-{number}").read_bytes())
        if code > 0:
            os._exit(code)
        if not job.restart:
            os.kill(os.getpid(), -code)
        lives += 1
        died = {"died": number, "pid": pid, "how": how_it_ended(code)}
        write_whole(here / f"died-{number}-{lives}.json", json.dumps(died).encode())


def _live(directory: Path, number: int, job: Job, supervisor: int) -> NoReturn:
    """A worker, which ends with its supervisor."""
    threading.Thread(target=_end_with, args=(supervisor,), daemon=True).start()
    code = 1
    try:
        module, _, function = job.entrypoint.partition(":")
        result = getattr(import_module(module), function)(*pickle.loads(job.args))
        (directory / f"result-{number}").write_bytes(pickle.dumps(result))
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except Exception as error:  # noqa: BLE001 - whatever it is, somebody must be told
        lost_neighbour = isinstance(error, RankFailed)
        record = {
            "number": number,
            "time": time.monotonic_ns(),
            "lost_neighbour": lost_neighbour,
            "line": _one_line(error),
        }
        # The agent reads it when any worker of the host has ended.
        write_whole(directory / f"raised-{number}.json", json.dumps(record).encode())
        sys.excepthook(type(error), error, error.__traceback__)
        if lost_neighbour:
            time.sleep(_LINGER_S)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _one_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:1]])


def _end_with(pipe: int) -> None:
    os.read(pipe, 1)
    os.kill(os.getpid(), signal.SIGKILL)


def how_it_ended(exitcode: int) -> str:
    return f"exit code {exitcode}" if exitcode >= 0 else signal.Signals(-exitcode).name
