"""Hosts that join and leave while another one stands still."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import pytest

from pipespec.cluster.decide import decide
from pipespec.cluster.diagnostics.measure_hosts import MeasuredHost
from pipespec.cluster.join import host_changes, host_steps
from pipespec.cluster.join.host_changes import HostChanges
from pipespec.cluster.recovery.cluster_state import ClusterState, LayoutChange
from pipespec.cluster.weights.distribution import WeightMoves
from pipespec.config.compose import compose
from pipespec.config.hosts import JOINED, Host
from pipespec.errors import ConfigError, PipespecError
from pipespec.placement.costs import Worker
from tests.helpers.waiting import until

SLOW, QUICK = (
    Host(name, f"10.0.0.{i}", f"{JOINED}/{name}", devices=("cpu",))
    for i, name in enumerate(("slow", "quick"))
)
# What a host waits for, and the step in which it is then.
STEPS = {
    "measure": "the host is measured",
    "fetch": "it gets the weights of layers",
    "start": "its workers start",
    "leave": "the other hosts take over its layers",
}


@dataclass
class Agent:
    host: Host
    failed: bool = False


class Cluster:
    """The surroundings of host changes, in which `slow` stands still at a step until `goes_on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, still: str) -> None:
        self.still, self.goes_on = still, threading.Event()
        self.stopped = threading.Event()
        self.sentences: list[str] = []
        self.asked_to_leave = False
        deployment = decide(compose(["cluster.stages=2", "cluster.devices=[cpu]"]))
        self.state = ClusterState(1, deployment.assignment(), complete=True)
        moves = WeightMoves(deployment, self.distribute)
        # In place of agents and recovery: this object.
        self.changes = HostChanges(
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            moves,
            lambda agent, _: self.begin(agent.host),
        )
        monkeypatch.setattr(host_changes, "measure_joined", self.measure)
        monkeypatch.setattr(host_steps, "SHOW_S", 0.0)
        self.now = 0.0  # seconds
        monkeypatch.setattr(host_steps, "monotonic", lambda: self.now)
        self.removed: list[str] = []

    def stand(self, step: str, over: Callable[[], bool] = lambda: False) -> None:
        if step == self.still:
            until(lambda: self.goes_on.is_set() or over())

    def add(self, host: Host) -> Agent:
        return Agent(host)

    def remove(self, agent: Agent) -> None:
        self.removed.append(agent.host.name)

    def measure(self, host: Host, *_: object) -> MeasuredHost:
        if host is SLOW:
            self.stand("measure")
        return MeasuredHost(tuple(Worker(name, layer_ms=1.0) for name in host.workers), {})

    def distribute(self, deployment: Any, *, over: threading.Event, **_: object) -> None:
        if SLOW in deployment.hosts and len(deployment.layers) > 1:
            leaves = not {*SLOW.workers} & {*deployment.workers}
            self.stand("leave" if leaves else "fetch", over.is_set)

    def begin(self, host: Host) -> None:
        if host is QUICK or self.still != "start":
            self.state = replace(self.state, alive=self.state.alive | {*host.workers})

    def check(self) -> None:
        pass

    def watch_workers(self, workers: object) -> None:
        pass

    def drop_change(self) -> None:
        pass

    def change(self, change: LayoutChange) -> None:
        complete = self.still != "ranks"
        self.state = replace(self.state, assignment=change.assignment, complete=complete)
        change.on_begun()

    def join(self, host: Host) -> None:
        slow = host is SLOW
        tell = self.sentences.append if slow else lambda sentence: None
        self.changes.join(host, tell, lambda: slow and self.asked_to_leave)

    def close(self) -> None:
        self.goes_on.set()
        self.stopped.set()

    @property
    def names(self) -> list[str]:
        return [host.name for host in self.changes.deployment.joined]


@pytest.mark.parametrize("still", STEPS)
@pytest.mark.parametrize("end", ["goes on", "leaves", "takes too long", "the cluster ends"])
def test_host_that_stands_still_keeps_no_other_from_joining_and_leaving(monkeypatch, still, end):
    cluster = Cluster(monkeypatch, still)
    with ThreadPoolExecutor(1) as pool, closing(cluster):
        if still == "leave":
            cluster.join(SLOW)
            work = pool.submit(cluster.changes.leave, "slow", cluster.sentences.append)
        else:
            work = pool.submit(cluster.join, SLOW)
        began = STEPS[still]
        until(lambda: any(each.startswith(began) for each in cluster.sentences))
        cluster.join(QUICK)
        assert "quick" in cluster.names
        cluster.changes.leave("quick", lambda sentence: None)
        assert "quick" not in cluster.names
        cluster.join(QUICK)
        assert not work.done()
        until(lambda: any(" of " in each and each.endswith(" s") for each in cluster.sentences))
        if end == "goes on":
            cluster.goes_on.set()
            cluster.still = ""
            cluster.begin(SLOW)
            work.result(20)
            assert cluster.names == (["quick"] if still == "leave" else ["quick", "slow"])
            return
        if end == "the cluster ends":
            cluster.stopped.set()
            why = "The cluster has ended"
        elif end == "leaves" and still != "leave":
            cluster.asked_to_leave, why = True, "slow has left before it had joined"
        else:
            cluster.now, why = 200.0, r"slow: .*, but not within \d+ s; check the load"
        with pytest.raises(PipespecError, match=why):
            work.result(20)
        assert cluster.names[-1:] == ["quick"]
        if still != "leave":
            cluster.changes.lost("slow")
            assert (cluster.removed[-1] == "slow") is (still != "measure")


def test_host_that_fails_in_the_new_layout_is_told_its_own_failure(monkeypatch):
    def too_few(*_: object, **__: object) -> None:
        raise ConfigError("The others are too few.")

    monkeypatch.setattr(host_changes, "without_host", too_few)
    cluster = Cluster(monkeypatch, "ranks")
    with ThreadPoolExecutor(1) as pool, closing(cluster):
        work = pool.submit(cluster.join, SLOW)
        until(lambda: "slow" in cluster.names)
        cluster.asked_to_leave = True
        with pytest.raises(PipespecError, match="slow has left before it had joined"):
            work.result(20)


def test_a_host_waits_for_one_that_is_away(monkeypatch):
    """Layers can be laid out anew once that is back, or was given up."""
    with closing(Cluster(monkeypatch, "")) as cluster, ThreadPoolExecutor() as pool:
        cluster.join(QUICK)
        away = {QUICK.name}
        monkeypatch.setattr(host_changes, "is_away", lambda host: host.name in away)
        joining = pool.submit(cluster.join, SLOW)
        until(lambda: any("quick is back or given up" in each for each in cluster.sentences))
        assert not joining.done() and cluster.names == ["quick"]
        away.clear()
        joining.result()
        assert cluster.names == ["quick", "slow"]
