"""The loop of the head: admit, grow, hear, feed.

Rank 0 holds the draft and the tree. In step t it grows the tree while the stages compute,
hears the verdict of step t, prunes, and feeds the nodes that the policy chooses to the first
stage. It decodes one request after another; everything it sends names the request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pipespec.controller.client import Controller
from pipespec.controller.graph import Layout, Task, compute, prune, step_graph, transfer
from pipespec.controller.records import CANCELLED
from pipespec.controller.verdict import VerdictReceiver
from pipespec.core import Batch, Request, Verdict
from pipespec.emulation import Pace, hold
from pipespec.head.feed.policy import FeedPolicy, PipelineState
from pipespec.head.feed.rounds import fits
from pipespec.head.meter import Ema, Meter
from pipespec.head.sequence import Sequence, StopCheck
from pipespec.head.source.protocol import TokenSource
from pipespec.head.tree import ROOT
from pipespec.trace import Timeline
from pipespec.transport.protocol import Transport

# Running free: a batch is sent when so much of the first stage's work on the one before is left.
EARLY = 0.15
# Steps that the estimate of that work's length remembers.
PACE_MEMORY = 8
# A moment that is further off was told by another machine's clock.
OTHER_CLOCK_NS = 10**9


class Head:
    """Rank 0."""

    def __init__(
        self,
        link: Transport,
        controller: Controller,
        source: TokenSource,
        policy: FeedPolicy,
        layout: Layout,
        *,
        rounds: int | str,
        chunk: int,
        context_limit: int,
        stop_check: Callable[[Request], StopCheck],
        pace: Pace,
        delay_ms: float,
        timeline: Timeline,
    ):
        self.link = link
        self.controller = controller
        self.source = source
        self.policy = policy
        self.layout = layout
        self.rounds = rounds
        self.chunk = chunk
        self.context_limit = context_limit
        self.stop_check = stop_check
        self.pace = pace
        self.timeline = timeline
        self.step = 0
        self.sequence: Sequence | None = None
        self.receiver = VerdictReceiver(controller, 0, timeline, delay_ms)
        self.meter = Meter(layout.num_steps)
        self._began = 0  # when this step began, on the timeline's clock
        self._guesses: bool | None = None  # whether this step knows any; None: it is not decoding
        self._decided = 0  # tokens that this step decided
        self._released: tuple[int, ...] = ()
        self._busy_until = 0  # the step in which the last batch that matters leaves the pipeline
        self._done: list[Task] = []
        self._submitted = 0  # steps
        self._unsettled: list[Verdict] = []  # followed, but neither logged nor told to the source
        self._fed = (0, 0)  # rows of the batch before the last, and of the last
        self._taken = 0  # when the first stage took the last batch
        self._takes: dict[int, int] = {}  # the same of the steps whose verdicts are to come
        self._stage_ns = Ema(PACE_MEMORY)  # how long the first stage computes
        self._verdict_ns = Ema(PACE_MEMORY)  # from when it took a batch to the verdict of the step

    def run(self) -> None:
        """Serve requests until there will be no more, then stop the stages."""
        while self.admit():
            self.begin()
            self.grow()
            self.hear()
            self.drop_cancelled()
            self.send(self.feed())
            self.log_accepted()
            self.measure()
        self.stop()

    def admit(self) -> bool:
        """Take the next request if none is open; False: no more will come.

        While batches are on their way the pipeline must keep stepping, so only an empty one
        is left to wait.
        """
        while self.sequence is None:
            draining = self.step <= self._busy_until
            request = self.controller.next_request(timeout=0 if draining else None)
            if request is not None:
                stops = self.stop_check(request)
                now = self.timeline.clock()
                self.timeline.take()
                answer = self.controller.tokens(request.id)
                self.sequence = Sequence.open(request, stops, self.context_limit, now, answer)
                self.source.begin(self.sequence.context)
                if self.sequence.ended:
                    self.finish(self.sequence.ended)
                    break  # a batch must tell the stages
            elif draining:
                break
            else:
                return False
        return True

    def begin(self) -> None:
        """A step begins."""
        self.timeline.step = self.step
        self._began = self.timeline.clock()
        self._decided = 0
        sequence = self.sequence
        self._guesses = sequence.guesses_in_flight if sequence and sequence.decoding else None
        self.meter.begin()
        # Running free, a stage may be ahead of the head, by its place in the pipeline at most.
        ahead = self.layout.num_steps if self.layout.sync == "free" else 0
        self.submit(self.step + ahead)

    def submit(self, last: int) -> None:
        """Lay out the tasks of the steps up to `last`."""
        with self.timeline("control"):
            while self._submitted <= last:
                self.controller.submit(step_graph(self.layout, self._submitted))
                self._submitted += 1

    def grow(self) -> None:
        """Let the source expand the tree while the stages compute."""
        sequence = self.sequence
        while sequence is not None:
            state = self.state(sequence)
            expansion = self.policy.grow(sequence.tree, state)
            nodes = sequence.useful(expansion.nodes)
            if not len(nodes) or not fits(self.rounds, state):
                return
            self.expand(sequence, nodes, expansion.limit)

    def expand(self, sequence: Sequence, nodes: np.ndarray, limit: int | None) -> None:
        """One draft round: the source proposes children for `nodes`."""
        start = self.timeline.clock()
        with self.timeline("draft"):
            candidates = self.source.expand(
                sequence.context, sequence.tree, nodes, self.policy.children
            )
            sequence.counts["overruns"] += not hold(start, self.pace.of_round)
        sequence.counts["rounds"] += 1
        self.meter.round(self._since(start), measured=candidates is not None)
        if candidates is not None:
            sequence.tree.append(candidates.parents, candidates.tokens, candidates.logps, limit)
            sequence.tree.trim(self.policy.capacity)

    def state(self, sequence: Sequence) -> PipelineState:
        """What the policy may know at this moment of the step."""
        return self.meter.state(
            self.step, end=sequence.last_position, elapsed_ms=self._since(self._began)
        )

    def _since(self, start: int) -> float:
        """Milliseconds since a moment of the timeline's clock."""
        return (self.timeline.clock() - start) / 1e6

    def hear(self) -> None:
        """Wait until this step's batch is due, and follow the verdicts that come until then.

        In lockstep it is due when the verdict of the step has come. Running free, it is due
        when the first stage is about to need it, or with that verdict, whichever is earlier;
        without anything to feed there is nothing to hurry for.
        """
        drafted, start = self._since(self._began), self.timeline.clock()
        done, self._done = [*self._done, compute(0, self.step)], []
        with self.timeline("control"):
            self.controller.complete(done)
        due = self.due(self.sequence) if self.layout.asks_for_link(0, self.step) else None
        while self.receiver.heard <= self.step:
            left = (due - self.timeline.clock()) / 1e9 if due and self.has_work() else None
            verdicts = self.receiver.verdict(None if left is None else max(left, 0.0))
            if verdicts is None:
                break
            taken = self._takes.pop(self.receiver.heard - 1, None)
            if taken is not None:
                self._verdict_ns.add(self.timeline.clock() - taken)
            self.follow(verdicts)
        if self._guesses is not None:
            self.meter.verdict(drafted, self._since(start), self._decided)
        if self.sequence is not None:
            self.sequence.counts["steps"] += 1

    def drop_cancelled(self) -> None:
        """End a request for which nobody waits any more."""
        sequence = self.sequence
        if sequence is not None and self.controller.cancelled(sequence.request.id):
            self.log_accepted()
            self.finish(CANCELLED)

    def due(self, sequence: Sequence | None) -> int | None:
        """When the batch of this step should be sent, with or without the verdict of the step;
        None: with it, as nothing is known yet.

        The first stage took the batch before at a known moment, and if that had rows it is at
        work for about as long as it was the last times. A batch that is chosen without the
        verdict costs one step more whenever that verdict misses the tree. So the verdict is
        worth waiting for, beyond the end of that work, for the share of the work that is the
        rate of misses; where it comes later still, the batch is sent shortly before the end.
        """
        taken = self.receiver.link(self.step)
        now = self.timeline.clock()
        if not 0 <= now - taken < OTHER_CLOCK_NS:
            taken = now
        if self._fed[0] and self._taken:
            self._stage_ns.add(taken - self._taken)
        self._taken = taken
        if not self._fed[1]:
            return taken
        self._takes[self.step] = taken
        stage_ns, verdict_ns = self._stage_ns.value, self._verdict_ns.value
        if stage_ns is None or verdict_ns is None:
            return None
        patience = stage_ns * (sequence.misses_per_step if sequence else 0.0)
        if verdict_ns <= stage_ns + patience:
            return taken + round(stage_ns + patience)
        return taken + round(stage_ns * (1 - EARLY))

    def has_work(self) -> bool:
        """Whether a batch of this step would carry anything."""
        sequence = self.sequence
        if self._released or sequence is None or sequence.prompt_left:
            return bool(self._released or sequence)
        if not sequence.tree.fed[ROOT]:
            return True
        return len(sequence.useful(self.policy.feed(sequence.tree, self.state(sequence)))) > 0

    def follow(self, verdicts: list[Verdict]) -> None:
        """Apply the verdict of the step after those followed so far."""
        with self.timeline("prune"):
            for verdict in verdicts:
                self.move(verdict)
        self._done.append(prune(0, self.receiver.heard - 1))

    def move(self, verdict: Verdict) -> None:
        """Move the root along a verdict's tokens, up to the one that ends the request."""
        sequence = self.sequence
        if sequence is None or verdict.request != sequence.request.id:
            return  # the request ended while this was on its way
        assert verdict.base == len(sequence.context.tokens), "a verdict is missing"
        now = self.timeline.clock()
        reason = None
        count = 0
        for token in verdict.tokens:
            count += 1
            reason = sequence.accept(token, now)
            if reason:
                break
        self._decided += count
        logprobs = verdict.logprobs[:count]
        self._unsettled.append(replace(verdict, tokens=verdict.tokens[:count], logprobs=logprobs))
        if reason:
            self.log_accepted()
            self.finish(reason)

    def log_accepted(self) -> None:
        """Log what was accepted and tell the source; the next batch is on its way already."""
        for verdict in self._unsettled:
            self.controller.accept(verdict.request, verdict.base, verdict.tokens, verdict.logprobs)
            self.source.accept(verdict)
        self._unsettled.clear()

    def finish(self, reason: str) -> None:
        """Close the request; the next batch tells the stages to free what it holds."""
        sequence = self.sequence
        assert sequence is not None
        totals, events = self.timeline.take()
        report = {"rank": 0, "control_ns": totals["control"], "events": events}
        self.controller.report(sequence.request.id, report | sequence.statistics())
        self.controller.finish(sequence.request.id, reason)
        self.source.end(sequence.request.id)
        self._released = (sequence.request.id,)
        self.sequence = None

    def choose(self, sequence: Sequence) -> np.ndarray:
        """The nodes to feed now.

        What a method must have before it can feed anything is drafted first: the pipeline idles
        anyway.
        """
        while True:
            nodes = sequence.useful(self.policy.feed(sequence.tree, self.state(sequence)))
            if len(nodes) or sequence.tree.fed[ROOT]:
                return nodes
            expansion = self.policy.grow(sequence.tree, self.state(sequence))
            missing = sequence.useful(expansion.nodes)
            if not len(missing) or not expansion.urgent:
                return nodes
            self.log_accepted()
            self.expand(sequence, missing, expansion.limit)

    def feed(self) -> Batch:
        """The prompt's next chunk, or the nodes that the policy chooses."""
        released, self._released = self._released, ()
        sequence = self.sequence
        if sequence is None:
            return Batch(self.step, released=released)
        if sequence.prompt_left:
            end = min(sequence.prefilled + self.chunk, sequence.known)
            rows = sequence.context.rows(sequence.prefilled, end)
            sequence.prefilled = end
        else:
            nodes = self.choose(sequence)
            assert len(nodes) <= self.policy.max_rows, "the KV pools are made for no more"
            rows = sequence.tree.rows(sequence.request.id, nodes)
            sequence.tree.fed[nodes] = True
        sequence.counts["rows"] += len(rows)
        return Batch(self.step, rows, released=released)

    def send(self, batch: Batch) -> None:
        if len(batch) or batch.released:
            self._busy_until = self.step + self.layout.num_steps
        with self.timeline("send"):
            self.link.send(batch)
        self._done.append(transfer(0, self.step))
        self.meter.fed(len(batch))
        self._fed = (self._fed[1], len(batch))
        self.step += 1

    def measure(self) -> None:
        """Keep what a step of decoding cost and brought, for the policy."""
        if self._guesses is not None and self.sequence is not None:
            guesses = self._guesses or self.meter.rounds > 0
            self.meter.step(self._since(self._began), self._decided, guesses=guesses)

    def stop(self) -> None:
        """Send the last batch, and lay out the steps in which it passes the stages."""
        self.submit(self.step + self.layout.num_steps)
        self.send(Batch(self.step, stop=True))
