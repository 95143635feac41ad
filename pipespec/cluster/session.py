"""A cluster that is started once (`start_agents`, `start_cluster`) and decodes many requests. The
head takes them in the order in which they were submitted, as many at once as
`scheduler.max_num_seqs` says; the others wait in the request log."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from pipespec.cluster.decide import check_deployment
from pipespec.cluster.deployment import memory
from pipespec.cluster.deployment.checks import expanded, scaled, shared_gpu, without_ggml
from pipespec.cluster.deployment.deployment import ControllerAddress, Deployment
from pipespec.cluster.join.host_changes import HostChanges
from pipespec.cluster.processes.agent_handle import AgentHandle
from pipespec.cluster.processes.fault_stats import Fault
from pipespec.cluster.processes.worker_group import PRELOAD, WorkerGroup
from pipespec.cluster.recovery.cluster_state import ClusterState
from pipespec.cluster.recovery.recovery import Recovery
from pipespec.cluster.redis_setup import ClusterRedis, cluster_redis
from pipespec.cluster.weights.distribution import WeightMoves, distribute_weights
from pipespec.cluster.weights.plan import require_weights
from pipespec.controller import epoch_control
from pipespec.controller.membership import Membership
from pipespec.controller.request_log import RequestLog
from pipespec.engine.formats.architectures import modeling_module
from pipespec.engine.formats.quantization import BY_TORCHAO, TORCHAO
from pipespec.errors import (
    ControllerError,
    PipespecError,
    RankFailed,
    StaleEpoch,
    Unreachable,
)
from pipespec.system.end_signals import raise_swallowed

log = logging.getLogger(__name__)

# Imported by the workers alone: a launcher needs no model.
WORKER_ENTRYPOINT = "pipespec.cluster.ranks.worker:run_worker"
# How often a cluster without events is checked.
HEARTBEAT_S = 0.05
# How long the ranks may take to end once all requests have finished.
ENDING_S = 30.0


class ClusterSession:
    """A running cluster, for the process that started it. `poll`, `check` and `reporters` may be
    called from any thread; the rest is for one."""

    def __init__(
        self,
        deployment: Deployment,
        redis: ClusterRedis,
        cluster: WorkerGroup,
        recovery: Recovery,
        changes: HostChanges,
    ):
        self.deployment = deployment
        self.changes = changes
        # Passwords included: not for messages or command lines.
        self.redis = redis
        self.url, self.namespace = redis.url, redis.namespace
        self._polling = threading.Lock()  # a client polls from its own thread
        self._cluster = cluster
        self._recovery = recovery
        self._first_epoch = recovery.state.epoch

    @property
    def state(self) -> ClusterState:
        return self._recovery.state

    @property
    def epoch(self) -> int:
        return self.state.epoch

    @property
    def faults(self) -> Sequence[Fault]:
        return self.state.faults

    def poll(self) -> bool:
        """Whether the ranks still run. Raises RankFailed if the cluster has failed."""
        self._recovery.check()
        with self._polling:
            return self._cluster.poll()

    def await_ranks(self, on_loaded: Callable[[int, int], None]) -> None:
        sizes = memory.bytes_by_rank(self.deployment)

        def all_joined(shared: Membership) -> bool:
            if not self.poll():
                raise RankFailed("The ranks ended before they had any work.")
            epoch, workers = self.state.epoch, self.state.assignment.workers
            joined = shared.await_attached(epoch, len(workers), HEARTBEAT_S)
            loaded = shared.loaded(workers)
            done = sum(
                size if rank in joined else min(loaded.get(worker, 0), size)
                for rank, (worker, size) in enumerate(zip(workers, sizes, strict=False))
            )
            # A byte more for each that has joined, so that a bar is full only then.
            on_loaded(done + len(joined), sum(sizes) + len(workers))
            return len(joined) >= len(workers)

        self._until(all_joined)

    def finish(self) -> None:
        by_hand = [
            worker for host in self.deployment.hosts if host.by_hand for worker in host.workers
        ]
        closed = 0
        done_at: float | None = None

        def all_ended(shared: Membership) -> bool:
            nonlocal closed, done_at
            self._recovery.check()
            if closed != (epoch := self.epoch):
                with (
                    suppress(StaleEpoch),
                    RequestLog(self.url, namespace=self.namespace, epoch=epoch) as log,
                ):
                    log.close_queue()
                closed = epoch
            try:
                self._cluster.wait(HEARTBEAT_S)
                if not by_hand or not shared.alive(by_hand):
                    return True
                time.sleep(HEARTBEAT_S)
            except TimeoutError:
                pass
            done_at = (done_at or time.monotonic()) if shared.idle() else None
            # A worker that is lost at the end is not replaced.
            return done_at is not None and (
                bool(self.faults or self.deployment.spares) or time.monotonic() - done_at > ENDING_S
            )

        self._until(all_ended)

    def _until(self, is_done: Callable[[Membership], bool]) -> None:
        """Call `is_done` until it returns true, also while Redis restarts. Raises Unreachable."""
        reached = time.monotonic()
        while True:
            try:
                with Membership(self.url, self.namespace) as shared:
                    while not is_done(shared):
                        raise_swallowed()
                        reached = time.monotonic()
                    return
            except Unreachable:
                self._recovery.check()
                if time.monotonic() - reached > self.deployment.config.cluster.patience_s:
                    raise
                time.sleep(HEARTBEAT_S)

    # --- for clients --------------------------------------------------------------------------

    def check(self) -> None:
        if not self.poll():
            raise RankFailed("The ranks ended before the request was finished.")

    def reporters(self) -> tuple[int, bool]:
        state = self.state
        return len(state.assignment.workers), bool(state.faults) or state.epoch > self._first_epoch


@contextmanager
def start_agents(deployment: Deployment, *, stays: bool = False) -> Iterator[WorkerGroup]:
    """Start the agents of a deployment's hosts, which import what the ranks need. Before that the
    deployment is checked, and the hosts get the weights that they lack, unless the caller has had
    both done. `stays`: the cluster does not end with a request, so workers may be started by hand.
    Raises ConfigError before anything is started, and HostFailed if an agent cannot begin."""
    if not deployment.fetched:
        check_deployment(deployment, stays=stays)
        distribute_weights(deployment)
    require_weights(deployment)
    for line in (expanded, shared_gpu, without_ggml, scaled):
        if (found := line(deployment)) is not None:
            log.warning(found)
    models = [info for _, info in deployment.models]
    types = dict.fromkeys(info.model_type for info in models)
    entrypoint = WORKER_ENTRYPOINT.partition(":")[0]
    used = {info.storage.quantization or deployment.weight_format(info) for info in models}
    quantizers = [TORCHAO] if used & {TORCHAO, BY_TORCHAO} else []
    with WorkerGroup(
        [host for host in deployment.hosts if not host.by_hand],
        (*quantizers, *PRELOAD, entrypoint, *map(modeling_module, types)),
        name=f"{deployment.config.controller.namespace}-{secrets.token_hex(4)}",
    ) as agents:
        # Before this process imports more: an error of an agent ends the command at once.
        agents.await_agents()
        yield agents


@contextmanager
def start_cluster(
    deployment: Deployment,
    agents: WorkerGroup,
    on_loaded: Callable[[int, int], None] = lambda num_bytes, of: None,
    on_log: Callable[[str, str], None] | None = None,
    on_begun: Callable[[ControllerAddress], None] | None = None,
) -> Iterator[ClusterSession]:
    """Start the cluster of a deployment with the agents of its hosts, wait until all ranks are
    ready, and end it afterwards. Leaving the block waits for submitted requests; an exception ends
    the ranks at once. `on_loaded` is called again and again with how many bytes of weights the
    ranks have loaded, and of how many; what it raises ends the start. `on_log` is called with a
    worker's name and a line that it wrote, `on_begun` with the controller's address, when
    workers started by hand may join. Raises ConfigError, Unreachable, HostFailed before any rank
    starts; RankFailed if one failed, or was lost again and again: the others have been ended."""
    memory.require_memory(deployment, memory.local_ranks(deployment))
    over = threading.Event()
    moves = WeightMoves(deployment, partial(distribute_weights, over=over))
    with (
        cluster_redis(deployment) as redis,
        Recovery(
            redis.url,
            redis.namespace,
            deployment.assignment(),
            workers=[worker for host in deployment.hosts for worker in host.workers],
            replan=moves.plan,
            server=redis.server,
            patience_s=deployment.config.cluster.patience_s,
        ) as recovery,
    ):
        where = ControllerAddress(
            redis.worker_url,
            redis.namespace,
            secret=secrets.token_urlsafe(24),
            local_url=redis.url,
        )

        def start(on: AgentHandle | None, planned: Deployment) -> None:
            agents.start_workers(WORKER_ENTRYPOINT, (planned, where), on_log=on_log, on=on)

        changes = HostChanges(agents, recovery, moves, start)
        session = ClusterSession(deployment, redis, agents, recovery, changes)
        start(None, deployment)
        recovery.watch(agents)
        if on_begun is not None:
            on_begun(where)
        failed = False
        try:
            session.await_ranks(on_loaded)
            changes.adopt()
            yield session
            session.finish()
        except PipespecError:
            failed = True
            raise
        finally:
            over.set()
            # Spares, and workers that were started by hand, end with the epoch.
            with suppress(ControllerError):
                recovery.stop()
                epoch_control.end_epoch(redis.url, redis.namespace, failed=failed)
            agents.stop()
