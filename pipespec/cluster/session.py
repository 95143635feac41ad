"""A cluster that is started once and decodes many requests.

    with session.prepare(plan) as agents:           # they import; decide the rest meanwhile
        with session.start(plan, agents) as cluster, asking(cluster, served) as client:
            ...                                     # `pipespec.client.client`

The head decodes one request at a time, in the order in which they were submitted; the others
wait in the request log.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from pipespec.cluster import deployment, memory
from pipespec.cluster.launch import PRELOAD, Cluster, check_port
from pipespec.cluster.rank_assignment import RankAssignment
from pipespec.cluster.recovery import Fault, Recovery
from pipespec.cluster.replanning import address_of, own_address, replanner
from pipespec.cluster.store import store
from pipespec.controller.client import Controller
from pipespec.controller.members import Membership
from pipespec.controller.requests import RequestLog
from pipespec.engine.architectures import modeling_module
from pipespec.errors import ConfigError, ControllerError, RankFailed, StaleEpoch, Unreachable

# Imported by the members alone: a launcher needs no model.
MEMBERS_RUN = "pipespec.cluster.member:run_member"
# How often a silent cluster is looked at, and how long its ranks may take to report at the end.
HEARTBEAT_S = 0.05
REPORTS_TIMEOUT_S = 60.0
LOST_REPORTS_S = 2.0
# How long the ranks may take to end once there is nothing more to do.
ENDING_S = 5.0


class ClusterSession:
    """A running cluster, as the process that started it sees it. Not for several threads."""

    heartbeat_s = HEARTBEAT_S
    same_clock = True

    def __init__(
        self,
        plan: deployment.Plan,
        url: str,
        elsewhere: str,
        namespace: str,
        log: RequestLog,
        cluster: Cluster,
        recovery: Recovery,
    ):
        self.plan = plan
        # Passwords included: not for messages or command lines.
        self.url = url
        self.elsewhere = elsewhere  # where other boxes reach it
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
            count = len(self._recovery.assignment.members)
            now = shared.await_attached(self.epoch, max(joined + 1, 0), HEARTBEAT_S)
            if now != joined:
                joined = now
                on_loaded(joined, count)
            return joined >= count

        self._until(look)

    def finish(self) -> None:
        """Wait until all that was submitted is done and the ranks have ended."""
        by_hand = [member for box in self.plan.boxes if box.by_hand for member in box.members]
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
                bool(self.faults or self.plan.spares) or time.monotonic() - done_at > ENDING_S
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
                if time.monotonic() - reached > self.plan.config.cluster.patience_s:
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
        return len(self._recovery.assignment.members), bool(self.faults)


@contextmanager
def prepare(plan: deployment.Plan) -> Iterator[Cluster]:
    """Start the agents of a plan's boxes, which import what the ranks need, for `start`.

    Raises ConfigError (also of a missing package), before anything is started.
    """
    deployment.require_quantizers(plan)
    deployment.require_backend(plan)
    memory.require_files(plan)
    check_port(plan.config.transport.port)
    with Cluster(
        [box for box in plan.boxes if not box.by_hand],
        (*PRELOAD, *modules_of(plan)),
        name=f"{plan.config.controller.namespace}-{secrets.token_hex(4)}",
    ) as agents:
        yield agents


@contextmanager
def start(
    plan: deployment.Plan,
    agents: Cluster,
    on_loaded: Callable[[int, int], None] = lambda ranks, of: None,
    on_log: Callable[[str, str], None] | None = None,
    on_begun: Callable[[deployment.ControllerAddress], None] | None = None,
) -> Iterator[ClusterSession]:
    """Start the cluster of a plan, wait until all ranks are ready, and end it afterwards.

    Leaving the block waits for what was submitted; an exception ends the ranks at once.

    Args:
        agents: of `prepare`, for the same boxes.
        on_loaded: called with how many ranks have loaded their models, and of how many.
        on_log: called with a member's name and rank, and a line that it wrote.
        on_begun: called with what members must know, when those started by hand may join.

    Raises:
        ConfigError (also of a missing package), Unreachable, HostFailed: before any rank starts.
        RankFailed: a rank failed, or was lost again and again; the others have been ended.
    """
    by_hand = [box.name for box in plan.boxes if box.by_hand]
    if by_hand and on_begun is None:
        raise ConfigError(
            f"The members of {', '.join(by_hand)} are started by hand (ssh: none); start the "
            "cluster with `pipespec up`, and ask it with --on."
        )
    memory.require_memory(plan, memory.local_ranks(plan))
    address = own_address(plan.boxes)
    with store(plan.config.controller, address) as (url, elsewhere, namespace, server):
        assignment = RankAssignment(
            plan.members, plan.layers, address_of(plan, plan.members[0], address)
        )
        with Recovery(
            url,
            namespace,
            assignment,
            members=(*plan.members, *plan.spares),
            replan=replanner(plan, address),
            server=server,
            patience_s=plan.config.cluster.patience_s,
            stall_s=plan.config.cluster.stall_s,
        ) as recovery:
            where = deployment.ControllerAddress(
                elsewhere, namespace, secret=secrets.token_urlsafe(24)
            )
            boxes = {member: box for box in plan.boxes for member in box.members}

            def tell(member: str, line: str) -> None:
                assert on_log is not None
                rank = recovery.assignment.rank_of(member)
                on_log(f"{member} {'spare' if rank is None else f'rank {rank}'}", line)

            with RequestLog(url, namespace=namespace, epoch=recovery.epoch) as log:
                session = ClusterSession(plan, url, elsewhere, namespace, log, agents, recovery)
                agents.run(
                    MEMBERS_RUN,
                    (plan, where, boxes),
                    restart=True,
                    on_log=None if on_log is None else tell,
                )
                recovery.watch(agents)
                if on_begun is not None:
                    on_begun(where)
                try:
                    session.await_ranks(on_loaded)
                    yield session
                    session.finish()
                finally:
                    # Spares, and members that others started, learn that it is over.
                    with suppress(ControllerError):
                        recovery.stop()
                        Controller.new_epoch(url, namespace)
                    agents.stop()


def modules_of(plan: deployment.Plan) -> list[str]:
    """What the members of a plan import besides what all do: the entrypoint, and the classes of
    target and draft."""
    infos = [plan.target] + ([] if plan.draft is None else [plan.draft])
    types = dict.fromkeys(info.model_type for info in infos)
    return [MEMBERS_RUN.partition(":")[0], *map(modeling_module, types)]
