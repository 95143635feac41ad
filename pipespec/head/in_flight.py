"""The batches on their way through the pipeline: how many there are, and how many would keep it
busy."""

from __future__ import annotations

import math
from collections import deque

from pipespec.timing.batch_times import Ema

# Batches in flight at most, where there are no more stages.
MOST_IN_FLIGHT = 32
# Times of passes among which the least counts; it is that of links and stages without a queue.
PASSES = 64
# Steps that the estimate of the head's own work remembers.
MEMORY = 16
# A pipeline is taken for twice as deep as it has stages where a pass lasts at least this many times
# as long as twice the stages need: times are noisy, and more batches make no step shorter then.
SURELY = 1.25
# What a message takes at least on a link that is long; on others it waits for processes, of which
# more batches would make more.
LONG_MS = 5.0


class InFlight:
    """Counts batches from when they are sent until their verdicts arrive.

    Holds no clock: moments are arguments, in nanoseconds.
    """

    def __init__(self, num_stages: int, most: int | None = None) -> None:
        """`most`: batches that are ever to be in flight; None: as many as keep it busy."""
        self._num_stages = num_stages
        self._most = most
        self._sent = deque[tuple[int, int | None]]()  # step, and moment if it is measured
        self._passes = deque[int](maxlen=PASSES)  # ns
        self._pass_ns = Ema(MEMORY)

    def __len__(self) -> int:
        return len(self._sent)

    def add_batch(self, step: int, now: int, *, measured: bool = True) -> None:
        """`measured`: how long it takes says how long others will, as it has rows, none of them of
        a prompt."""
        self._sent.append((step, now if measured else None))

    def add_verdict(self, step: int, now: int) -> float | None:
        """The verdict on the batch of a step arrived: on the oldest in flight. Returns for how many
        milliseconds that was; None: it was not measured."""
        of_batch, sent = self._sent.popleft()
        assert of_batch == step, "verdicts arrive in order"
        if sent is None:
            return None
        self._passes.append(now - sent)
        self._pass_ns.add(now - sent)
        return (now - sent) / 1e6

    def pause(self) -> None:
        """The head waits for requests: how long the batches in flight take will say nothing."""
        self._sent = deque((step, None) for step, _ in self._sent)

    def interval_ms(self, most: int) -> float:
        """After which the next batch should be sent, with `most` in flight: these are spread over a
        pass, as verdicts are then, of which each batch should know as many as it can."""
        return (self._pass_ns.value or 0.0) / most / 1e6

    @property
    def shortest_ms(self) -> float:
        """The shortest pass so far; 0: none was measured."""
        return min(self._passes, default=0) / 1e6

    def depth(self, step_ms: float) -> int:
        """Batches that keep the pipeline busy, by the shortest pass so far (`depth`)."""
        found = depth(self._num_stages, self.shortest_ms, step_ms)
        return found if self._most is None else min(found, self._most)


def depth(num_stages: int, pass_ms: float, step_ms: float) -> int:
    """Batches that keep a pipeline busy: as many as stages, or so many times two of them as a pass,
    with links, lasts longer than the slowest part takes for a batch, at least `step_ms`; 0: that
    is unknown."""
    if not step_ms or pass_ms - step_ms * num_stages < LONG_MS * (num_stages + 1):
        return num_stages
    doublings = max(math.floor(math.log2(pass_ms / step_ms / num_stages / SURELY)), 0)
    return max(min(num_stages << doublings, MOST_IN_FLIGHT), num_stages)
