"""Runs a function in several processes of this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pipespec.cluster.processes.worker_group import PRELOAD, WorkerGroup
from pipespec.config.hosts import this_machine


def launch(
    entrypoint: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    num_ranks: int,
    preload: Sequence[str] = PRELOAD,
) -> WorkerGroup:
    """Run `entrypoint(*args)` in `num_ranks` processes here, and return while they start.

    `entrypoint` is a function of an importable module (not of `__main__`); it and `args` must
    pickle. Each rank finds RANK, LOCAL_RANK and WORLD_SIZE in its environment. `preload` names
    modules to import once for all ranks, next to the entrypoint's own.

        with launch(run_rank, (config,), num_ranks=5) as cluster:
            ...             # the ranks run meanwhile
            cluster.wait()
    """
    assert num_ranks > 0
    module, function = entrypoint.__module__, entrypoint.__qualname__
    assert module != "__main__", "the ranks must be able to import the entrypoint"
    devices = ["cpu"] * num_ranks
    cluster = WorkerGroup([this_machine(devices)], (*preload, module))
    cluster.start_workers(f"{module}:{function}", args)
    return cluster
