"""Start the workers of a cluster on its hosts, and end them whatever happens.

    this process ─┬─ agent of this machine ── ...          (pipespec.cluster.agent)
                  └─ ssh ── agent of another host ── ...

Nobody survives: an agent's standard input is a pipe that nobody else writes to, and its end
(closed by us, by the kernel when we are killed, or by SSH) ends the agent and with it the host.
All processes of this machine hold their agent's standard output, so the end of that pipe tells
that the last of them is gone. They form a session of their own: Ctrl-C reaches this process
alone, and one signal to the group ends what hangs.
"""

from __future__ import annotations

import os
import pickle
import queue
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from pipespec.cluster.running_host import Death, RunningHost
from pipespec.cluster.supervisor import Job
from pipespec.config.hosts import LOCAL, Host, this_machine
from pipespec.errors import ConfigError, RankFailed
from pipespec.system.interfaces import LOOPBACK

# What almost every rank needs and what takes longest to import.
PRELOAD = ("pipespec.cluster.warm",)
# Seconds between two looks at who ended.
_MONITOR_S = 0.1


def check_port(port: int) -> None:
    """Raise ConfigError unless the ranks can meet at this port; 0 stands for any free one."""
    if not 0 <= port <= 65535:
        raise ConfigError(
            f"transport.port={port} is no port; choose one of 1..65535, or 0 for any."
        )
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
            probe.listen()
        except OSError as error:
            raise ConfigError(
                f"transport.port={port} cannot be used ({os.strerror(error.errno or 0)}); "
                "choose another port, or 0 for any free one."
            ) from error


def launch(
    entrypoint: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    num_ranks: int,
    preload: Sequence[str] = PRELOAD,
) -> Cluster:
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
    cluster = Cluster([this_machine(devices)], (*preload, module))
    cluster.run(f"{module}:{function}", args)
    return cluster


class Cluster:
    """The running workers. Leaving the `with` block ends those that still run.

    Their agents start at once and import `modules`, which takes longest; what the workers are to
    do may be decided meanwhile, and is said with `run`.

    Args:
        hosts: where they run, one worker per device.
        modules: to import once for all workers of a host.
        name: with the names of the hosts, what no two clusters share.
    """

    def __init__(
        self, hosts: Sequence[Host], modules: Sequence[str] = PRELOAD, *, name: str | None = None
    ) -> None:
        self.deaths: queue.SimpleQueue[Death] = queue.SimpleQueue()
        self.workers = tuple(worker for host in hosts for worker in host.workers)
        self._hosts: list[RunningHost] = []
        try:
            for host in hosts:
                lock = None if name is None or host.local else f"{name}-{host.name}"
                self._hosts.append(RunningHost(host, tuple(modules), lock, self.deaths))
        except BaseException:
            self.stop()
            raise

    def run(
        self,
        entrypoint: str,
        args: Sequence[Any] = (),
        *,
        restart: bool = False,
        on_log: Callable[[str, str], None] | None = None,
    ) -> None:
        """Have every worker run `entrypoint(*args)`, and return while they begin.

        Args:
            entrypoint: as "module:function"; it is not imported here.
            restart: whether a worker that a signal ended, or a host that was lost, is started
                again; else it ends the cluster.
            on_log: called with the worker's name and a line that it wrote.
        """
        packed = pickle.dumps(tuple(args))
        for host in self._hosts:
            names = host.host.workers
            job = Job(entrypoint, packed, names, _titles(host.host), restart, on_log is not None)
            host.run(job, on_log)

    def poll(self) -> bool:
        """Whether the workers still run.

        Raises:
            RankFailed: a worker ended before its work did; all others have been ended too.
        """
        if all(host.running for host in self._hosts):
            return True
        self.wait()
        return False

    def wait(self, timeout: float | None = None) -> list[Any]:
        """What the workers of this machine returned, once they and all helpers are gone.

        `timeout` is in seconds.

        Raises:
            RankFailed: a worker ended before its work did; all others have been ended too.
            TimeoutError: the workers still run.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while any(host.running for host in self._hosts) and not any(
            host.failed for host in self._hosts
        ):
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"The ranks still run after {timeout} s.")
            next((host for host in self._hosts if host.running), self._hosts[0]).join(_MONITOR_S)
        for host in self._hosts:
            if not host.running:
                host.settle()
        failed = next((host.outcome for host in self._hosts if isinstance(host.outcome, str)), None)
        self.stop()
        if failed is not None:
            raise RankFailed(failed)
        return [result for host in self._hosts for result in host.outcome]

    def kill(self, worker: str, since: float) -> bool:
        """End a worker that has hung since a moment of the monotonic clock; its supervisor starts
        another. False: not now, its host may be cut off."""
        for host in self._hosts:
            if worker in host.host.workers:
                return host.kill(host.host.workers.index(worker), since)
        return False

    def preparing(self, worker: str) -> bool:
        """Whether a worker's host is starting again."""
        return any(host.preparing for host in self._hosts if worker in host.host.workers)

    def mend(self) -> None:
        """Start the agents anew of hosts that were lost."""
        for host in self._hosts:
            host.mend()

    def stop(self) -> None:
        """End every worker and helper and remove their files; harmless when called again."""
        for host in self._hosts:
            host.hang_up()
        for host in self._hosts:
            host.stop()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


def _titles(host: Host) -> tuple[str, ...]:
    """What messages call the workers: on one machine a worker is a rank."""
    if host.name == LOCAL:
        return tuple(
            f"rank {rank}" if worker == group[0] else f"a follower of rank {rank}"
            for rank, group in enumerate(host.members.values())
            for worker in group
        )
    return host.workers
