"""The loop of a stage: receive, compute, verify, prune, send."""

from __future__ import annotations

from typing import Any

from pipespec import verdict
from pipespec.control.client import Controller
from pipespec.graph import Layout, Task, compute, prune, transfer
from pipespec.pace import Pace, hold
from pipespec.stage import Stage
from pipespec.trace import Timeline
from pipespec.transport import Transport
from pipespec.types import Batch
from pipespec.verify import Verifier


class Worker:
    """One stage of the pipeline, at one rank.

    In lockstep every rank does the same in step t: compute the batch that its neighbour sent
    in step t-1, hear the verdict of step t, drop what it ruled out, send on.
    """

    def __init__(
        self,
        stage: Stage,
        link: Transport,
        controller: Controller,
        verifier: Verifier,
        layout: Layout,
        *,
        pace: Pace,
        timeline: Timeline,
    ):
        self.stage = stage
        self.link = link
        self.controller = controller
        self.verifier = verifier
        self.rank = link.rank
        self.last = link.rank == layout.last
        self.pace = pace
        self.timeline = timeline
        self.step = 0
        self._done: list[Task] = []
        self._counts = dict.fromkeys(("steps", "rows", "dropped", "overruns"), 0)
        # When the current request's first row came; None between requests.
        self._since: int | None = None

    def run(self) -> None:
        """Work until a batch says stop."""
        while True:
            batch = self.receive()
            computed = self.compute(batch)
            self.hear(computed)
            if not self.last:
                self.send(self.prune(computed))
            for request in batch.released:
                self.release(request)
            if batch.stop:
                self.controller.complete(self._done)
                return
            self.step += 1

    def receive(self) -> Batch:
        """What the neighbour sent in the step before; nobody had sent anything before step 0."""
        self.timeline.step = self.step
        # Rank 1 has the head before it, which may be idle: waiting there is not waiting for work.
        with self.timeline("receive"):
            batch = self.link.recv() if self.step else Batch(step=-1)
        assert batch.step == self.step - 1, "the links are in step"
        return batch

    def compute(self, batch: Batch) -> Batch:
        start = self.timeline.clock()
        if self._since is None and len(batch):
            self.timeline.take()
            self._since = start
        self._counts["steps"] += self._since is not None
        with self.timeline("compute"):
            computed = self.stage.compute(batch)
            if len(batch) and not hold(start, self.pace.stage_ms):
                self._counts["overruns"] += 1
        self._counts["rows"] += len(computed)
        self._counts["dropped"] += len(batch) - len(computed)
        computed.step = self.step
        return computed

    def hear(self, computed: Batch) -> None:
        """Agree on the verdict of this step and apply it. The last stage is who draws it."""
        done = [*self._done, compute(self.rank, self.step)]
        if self.last:
            with self.timeline("verify"):
                verdicts = self.stage.verdicts(computed, self.verifier)
            with self.timeline("control"):
                self.controller.complete(done, verdict.pack(verdicts, self.timeline.clock()))
        else:
            verdicts = verdict.hear(
                self.controller, done, prune(self.rank, self.step), self.timeline
            )
        with self.timeline("prune"):
            self.stage.apply(verdicts)
        self._done = [prune(self.rank, self.step)]

    def prune(self, computed: Batch) -> Batch:
        with self.timeline("prune"):
            alive = self.stage.prune(computed)
        self._counts["dropped"] += len(computed) - len(alive)
        return alive

    def send(self, batch: Batch) -> None:
        with self.timeline("send"):
            self.link.send(batch)
        self._done.append(transfer(self.rank, self.step))

    def release(self, request: int) -> None:
        """A request is over: free what it held here, report where the time went."""
        self.stage.release(request)
        self.controller.report(request, self.statistics())

    def statistics(self) -> dict[str, Any]:
        """This rank's part of a request's statistics; the counts start anew."""
        totals, events = self.timeline.take()
        now = self.timeline.clock()
        report = {
            "rank": self.rank,
            "elapsed_ns": now - self._since if self._since is not None else 0,
            "busy_ns": totals["compute"] + totals["verify"],
            "control_ns": totals["control"],
            **self._counts,
            "events": events,
        }
        self._since = None
        self._counts = dict.fromkeys(self._counts, 0)
        return report
