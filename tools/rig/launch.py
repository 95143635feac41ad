"""Runs a function in several processes of this machine."""

from __future__ import annotations

import os
import pickle
import queue
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from pipespec.cluster.processes.forked_workers import WORKER
from pipespec.cluster.processes.worker_group import PRELOAD, WorkerGroup
from pipespec.config.hosts import this_machine
from pipespec.errors import RankFailed

LOOK_S = 0.1  # between two looks at whether the ranks still run


def launch(
    entrypoint: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    num_ranks: int,
    preload: Sequence[str] = PRELOAD,
) -> WorkerGroup:
    """Run `entrypoint(*args)` in `num_ranks` processes here, and return while they start; as a
    context, the cluster ends with its block.

    `entrypoint` is a function of an importable module (not of `__main__`); it and `args` must
    pickle. Each rank finds its number by `own_rank`. `preload` names modules to import once for all
    ranks, next to the entrypoint's own."""
    module, function = entrypoint.__module__, entrypoint.__qualname__
    assert module != "__main__", "the ranks must be able to import the entrypoint"
    cluster = WorkerGroup([this_machine(["cpu"] * num_ranks)], (*preload, module))
    cluster.start_workers(f"{module}:{function}", args)
    return cluster


def own_rank() -> int:
    """Which of the processes this one is."""
    return int(os.environ[WORKER].rpartition("/")[2])


def results_of(entrypoint: Callable[..., Any], args: Sequence[Any], num_ranks: int) -> list[Any]:
    """What `entrypoint(*args)` returns in each of several processes, as `launch` runs them. Raises
    RankFailed, also when a signal ends a rank, which would begin anew without end."""
    module, function = entrypoint.__module__, entrypoint.__qualname__
    with (
        tempfile.TemporaryDirectory() as folder,
        launch(_keep_result, (folder, module, function, args), num_ranks=num_ranks) as cluster,
    ):
        while cluster.poll():
            with suppress(queue.Empty):
                death = cluster.deaths.get(timeout=LOOK_S)
                raise RankFailed(f"{death.worker} was ended: {death.how}")
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(num_ranks)]


def _keep_result(folder: str, module: str, function: str, args: Sequence[Any]) -> None:
    result = getattr(import_module(module), function)(*args)
    Path(folder, str(own_rank())).write_bytes(pickle.dumps(result))
