"""Which workers of a cluster are alive, by the leases that they renew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipespec.controller.membership import LEASE_S

# Seconds for which an expired lease may still be renewed.
GRACE_S = 0.5
# Seconds within which a worker that was started in the place of another must renew its lease.
KILL_S = 15.0


class WorkerLeases:
    """The leases of workers, as one process sees them renewed. Pure: callers pass the leases, as of
    `Membership.beats`, and the time in seconds of the monotonic clock.

    Redis expires leases by its wall clock, which may be changed meanwhile; so what counts is how
    long ago each renewal was seen.

    Attributes:
        alive: workers whose leases are valid.
        lost_at: when the lease of each other one expired; not of those that never had one.
    """

    def __init__(self, workers: Sequence[str]):
        self.workers = tuple(workers)
        self.alive: set[str] = set()
        self.lost_at: dict[str, float] = {}
        self._renewals: dict[str, tuple[bytes, float]] = {}  # the newest, and when it was seen
        self._killed_at: dict[str, float] = {}  # when a lost worker was killed

    def watch(self, workers: Sequence[str]) -> None:
        """Watch these workers from now on, and forget all others."""
        self.workers = tuple(workers)
        self.alive &= set(workers)
        for known in (self.lost_at, self._renewals, self._killed_at):
            for worker in known.keys() - set(workers):
                del known[worker]

    def update(self, beats: Mapping[str, bytes], now: float) -> list[str]:
        """Take note of the leases; returns the workers whose leases have expired since the last
        call."""
        for worker, renewal in beats.items():
            if worker not in self._renewals or self._renewals[worker][0] != renewal:
                self._renewals[worker] = renewal, now
        alive = {worker for worker, (_, at) in self._renewals.items() if now - at < LEASE_S}
        silent = sorted(self.alive - alive)
        self.alive = alive
        for worker in alive:
            self.lost_at.pop(worker, None)
            self._killed_at.pop(worker, None)
        for worker in silent:
            self.lost_at[worker] = now
        return silent

    def pid(self, worker: str) -> int | None:
        """The process that renews the lease of a worker; None: no process does."""
        return self._pid(worker) if worker in self.alive else None

    def _pid(self, worker: str) -> int:
        return int(self._renewals[worker][0].split()[0])

    def silent_s(self, worker: str, now: float) -> float:
        """For how many seconds a worker has been lost; 0: it is alive, or never was."""
        return now - self.lost_at.get(worker, now)

    def to_kill(self, now: float) -> dict[str, int | None]:
        """Lost workers that should be killed now, if they still run.

        The first time it is the process that held the lease, as another may have been started in
        its place; None: that one has not renewed it in KILL_S either.
        """
        # Wait a moment: after a silence of Redis all leases have expired.
        due = [
            worker
            for worker, since in self.lost_at.items()
            if now - self._killed_at.get(worker, -KILL_S) > KILL_S and now - since > GRACE_S
        ]
        return {each: None if each in self._killed_at else self._pid(each) for each in due}

    def note_kill(self, worker: str, now: float) -> None:
        """A lost worker was killed; the one in its place has KILL_S to renew the lease."""
        self._killed_at[worker] = now
