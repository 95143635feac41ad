"""The process of a host in which torchrun's elastic launcher runs, and the supervisors it forks. It
imports torch, the models and the entrypoint once, and stays a process of one thread without a CUDA
context: all others are forked from it, so that seventeen workers start almost as fast as one. It
reads what to import from standard input, then the job, and ends when the agent is gone. For the
agent it writes one JSON object to the file `outcome`: {"ended": true}, {"failed": sentence} or,
when a signal ended a supervisor and the host may be started again, {"lost": sentence}."""

from __future__ import annotations

import gc
import json
import logging
import os
import pickle
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from mmap import mmap
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any, NoReturn

import psutil

from pipespec.cluster.host_link.agent_lock import PATIENCE_S
from pipespec.cluster.processes import rendezvous
from pipespec.errors import RankFailed
from pipespec.system import liveness
from pipespec.system.files import write_atomically
from pipespec.system.network_interfaces import LOOPBACK
from pipespec.system.process_identity import die_with_parent

# torchrun's launcher.
ELASTIC = "torch.distributed.launcher.api"
OUTCOME = "outcome"
# Seconds between two checks of the workers.
MONITOR_S = 0.1
# Seconds for which a rank that lost a neighbour leaves the agent time to notice the neighbour.
_LINGER_S = 3.0
# torchrun's processes handle these signals, and forked processes inherit the handlers: they raise,
# and a worker that raises ends the cluster.
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
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


def main() -> None:
    # What is forked closes its standard input, but must know whether the agent lives.
    agent = os.dup(sys.stdin.fileno())
    modules = [ELASTIC, *pickle.load(sys.stdin.buffer)]
    # What is imported stays: no collection of garbage need visit it, here or in the workers, whose
    # memory it would copy.
    gc.disable()
    for module in modules:
        with suppress(Exception):  # the worker imports it again, and reports what is wrong
            import_module(module)
    gc.freeze()
    gc.enable()
    memory = psutil.Process().memory_info()
    # The agent's output, too; a module may have left a line of its own unfinished.
    os.write(1, b'\n{"imported": %d}\n' % (memory.rss - memory.shared))
    directory, job = pickle.load(sys.stdin.buffer)
    outcome = run_supervisors(Path(directory), job, agent)
    write_atomically(Path(directory) / OUTCOME, json.dumps(outcome).encode())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # skips half a second of dismantling torch


def run_supervisors(directory: Path, job: WorkerJob, agent: int) -> dict[str, Any]:
    """The outcome. `agent` is the descriptor at whose end the agent is gone."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    rendezvous.register()
    # To write a traceback, torch's own formatter imports its compiler, which takes seconds.
    log = logging.getLogger("torch.distributed.elastic")
    log.addHandler(logging.StreamHandler())
    log.propagate = False
    # The workers meet elsewhere (`pipespec.transport.distributed`), anew in every epoch.
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=len(job.workers),
        run_id=directory.name,
        rdzv_backend=rendezvous.BACKEND,
        local_addr=LOOPBACK,
        max_restarts=0,
        monitor_interval=MONITOR_S,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(str(directory / "logs"), redirects=Std.ALL),
    )
    # torch 2.11 lacks it, and waits longer for supervisors that do not end, until the agent kills
    # what still runs.
    if hasattr(config, "shutdown_timeout"):
        config.shutdown_timeout = int(PATIENCE_S) - 2
    try:
        elastic_launch(config, supervise)(str(directory), job, agent)
    except SignalException:  # the agent asks for the end; the supervisors have ended
        os._exit(1)
    except ChildFailedError as error:
        number, failure = error.get_first_failure()
        sentence = _first_failure(directory, job, number, failure.exitcode)
        return {"lost" if failure.exitcode < 0 else "failed": sentence}
    return {"ended": True}


def _first_failure(directory: Path, job: WorkerJob, number: int, exitcode: int) -> str:
    """The sentence about the worker that failed first. `number` is the first one that the agent saw
    end. If it raised, so may others have done before it within the agent's interval: the earliest
    of those that did not merely lose a neighbour is to blame."""
    raised = [json.loads(path.read_text()) for path in directory.glob("raised-*.json")]
    if any(record["number"] == number for record in raised):
        first = min(raised, key=lambda record: (record["lost_neighbour"], record["time"]))
        if first["number"] != number:
            number, exitcode = first["number"], 1
        reason = first["line"]
    else:
        (log,) = directory.glob(f"logs/*/attempt_0/{number}/stderr.log")
        reason = last_line(log.read_bytes())
    how = how_it_ended(exitcode)
    return f"{job.titles[number]} on host {job.host} ({how}): {reason}"


def last_line(output: bytes) -> str:
    """The last line that a process wrote, or the one with which the interpreter reports a crash."""
    lines = [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip()]
    # The interpreter follows a crash's cause with the stacks of its threads.
    crashes = [line for line in lines if line.startswith("Fatal Python error")]
    return (crashes or lines or ["it left no message."])[-1]


# --- in the processes that torchrun treats as ranks ---------------------------------------------


def supervise(directory: str, job: WorkerJob, agent: int) -> None:
    """Run workers until one finishes. A supervisor ends with torchrun's process, and with the
    agent: `agent` is a descriptor that reaches its end with it. It ends a worker that makes no
    progress."""
    torchrun = parent_process()
    assert torchrun is not None
    # A signal ends a supervisor or a worker as SIGKILL does, and another takes its place.
    for handled in _HANDLED:
        signal.signal(handled, signal.SIG_DFL)
    number = int(os.environ["LOCAL_RANK"])
    os.environ[WORKER] = job.workers[number]
    here, lives = Path(directory), 0
    # The pipe is watched by a thread, which a worker in a long call of C may hold up.
    die_with_us = die_with_parent(os.getpid())
    while True:
        # Each of the two processes sees the end of a pipe when the other is gone.
        ours, theirs, memory = os.pipe(), os.pipe(), mmap(-1, liveness.SIZE)
        pid = os.fork()
        if pid == 0:
            os.close(ours[0])
            os.close(theirs[1])
            die_with_us()
            liveness.progress.share(memory)
            _run_entrypoint(here, number, job, theirs[0])
        os.close(ours[1])
        os.close(theirs[0])
        write_atomically(here / f"{number}.pid", str(pid).encode())
        watch, hung = liveness.Watch(memory, pid), None
        while not (ended := connection.wait([ours[0], torchrun.sentinel, agent], liveness.LOOK_S)):
            if hung is None and (hung := watch.look()) is not None:
                os.kill(pid, signal.SIGKILL)
        if ended != [ours[0]]:
            os.kill(pid, signal.SIGKILL)
            os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        (here / f"{number}.pid").unlink()
        os.close(ours[0])
        os.close(theirs[1])
        if code == 0:
            return
        if code > 0:
            os._exit(code)
        lives += 1
        how = hung or how_it_ended(code)
        died = {"died": number, "pid": pid, "how": how, "hung": hung is not None}
        write_atomically(here / f"died-{number}-{lives}.json", json.dumps(died).encode())


def _run_entrypoint(directory: Path, number: int, job: WorkerJob, supervisor: int) -> NoReturn:
    threading.Thread(target=_end_with, args=(supervisor,), daemon=True).start()
    code = 1
    try:
        module, _, function = job.entrypoint.partition(":")
        getattr(import_module(module), function)(*pickle.loads(job.args))
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except Exception as error:  # noqa: BLE001 - any error is reported to the agent
        lost_neighbour = isinstance(error, RankFailed)
        lines = [line for line in str(error).splitlines() if line.strip()]
        record = {
            "number": number,
            "time": time.monotonic_ns(),
            "lost_neighbour": lost_neighbour,
            "line": ": ".join([type(error).__name__, *lines[:1]]),
        }
        sys.excepthook(type(error), error, error.__traceback__)
        # The agent reads it when any worker of the host has ended.
        write_atomically(directory / f"raised-{number}.json", json.dumps(record).encode())
        if lost_neighbour:
            time.sleep(_LINGER_S)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end_with(pipe: int) -> None:
    os.read(pipe, 1)
    os.kill(os.getpid(), signal.SIGKILL)


def how_it_ended(exitcode: int) -> str:
    return f"exit code {exitcode}" if exitcode >= 0 else signal.Signals(-exitcode).name


if __name__ == "__main__":
    # What is pickled must have this module's name.
    from pipespec.cluster.processes.torchrun import main as imported_main

    imported_main()
