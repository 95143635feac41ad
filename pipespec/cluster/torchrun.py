"""The supervisors of a host under torchrun's elastic launcher, and what to say when one fails."""

from __future__ import annotations

import json
import logging
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipespec.cluster import rendezvous
from pipespec.cluster.agent_lock import PATIENCE_S
from pipespec.cluster.supervisor import Job, how_it_ended, supervise
from pipespec.system.interfaces import LOOPBACK

# torchrun's launcher.
ELASTIC = "torch.distributed.launcher.api"
# Seconds between two looks at the workers.
MONITOR_S = 0.1


@dataclass(frozen=True)
class Lost:
    """A signal ended a supervisor; the host may be started again."""

    sentence: str


class Signalled(Exception):
    """A signal asked for the end; the supervisors have ended."""


def run_supervisors(directory: Path, job: Job) -> list[Any] | str | Lost:
    """What the workers returned, or the sentence that says what failed. Raises Signalled."""
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
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(str(directory / "logs"), redirects=Std.ALL),
        shutdown_timeout=int(PATIENCE_S) - 2,
    )
    try:
        results = elastic_launch(config, supervise)(str(directory), job)
        return [results[number] for number in range(len(job.workers))]
    except ChildFailedError as error:
        number, failure = error.get_first_failure()
        sentence = _blame(directory, job, number, failure.exitcode)
        return Lost(sentence) if job.restart and failure.exitcode < 0 else sentence
    except SignalException as signalled:
        raise Signalled from signalled


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
