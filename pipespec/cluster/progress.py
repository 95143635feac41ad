"""Whether a cluster makes progress: steps are completed, and tokens decided between faults."""

from __future__ import annotations

import time

from pipespec.controller.membership import Membership

# So many faults in a row end the cluster, unless a token was decided in between, or all ranks
# had joined for so many seconds.
MAX_FAULTS = 16
STABLE_S = 10.0


class Progress:
    """The progress of one cluster, for one thread.

    Attributes:
        new_faults: faults since `too_many_faults` was called.

    Args:
        stall_s: how long a step may take.
    """

    def __init__(self, stall_s: float) -> None:
        self.new_faults = 0
        self._stall_s = stall_s
        self._faults_in_a_row = 0  # since a token was decided
        self._latest: tuple[object, ...] = ()  # changes as long as the cluster works
        self._latest_at = time.monotonic()
        self._num_finished = 0  # requests so far
        self._lengths: dict[int, int] = {}  # in tokens, of every sequence that was admitted

    def stalls(self, shared: Membership, epoch: int, *, complete: bool) -> bool:
        """Whether a request is running and all ranks have joined (`complete`), but no step is
        completed: two ranks may have lost each other, while both still reach Redis."""
        now = time.monotonic()
        latest = (epoch, complete, shared.oldest_step(epoch), shared.progress())
        if latest != self._latest or not complete or shared.idle():
            self._latest, self._latest_at = latest, now
        return now - self._latest_at > self._stall_s

    def too_many_faults(self, shared: Membership, *, stable: bool) -> bool:
        """Whether no token was decided between too many faults in a row. `stable`: the cluster is
        well all the same."""
        finished, lengths = shared.finished(), dict(shared.progress())
        # A sequence that is admitted again is no progress; a new token is.
        grown = any(length > self._lengths.get(n, length) for n, length in lengths.items())
        if grown or stable or finished > self._num_finished:
            self._faults_in_a_row = 0
        self._num_finished, self._lengths = finished, self._lengths | lengths
        self._faults_in_a_row += self.new_faults
        self.new_faults = 0
        return self._faults_in_a_row > MAX_FAULTS
