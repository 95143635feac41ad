"""The process of a host in which torchrun's elastic launcher runs, and what it says of failures.

    python -m pipespec.cluster.torchrun

It imports torch, the models and the entrypoint once, and stays a process of one thread without a
CUDA context: everything else of the host is forked from it, so that seventeen workers start almost
as fast as one. The elastic launcher lives in its main thread, where that launcher's signal handlers
must be. It reads what to import from standard input, then the job. Nothing more is written there,
so the end of it tells that the agent is gone. What it leaves for the agent is one JSON object in
the file `outcome`: {"ended": true}, with the results beside it, {"failed": sentence} or, when a
signal ended a supervisor and the host may be started again, {"lost": sentence}.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import socket
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from pipespec.cluster import rendezvous
from pipespec.cluster.agent_lock import PATIENCE_S
from pipespec.cluster.supervisor import Job, how_it_ended, supervise
from pipespec.system.interfaces import LOOPBACK
from pipespec.system.writing import write_whole

# torchrun's launcher.
ELASTIC = "torch.distributed.launcher.api"
OUTCOME, RESULTS = "outcome", "results"
# Seconds between two looks at the workers.
MONITOR_S = 0.1


def main() -> None:
    """Import, read the job, run the workers, leave the outcome."""
    # What is forked closes its standard input, but must know whether the agent lives.
    agent = os.dup(sys.stdin.fileno())
    modules = [ELASTIC, *pickle.load(sys.stdin.buffer)]
    for module in modules:
        with suppress(Exception):  # who works with it imports it again, and says what is wrong
            import_module(module)
    directory, job = pickle.load(sys.stdin.buffer)
    outcome = run_supervisors(Path(directory), job, agent)
    write_whole(Path(directory) / OUTCOME, json.dumps(outcome).encode())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # half a second of dismantling torch would serve nobody


def run_supervisors(directory: Path, job: Job, agent: int) -> dict[str, Any]:
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
        shutdown_timeout=int(PATIENCE_S) - 2,
    )
    try:
        results = elastic_launch(config, supervise)(str(directory), job, agent)
    except SignalException:  # the agent asks for the end; the supervisors have ended
        os._exit(1)
    except ChildFailedError as error:
        number, failure = error.get_first_failure()
        sentence = _blame(directory, job, number, failure.exitcode)
        return {"lost" if job.restart and failure.exitcode < 0 else "failed": sentence}
    # They are for a launcher on this machine, which reads them there.
    ordered = [results[number] for number in range(len(job.workers))]
    write_whole(directory / RESULTS, pickle.dumps(ordered))
    return {"ended": True}


def _blame(directory: Path, job: Job, number: int, exitcode: int) -> str:
    """The sentence about the worker that failed first.

    `number` is the first one that the agent saw end. If it raised, so may others have done
    before it within the agent's interval: the earliest of those that did not merely lose a
    neighbour is to blame.
    """
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
    return f"{job.titles[number]} on host {socket.gethostname()} ({how}): {reason}"


def last_line(said: bytes) -> str:
    """What a process wrote last, or the interpreter's word on why it crashed."""
    lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
    # The interpreter follows a crash's cause with the stacks of its threads.
    crashes = [line for line in lines if line.startswith("Fatal Python error")]
    return (crashes or lines or ["it left no message."])[-1]


if __name__ == "__main__":
    # What is pickled must have this module's name.
    from pipespec.cluster.torchrun import main as imported_main

    imported_main()
