"""Adds hosts to a running cluster, and lets them leave.

A new host is measured, the layers are laid out anew with it, all hosts get the weights that they
lack, and the workers of the new one start. Meanwhile the cluster decodes as before. Then an epoch
begins with the new layout: running requests return to the queue, and go on from the tokens that
were accepted, as after a fault. When a host leaves, the others get its layers in the same way
before it may go.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from pipespec.cluster.deployment.deployment import Deployment
from pipespec.cluster.diagnostics.measure_hosts import MeasuredHost, measure_joined
from pipespec.cluster.host_link.host_session import is_away
from pipespec.cluster.join.host_steps import HostSteps
from pipespec.cluster.processes.agent_handle import AgentHandle
from pipespec.cluster.processes.worker_group import WorkerGroup
from pipespec.cluster.recovery.cluster_state import LayoutChange
from pipespec.cluster.recovery.recovery import Recovery
from pipespec.cluster.weights.distribution import Distribute, WeightMoves, distribute_weights
from pipespec.config.hosts import Host
from pipespec.engine.formats.slice_tensors import described
from pipespec.errors import HostFailed, RankFailed
from pipespec.placement.costs import Problem
from pipespec.placement.measurements import layer_kinds
from pipespec.placement.slices import Placement, plan_slices

# Seconds in which hosts that are away must be back or given up, the workers of a new host must have
# imported torch, it must be measured, and without a byte of what is fetched; and in which an epoch
# must begin once all workers of a layout are there.
AWAY_S, IMPORTING_S, MEASURING_S, STILL_S, BEGINNING_S = 180.0, 120.0, 120.0, 30.0, 30.0


class HostChanges:
    """The hosts that have joined a cluster. Any thread may call it; of several hosts, only the
    changes of the layout wait for one another. `start`: starts the workers of a host's agent for a
    deployment."""

    def __init__(
        self,
        agents: WorkerGroup,
        recovery: Recovery,
        moves: WeightMoves,
        start: Callable[[AgentHandle, Deployment], None],
    ) -> None:
        self._agents, self._recovery, self._moves, self._start = agents, recovery, moves, start
        self._changing = threading.Lock()  # the layout
        self._watching = threading.Lock()  # what the recovery watches
        self._guests: dict[str, AgentHandle] = {}  # of hosts that have joined, or do

    def adopt(self) -> None:
        """Hosts had joined before the cluster began; call it when it has."""
        for host in self.deployment.joined:
            self._guests[host.name] = self._agents.adopt(host.name)

    @property
    def deployment(self) -> Deployment:
        """The cluster as it is if no worker is lost."""
        return self._moves.deployment

    def join(
        self,
        host: Host,
        tell: Callable[[str], None],
        leaving: Callable[[], bool] = lambda: False,
    ) -> None:
        """Add a host; it has its ranks when this returns. `tell` is called with sentences for it,
        and `leaving` says whether it does not want to join any more. Raises PipespecError; the
        cluster is then to go on without the host (`lost`)."""

        def require() -> None:
            self._require_cluster()
            if (failure := self.failure(host.name)) is not None:
                raise HostFailed(failure)
            if leaving():
                raise HostFailed(f"{host.name} has left before it had joined")

        steps = HostSteps(host.name, tell, require)
        if names := self._away():
            steps.begin(f"it waits until {names} is back or given up", AWAY_S)
            steps.wait(lambda: not self._away())
        found = steps.run(partial(measured, host, self.deployment, steps, self._moves.distribute))
        # It imports what its workers need while the weights come.
        agent = self._guests[host.name] = self._agents.add(host)
        started = False

        def prepare(_: Deployment, after: Deployment) -> None:
            nonlocal started
            steps.begin(f"it gets the weights of {_ranks_of(after, host)}", STILL_S)
            self._fetch(after, steps)
            if not started:
                self._start(agent, after)
                started = True
                self._watch_workers()
            steps.begin("its workers start", IMPORTING_S)
            steps.wait(lambda: self._recovery.state.alive.issuperset(host.workers))

        after = self._switch(
            lambda before: with_hosts(before, [(host, found)]), prepare, f"{host.name} joins", steps
        )
        tell(f"it computes {_ranks_of(after, host)}")

    def leave(self, name: str, tell: Callable[[str], None]) -> None:
        """Have the others compute without a host; it has no rank when this returns. `tell` is
        called with sentences. Raises ConfigError if they cannot, and PipespecError; the host then
        stays."""
        self._go_on_without(name, f"{name} leaves", tell, sends=True)

    def lost(self, name: str) -> None:
        """A host has failed, or was gone for too long, and is not waited for any more. Raises
        ConfigError if the others cannot go on without it, and PipespecError."""
        self._go_on_without(name, f"{name} is gone", lambda sentence: None, sends=False)

    def _go_on_without(
        self, name: str, reason: str, tell: Callable[[str], None], *, sends: bool
    ) -> None:
        """`sends`: the host sends others what they get."""
        guest = self._guests.get(name)
        if guest is None:
            return
        steps = HostSteps(name, tell, self._require_cluster)

        def prepare(before: Deployment, after: Deployment) -> None:
            steps.begin("the other hosts take over its layers", STILL_S)
            self._fetch(replace(after, hosts=before.hosts if sends else after.hosts), steps)

        if guest.host in self.deployment.hosts:
            self._switch(partial(without_host, host=guest.host), prepare, reason, steps)
        del self._guests[name]
        self._watch_workers()
        self._agents.remove(guest)

    def _away(self) -> str:
        """The hosts that have joined and are not connected now, in words."""
        return " and ".join(
            guest.host.name for guest in [*self._guests.values()] if is_away(guest.host)
        )

    def _fetch(self, after: Deployment, steps: HostSteps) -> None:
        """Give the hosts of a deployment their weights."""
        ways = {"on_progress": steps.progress, "over": steps.over}
        steps.run(partial(self._moves.distribute, replace(after, fetched=False), **ways))

    def _switch(
        self,
        plan: Callable[[Deployment], Deployment],
        prepare: Callable[[Deployment, Deployment], None],
        reason: str,
        steps: HostSteps,
    ) -> Deployment:
        """Begin an epoch with the layout that `plan` makes of the present one, and for which
        `prepare` makes all hosts ready; both are called again if another host has joined or left
        meanwhile."""
        while True:
            before = self.deployment
            after = plan(before)
            prepare(before, after)
            steps.begin("the ranks change their layers", BEGINNING_S)
            steps.wait(lambda: self._changing.acquire(blocking=False), limited=False)
            try:
                if self.deployment is before:
                    self._change_to(after, reason, steps)
                    return after
            finally:
                self._changing.release()

    def _require_cluster(self) -> None:
        self._recovery.check()
        if self._recovery.stopped.is_set():
            raise RankFailed("The cluster has ended.")

    def ranks_of(self, host: Host) -> str:
        """The ranks of a host and their layers, in words."""
        return _ranks_of(self.deployment, host)

    def over(self) -> bool:
        return self._recovery.stopped.is_set()

    def failure(self, name: str) -> str | None:
        """Why the workers of a host have ended; None: they have not."""
        guest = self._guests.get(name)
        return guest.why() if guest is not None and guest.failed else None

    def _change_to(self, after: Deployment, reason: str, steps: HostSteps) -> None:
        """Begin an epoch of another deployment and wait until all ranks have joined it."""
        begun = threading.Event()

        def begin() -> None:
            self._moves.use(after)
            begun.set()

        away = self._recovery.state.away & {
            worker for host in after.hosts for worker in host.workers
        }
        assignment = after.assignment(after.without(set(away)))
        self._recovery.change(LayoutChange(assignment, reason, begin))
        try:
            steps.wait(begun.is_set)
            # How long the ranks may take, the recovery knows.
            steps.wait(lambda: self._recovery.state.complete, limited=False)
        except BaseException:
            self._recovery.drop_change()
            raise

    def _watch_workers(self) -> None:
        with self._watching:
            hosts = (*self.deployment.hosts, *(each.host for each in [*self._guests.values()]))
            watched = dict.fromkeys(worker for host in hosts for worker in host.workers)
            self._recovery.watch_workers((*watched,))


def measured(
    host: Host,
    before: Deployment,
    steps: HostSteps,
    distribute: Distribute = distribute_weights,
) -> MeasuredHost:
    """Measure a new host with a few layers of the target, which it gets from the others; these are
    `steps` of it. Raises PipespecError."""
    layers = sample_layers(before)
    ranks = (before.workers[0], host.workers[0])
    trial = replace(
        before.knowing((*before.joined, host)),
        placement=replace(before.placement, workers_by_rank=ranks, spares=()),
        layers=(layers,),
        fetched=False,
    )
    steps.begin("it gets the layers with which it is measured", STILL_S)
    distribute(trial, on_progress=steps.progress, over=steps.over)
    steps.begin("the host is measured", MEASURING_S)
    return measure_joined(host, before, layers)


def sample_layers(deployment: Deployment) -> range:
    """The fewest layers in a row of all kinds (`layer_kinds`), as near to the middle as there are:
    what a host is to have to be measured."""
    target = deployment.target
    sizes = target.loaded(deployment.dtype, deployment.weight_format(target)).layers
    kinds = layer_kinds(target, sizes)
    count = len(kinds)
    runs = (range(start, stop) for start in range(count) for stop in range(start + 1, count + 1))
    whole = [each for each in runs if {*kinds} == {kinds[layer] for layer in each}]
    return min(whole, key=lambda each: (len(each), abs(each.start + each.stop - count)))


def with_hosts(
    before: Deployment,
    found: Sequence[tuple[Host, MeasuredHost]],
    problem: Problem | None = None,
) -> Deployment:
    """The cluster with more hosts, whose workers are stages; `problem` is what was measured of the
    others, None: that of the layout. Raises ConfigError if there is no such layout."""
    problem = problem or before.placement.problem
    for _, each in found:
        problem = replace(
            problem,
            workers=(*problem.workers, *each.workers),
            routes={**problem.routes, **each.routes},
        )
    problem = replace(problem, draft=before.workers[0], order=None, split=None)
    joined = (*before.joined, *(host for host, _ in found))
    return _changed(before, joined, plan_slices(problem))


def without_host(before: Deployment, host: Host) -> Deployment:
    """The cluster without one of the hosts that have joined. Raises ConfigError if the others are
    too few, or have too little memory."""
    placement = before.without(set(host.workers))
    return _changed(before, [each for each in before.joined if each != host], placement)


def _changed(before: Deployment, joined: Iterable[Host], placement: Placement) -> Deployment:
    return before.knowing(tuple(joined)).laid_out(placement)


def _ranks_of(deployment: Deployment, host: Host) -> str:
    ranks = [rank for rank, each in enumerate(deployment.workers) if each in host.workers]
    named = ((described(map(str, deployment.layers[rank - 1])), rank) for rank in ranks)
    return " and ".join(f"{layers} (rank {rank})" for layers, rank in named)
