"""The faults of `benchmarks.faults.chaos`, and how they are caused."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations

import psutil

from pipespec.client import registry
from pipespec.client.registry import RunningCluster
from pipespec.controller.redis_connection import RedisConnection
from pipespec.errors import ConfigError, Unreachable
from tools.rig.clock import SteppedClock
from tools.rig.http_server import (
    NAME,
    ServerFailed,
    current_epoch,
    rank_pids,
    redis_pid,
)
from tools.rig.testbed import Testbed

RANK_SIGNALS = {
    "kill": signal.SIGKILL,
    "hang": signal.SIGSTOP,
    "term": signal.SIGTERM,
    "hup": signal.SIGHUP,
    "segv": signal.SIGSEGV,
}
REDIS_SIGNALS = {
    "redis": signal.SIGKILL,
    "redis_restart": signal.SIGTERM,
    "redis_hang": signal.SIGSTOP,
}
AGENT_SIGNALS = ("SIGKILL", "SIGTERM", "SIGHUP", "SIGSEGV")
# Kinds that always end an epoch; the others need not.
ENDING = {*RANK_SIGNALS, *REDIS_SIGNALS, "agent", "host"}
KINDS = (
    *RANK_SIGNALS,
    "agent",
    *REDIS_SIGNALS,
    "client_kill",
    "script_flush",
    "clock",
    "cut",
    "host",
)
BETWEEN_HOSTS = ("cut", "host")
# Seconds for which a link is cut: from less to more than a lease and SSH's timeout.
CUT_S = (0.5, 8.0)
# Connections that are closed, by the last command on them: all; those of ranks that wait for
# tasks; of readers and heartbeats; of ranks and clients that run scripts.
CONNECTIONS = ("all", "blpop", "xread", "evalsha")
CLOCK_STEP_S = 3600
# The share of faults that happen while no request is in flight.
IDLE = 0.2
# A fault happens after so many further events of all requests together.
EVENTS = (1, 64)
POLL_S = 0.02


@dataclass(frozen=True)
class Fault:
    """A fault that happens while requests are decoded, drawn from the seed.

    Attributes:
        kind: one of KINDS.
        target: the rank, the two hosts, the host or the connections; empty for Redis.
        at: it happens after so many further events of all requests; 0: while there is none.
        cut_s: how long a link is cut; 0 for the other kinds.
    """

    kind: str
    target: str
    at: int
    cut_s: float


def schedule(
    seed: int, count: int, *, kinds: Sequence[str], num_ranks: int, hosts: Sequence[str]
) -> list[Fault]:
    """The faults of a run, each kind equally often; `at` 0: while no request is in flight."""
    draw = random.Random(seed)
    order: list[str] = []
    while len(order) < count:
        order += draw.sample(list(kinds), len(kinds))
    faults = []
    for kind in order[:count]:
        target = ""
        if kind in RANK_SIGNALS:
            target = str(draw.randrange(num_ranks))
        elif kind == "agent":
            target = f"{draw.choice(AGENT_SIGNALS)} {draw.randrange(num_ranks)}"
        elif kind == "client_kill":
            target = draw.choice(CONNECTIONS)
        elif kind == "clock":
            target = draw.choice(("+", "-"))
        elif kind == "cut":
            target = "-".join(draw.choice(list(combinations(hosts, 2))))
        elif kind == "host":
            target = draw.choice(hosts[1:])  # the first has the launcher
        cut_s = round(draw.uniform(*CUT_S), 2) if kind == "cut" else 0.0
        at = 0 if draw.random() < IDLE else draw.randint(*EVENTS)
        faults.append(Fault(kind, target, at, cut_s))
    return faults


class FaultInjector:
    """Causes faults in the cluster of `tools.rig.http_server`."""

    def __init__(self, bed: Testbed | None, clock: SteppedClock | None, patience_s: float):
        self._bed, self._clock, self._patience_s = bed, clock, patience_s

    def inject(self, fault: Fault) -> bool:
        """Cause a fault; False if its target did not exist. A cut lasts until `mend`."""
        running = registry.find(NAME)
        if fault.kind in RANK_SIGNALS:
            pid = rank_pids(running).get(int(fault.target))
            return send_signal(pid, RANK_SIGNALS[fault.kind])
        if fault.kind in REDIS_SIGNALS:
            return send_signal(redis_pid(running), REDIS_SIGNALS[fault.kind])
        if fault.kind == "agent":
            name, rank = fault.target.split()
            pid = agent_pid(rank_pids(running).get(int(rank)))
            return send_signal(pid, signal.Signals[name])
        if fault.kind == "client_kill":
            return kill_connections(running, fault.target) > 0
        if fault.kind == "script_flush":
            return bool(redis_reply(running, "SCRIPT", "FLUSH", "SYNC"))
        if fault.kind == "clock":
            assert self._clock is not None
            step_s = CLOCK_STEP_S if fault.target == "+" else -CLOCK_STEP_S
            self._clock.step(step_s if not self._clock.offset_s else 0)
            return True
        assert self._bed is not None
        if fault.kind == "host":
            return kill_host(self._bed, fault.target)
        self._bed.cut(*fault.target.split("-"))
        return True

    def mend(self, fault: Fault) -> None:
        """Repair the link that a fault has cut."""
        assert self._bed is not None
        self._bed.mend(*fault.target.split("-"))

    def settle(self, after: int) -> int:
        """Wait until all ranks are in an epoch later than `after`; that epoch.

        Raises ServerFailed.
        """
        deadline = time.monotonic() + self._patience_s
        while time.monotonic() < deadline:
            with suppress(ConfigError, Unreachable):  # it recovers
                running = registry.find(NAME)
                if current_epoch(running) > after and len(rank_pids(running)) == running.num_ranks:
                    return current_epoch(running)
            time.sleep(POLL_S)
        raise ServerFailed(f"The cluster was not complete again within {self._patience_s:g} s.")


def send_signal(pid: int | None, number: signal.Signals) -> bool:
    """Send a signal; False if there is no such process."""
    if pid is None:
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def kill_host(bed: Testbed, host: str) -> bool:
    """Kill all processes of a host except its SSH server; False if there are none."""
    killed = False
    for pid in bed.processes(host):
        with suppress(psutil.NoSuchProcess):
            if pid not in bed.servers:
                killed |= send_signal(pid, signal.SIGKILL)
    return killed


def agent_pid(pid: int | None) -> int | None:
    """The process id of the agent on a rank's host."""
    with suppress(psutil.NoSuchProcess):
        for process in [] if pid is None else psutil.Process(pid).parents():
            if "pipespec.cluster.processes.agent" in process.cmdline():
                return process.pid
    return None


def redis_reply(running: RunningCluster, *command: str) -> bytes:
    """The reply of a cluster's Redis to a command. Raises Unreachable."""
    pipe = RedisConnection(running.url)
    try:
        reply: bytes = pipe.call(*command)
        return reply
    finally:
        pipe.close()


def kill_connections(running: RunningCluster, kind: str) -> int:
    """Close connections of a kind in Redis; how many. Raises Unreachable."""
    pipe = RedisConnection(running.url)
    try:
        if kind == "all":
            return int(pipe.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"))
        clients = [
            dict(word.split("=", 1) for word in line.split())
            for line in pipe.call("CLIENT", "LIST").decode().splitlines()
        ]
        found = [client["id"] for client in clients if client["cmd"] == kind]
        return sum(int(pipe.call("CLIENT", "KILL", "ID", number)) for number in found)
    finally:
        pipe.close()
