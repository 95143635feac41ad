"""Which processes have joined the epochs of a cluster."""

from __future__ import annotations

from pipespec.cluster.deployment.rank_assignment import RankAssignment
from pipespec.cluster.processes.agent_handle import WorkerDeath
from pipespec.controller.membership import Membership


class JoinedPids:
    """The process ids of the workers that have joined, for one thread.

    Attributes:
        current: of those that have joined this epoch.
    """

    def __init__(self) -> None:
        self.current: dict[str, int] = {}
        self._previous: dict[str, int] = {}  # of those that joined the last epoch

    def update(self, shared: Membership, epoch: int, assignment: RankAssignment) -> int:
        """Take note of the workers that have joined an epoch; returns how many ranks have."""
        joined = shared.attached(epoch)
        self.current = {
            worker: joined[rank] for rank, worker in enumerate(assignment.workers) if rank in joined
        } | {
            worker: pid
            for worker, pid in shared.followers(epoch).items()
            if worker in assignment.everyone
        }
        return len(joined)

    def begin_epoch(self) -> None:
        """No worker has joined the next epoch yet."""
        self._previous, self.current = self.current, {}

    def has_joined(self, death: WorkerDeath) -> bool:
        """Whether the process that died had joined this epoch."""
        return _is_death_of(death, self.current)

    def had_joined(self, death: WorkerDeath) -> bool:
        """Whether the process that died had joined the last epoch."""
        return _is_death_of(death, self._previous)


def _is_death_of(death: WorkerDeath, pids: dict[str, int]) -> bool:
    return death.worker in pids and death.pid in (None, pids[death.worker])
