"""Starts the workers of a cluster on its hosts, and ends them whatever happens.

    this process ─┬─ agent of this machine ── ...          (pipespec.cluster.processes.agent)
                  └─ ssh ── agent of another host ── ...

Only this process writes to the pipe that is an agent's input, and its end (closed by us, by the
kernel or by SSH) ends the host. All processes of this machine hold their agent's standard output,
so that ends with the last of them. They form a session of their own: Ctrl-C reaches this process
alone, and one signal to the group ends what hangs."""

from __future__ import annotations

import pickle
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from pipespec.cluster.host_link.agent_lock import PATIENCE_S
from pipespec.cluster.processes.agent_handle import AgentHandle, WorkerDeath
from pipespec.cluster.processes.forked_workers import WorkerJob
from pipespec.config.hosts import Host, own_name
from pipespec.errors import HostFailed, RankFailed

# Modules that almost every rank needs and that take longest to import.
PRELOAD = ("pipespec.cluster.processes.preload",)
# Seconds between two checks of which workers have ended, and of which agents have sent a message.
_MONITOR_S, _LOOK_S = 0.1, 0.02
# Seconds that the agents have to end once one host has failed: a client of the cluster gets the
# error within three.
_FAILING_S = 2.0


class WorkerGroup:
    """The running workers of `hosts`, one per device; leaving the `with` block ends those that
    still run. Their agents start at once and import `modules`, which takes longest; meanwhile the
    caller may prepare the job, which `start_workers` sends. An agent's lock has the `name` of the
    cluster and the host's."""

    def __init__(
        self, hosts: Sequence[Host], modules: Sequence[str] = PRELOAD, *, name: str | None = None
    ) -> None:
        self.deaths: queue.SimpleQueue[WorkerDeath] = queue.SimpleQueue()
        self._modules, self._name = tuple(modules), name
        self._listing = threading.Lock()
        # Replaced as a whole, as several threads read it.
        self._hosts: tuple[AgentHandle, ...] = ()
        self._failure: str | None = None
        try:
            for host in hosts:
                self._hosts = (*self._hosts, self._agent_of(host))
        except BaseException:
            self.stop()
            raise

    def _agent_of(self, host: Host) -> AgentHandle:
        lock = None if self._name is None or host.local else f"{self._name}-{host.name}"
        return AgentHandle(host, self._modules, lock, self.deaths)

    def add(self, host: Host) -> AgentHandle:
        """Start the agent of one more host, whose end does not end the others."""
        agent = self._agent_of(host)
        agent.guest = True  # first: another thread looks at the hosts
        with self._listing:
            self._hosts = (*self._hosts, agent)
        return agent

    def adopt(self, name: str) -> AgentHandle:
        """From now on, the end of that host does not end the others, as if it had been added."""
        agent = next(host for host in self._hosts if host.host.name == name)
        agent.guest = True
        return agent

    def remove(self, agent: AgentHandle) -> None:
        with self._listing:
            self._hosts = tuple(host for host in self._hosts if host is not agent)
        agent.stop()

    def await_agents(self) -> None:
        """Wait for the first message of the agents of other hosts. Raises HostFailed."""
        while not self._failed() and not all(
            host.reached or host.host.local for host in self._hosts
        ):
            time.sleep(_LOOK_S)
        if self._failed():
            raise HostFailed(self._fail())

    def start_workers(
        self,
        entrypoint: str,
        args: Sequence[Any] = (),
        *,
        on_log: Callable[[str, str], None] | None = None,
        on: AgentHandle | None = None,
    ) -> None:
        """Have every worker of a host, `on`, or of all run `entrypoint(*args)`, a "module:function"
        that is not imported here, and return while they begin. `on_log` is called with a worker's
        name and a line that it wrote."""
        packed = pickle.dumps(tuple(args))
        for host in self._hosts if on is None else (on,):
            names = host.host.workers
            titles = _titles(host.host)
            logs = on_log is not None
            host.start_workers(
                WorkerJob(entrypoint, packed, names, titles, host.host.name, logs),
                on_log,
            )

    def poll(self) -> bool:
        """Whether the workers still run. Raises RankFailed, once all have been ended."""
        if not self._failed() and all(host.running for host in self._own):
            return True
        self.wait()
        return False

    def wait(self, timeout: float | None = None) -> None:
        """Until the workers and all helpers have ended. Raises RankFailed as `poll`, and
        TimeoutError if they still run after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while any(host.running for host in self._own) and not self._failed():
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"The ranks still run after {timeout} s.")
            next((host for host in self._own if host.running), self._own[0]).join(_MONITOR_S)
        if self._failed():
            raise RankFailed(self._fail())
        self.stop()

    @property
    def _own(self) -> list[AgentHandle]:
        return [host for host in self._hosts if not host.guest]

    def _failed(self) -> list[AgentHandle]:
        return [host for host in self._own if host.failed]

    def _fail(self) -> str:
        """End all hosts, as one of them has failed; returns the message of the first one."""
        if self._failure is None:
            first = min(self._failed(), key=lambda host: host.ended_at)
            self._failure = first.why()
            self.stop(_FAILING_S)
        return self._failure

    def signs(self) -> dict[str, int]:
        """For each worker of a host with an agent a number, which changes whenever the agent has
        seen its process run."""
        return {worker: number for host in self._hosts for worker, number in host.signs.items()}

    def preparing(self, worker: str) -> bool:
        return any(host.preparing for host in self._hosts if worker in host.host.workers)

    def restart_lost_hosts(self) -> None:
        for host in self._hosts:
            host.restart_if_lost()

    def stop(self, patience_s: float = PATIENCE_S) -> None:
        """End every worker and helper; harmless when called again. Agents that have not ended after
        `patience_s` seconds are killed."""
        for host in self._hosts:
            host.close_stdin()
        deadline = time.monotonic() + patience_s
        for host in self._hosts:
            host.stop(max(deadline - time.monotonic(), 0))

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


def _titles(host: Host) -> tuple[str, ...]:
    """The names of the workers in messages: on one machine a worker is a rank."""
    if host.local and host.name == own_name():
        return tuple(
            f"rank {rank}" if worker == group[0] else f"a follower of rank {rank}"
            for rank, group in enumerate(host.members.values())
            for worker in group
        )
    return host.workers
