"""A cluster that is started once and decodes many requests.

    with session.prepare(deployment) as agents:    # they import; decide the rest meanwhile
        with session.start(deployment, agents) as cluster, asking(cluster, served) as client:
            ...                                    # `pipespec.client.client`

The head takes requests in the order in which they were submitted, as many at once as
`scheduler.max_num_seqs` says; the others wait in the request log.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from pipespec.cluster import memory
from pipespec.cluster.deployment import (
    ControllerAddress,
    Deployment,
    require_backend,
    require_quantizers,
)
from pipespec.cluster.faults import Fault
from pipespec.cluster.launch import PRELOAD, Cluster, check_port
from pipespec.cluster.rank_assignment import RankAssignment
from pipespec.cluster.recovery import Recovery
from pipespec.cluster.replanning import address_of, own_address, replanner
from pipespec.cluster.store import require_same_model, store
from pipespec.controller import epochs
from pipespec.controller.membership import Membership
from pipespec.controller.requests import RequestLog
from pipespec.engine.architectures import modeling_module
from pipespec.errors import (
    ConfigError,
    ControllerError,
    PipespecError,
    RankFailed,
    StaleEpoch,
    Unreachable,
)

# Imported by the workers alone: a launcher needs no model.
WORKERS_RUN = "pipespec.cluster.worker:run_worker"
# How often a silent cluster is looked at.
HEARTBEAT_S = 0.05
# How long the ranks may take to end once there is nothing more to do.
ENDING_S = 5.0


class ClusterSession:
    """A running cluster, as the process that started it sees it. Not for several threads."""

    heartbeat_s = HEARTBEAT_S
    same_clock = True

    def __init__(
        self,
        deployment: Deployment,
        url: str,
        elsewhere: str,
        namespace: str,
        log: RequestLog,
        cluster: Cluster,
        recovery: Recovery,
    ):
        self.deployment = deployment
        # Passwords included: not for messages or command lines.
        self.url = url
        self.elsewhere = elsewhere  # where other hosts reach it
        self.namespace = namespace
        self._log = log
        self._cluster = cluster
        self._recovery = recovery

    @property
    def epoch(self) -> int:
        return self._recovery.epoch

    @property
    def faults(self) -> Sequence[Fault]:
        """What has ended epochs so far."""
        return self._recovery.faults

    def poll(self) -> bool:
        """Whether the ranks still run. Raises RankFailed if the cluster has failed."""
        self._recovery.check()
        return self._cluster.poll()

    def await_ranks(self, on_loaded: Callable[[int, int], None]) -> None:
        """Wait until every rank has loaded its model and joined."""
        joined = -1

        def look(shared: Membership) -> bool:
            nonlocal joined
            if not self.poll():
                raise RankFailed("The ranks ended before they had any work.")
            count = len(self._recovery.assignment.workers)
            now = shared.await_attached(self.epoch, max(joined + 1, 0), HEARTBEAT_S)
            if now != joined:
                joined = now
                on_loaded(joined, count)
            return joined >= count

        self._until(look)

    def finish(self) -> None:
        """Wait until all that was submitted is done and the ranks have ended."""
        by_hand = [
            worker for host in self.deployment.hosts if host.by_hand for worker in host.workers
        ]
        closed = 0
        done_at: float | None = None

        def look(shared: Membership) -> bool:
            nonlocal closed, done_at
            self._recovery.check()
            if closed != self.epoch:
                closed = self.epoch
                with suppress(StaleEpoch):
                    self._log.close_queue(closed)
            try:
                self._cluster.wait(HEARTBEAT_S)
                if not by_hand or not shared.alive(by_hand):
                    return True
                time.sleep(HEARTBEAT_S)
            except TimeoutError:
                pass
            done_at = (done_at or time.monotonic()) if shared.idle() else None
            # Who was lost at the end is not worth another epoch.
            return done_at is not None and (
                bool(self.faults or self.deployment.spares) or time.monotonic() - done_at > ENDING_S
            )

        self._until(look)

    def _until(self, look: Callable[[Membership], bool]) -> None:
        """Look until it is done, also while Redis is started again. Raises Unreachable."""
        reached = time.monotonic()
        while True:
            try:
                with Membership(self.url, self.namespace) as shared:
                    while not look(shared):
                        reached = time.monotonic()
                    return
            except Unreachable:
                self._recovery.check()
                if time.monotonic() - reached > self.deployment.config.cluster.patience_s:
                    raise
                time.sleep(HEARTBEAT_S)

    # --- for clients --------------------------------------------------------------------------

    def open_log(self) -> RequestLog:
        """A connection of one's own to the request log. Raises Unreachable."""
        return RequestLog(self.url, namespace=self.namespace, epoch=self.epoch)

    def check(self) -> None:
        """Raise RankFailed if the cluster has ended."""
        if not self.poll():
            raise RankFailed("The ranks ended before the request was finished.")

    def reporters(self) -> tuple[int, bool]:
        """How many ranks report on a request, and whether some reports may be lost."""
        return len(self._recovery.assignment.workers), bool(self.faults)


@contextmanager
def prepare(deployment: Deployment, *, stays: bool = False) -> Iterator[Cluster]:
    """Start the agents of a deployment's hosts, which import what the ranks need, for `start`.

    `stays`: the cluster does not end with a request, so workers may be started by hand.

    Raises ConfigError (also of a missing package), before anything is started.
    """
    by_hand = [host.name for host in deployment.hosts if host.by_hand]
    if by_hand and not stays:
        raise ConfigError(
            f"The workers of {', '.join(by_hand)} are started by hand (ssh: none); start the "
            "cluster with `pipespec up`, and ask it with --on."
        )
    require_quantizers(deployment)
    require_backend(deployment)
    memory.require_files(deployment)
    require_same_model(deployment)
    check_port(deployment.config.transport.port)
    with Cluster(
        [host for host in deployment.hosts if not host.by_hand],
        (*PRELOAD, *modules_of(deployment)),
        name=f"{deployment.config.controller.namespace}-{secrets.token_hex(4)}",
    ) as agents:
        yield agents


@contextmanager
def start(
    deployment: Deployment,
    agents: Cluster,
    on_loaded: Callable[[int, int], None] = lambda ranks, of: None,
    on_log: Callable[[str, str], None] | None = None,
    on_begun: Callable[[ControllerAddress], None] | None = None,
) -> Iterator[ClusterSession]:
    """Start the cluster of a deployment, wait until all ranks are ready, and end it afterwards.

    Leaving the block waits for what was submitted; an exception ends the ranks at once.

    Args:
        agents: of `prepare`, for the same hosts.
        on_loaded: called with how many ranks have loaded their models, and of how many.
        on_log: called with a worker's name and rank, and a line that it wrote.
        on_begun: called with what workers must know, when those started by hand may join.

    Raises:
        ConfigError (also of a missing package), Unreachable, HostFailed: before any rank starts.
        RankFailed: a rank failed, or was lost again and again; the others have been ended.
    """
    memory.require_memory(deployment, memory.local_ranks(deployment))
    address = own_address(deployment.hosts)
    with store(deployment, address) as (url, elsewhere, namespace, server):
        assignment = RankAssignment(
            deployment.workers,
            deployment.layers,
            address_of(deployment, deployment.workers[0], address),
            tuple(map(deployment.followers_of, deployment.workers)),
        )
        with Recovery(
            url,
            namespace,
            assignment,
            workers=[worker for host in deployment.hosts for worker in host.workers],
            replan=replanner(deployment, address),
            server=server,
            patience_s=deployment.config.cluster.patience_s,
            stall_s=deployment.config.cluster.stall_s,
        ) as recovery:
            where = ControllerAddress(elsewhere, namespace, secret=secrets.token_urlsafe(24))
            hosts = {worker: host for host in deployment.hosts for worker in host.workers}

            def tell(worker: str, line: str) -> None:
                assert on_log is not None
                place = recovery.assignment.place_of(worker)
                on_log(f"{worker} {'spare' if place is None else f'rank {place[0]}'}", line)

            with RequestLog(url, namespace=namespace, epoch=recovery.epoch) as log:
                session = ClusterSession(
                    deployment, url, elsewhere, namespace, log, agents, recovery
                )
                agents.run(
                    WORKERS_RUN,
                    (deployment, where, hosts),
                    restart=True,
                    on_log=None if on_log is None else tell,
                )
                recovery.watch(agents)
                if on_begun is not None:
                    on_begun(where)
                failed = False
                try:
                    session.await_ranks(on_loaded)
                    yield session
                    session.finish()
                except PipespecError:
                    failed = True
                    raise
                finally:
                    # Spares, and workers that others started, learn that it is over.
                    with suppress(ControllerError):
                        recovery.stop()
                        epochs.end(url, namespace, failed=failed)
                    agents.stop()


def modules_of(deployment: Deployment) -> list[str]:
    """What the workers of a deployment import besides what all do: the entrypoint, and the classes
    of its models."""
    types = dict.fromkeys(info.model_type for _, info in deployment.models)
    return [WORKERS_RUN.partition(":")[0], *map(modeling_module, types)]
