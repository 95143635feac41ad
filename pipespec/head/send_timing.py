"""When the head sends a batch: with the verdict of the step, or before it."""

from __future__ import annotations

from pipespec.timing.batch_times import Ema

# Running free: a batch is sent when so much of the first stage's work on the one before is left.
EARLY = 0.15
# Steps that the estimate of that work's length remembers.
MEMORY = 8
# A moment that is further off is by the clock of another machine.
OTHER_CLOCK_NS = 10**9


class SendTiming:
    """Estimates how long the first stage computes, and how long after that a verdict arrives.

    Holds no clock: moments are arguments, in nanoseconds.
    """

    def __init__(self) -> None:
        self._fed = (0, 0)  # rows of the batch before the last, and of the last
        self._taken = 0  # when the first stage took the last batch
        self._takes: dict[int, int] = {}  # the same of the steps without a verdict yet
        self._stage_ns = Ema(MEMORY)  # how long the first stage computes
        self._verdict_ns = Ema(MEMORY)  # from when it took a batch to the verdict of the step

    def add_batch(self, rows: int) -> None:
        self._fed = (self._fed[1], rows)

    def add_verdict(self, step: int, now: int) -> None:
        taken = self._takes.pop(step, None)
        if taken is not None:
            self._verdict_ns.add(now - taken)

    def deadline(self, step: int, taken: int, now: int, misses_per_step: float) -> int | None:
        """When the batch of `step` should be sent, with or without the verdict of the step;
        None: with it, as nothing is known yet.

        The first stage took the batch before at the moment `taken`, and if that had rows it works
        for about as long as on average. A batch that is chosen without the verdict costs one step
        more whenever that verdict misses the tree. So it is worth waiting for the verdict beyond
        the end of that work, for the share of the work that equals the rate of misses; if it
        arrives later still, the batch is sent shortly before the end.
        """
        if not 0 <= now - taken < OTHER_CLOCK_NS:
            taken = now
        if self._fed[0] and self._taken:
            self._stage_ns.add(taken - self._taken)
        self._taken = taken
        if not self._fed[1]:
            return taken
        self._takes[step] = taken
        stage_ns, verdict_ns = self._stage_ns.value, self._verdict_ns.value
        if stage_ns is None or verdict_ns is None:
            return None
        patience = stage_ns * misses_per_step
        if verdict_ns <= stage_ns + patience:
            return taken + round(stage_ns + patience)
        return taken + round(stage_ns * (1 - EARLY))
