"""The loop of a stage: receive, compute, verify, prune, send."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipespec.controller.client import Controller
from pipespec.controller.graph import Layout, Task, compute, prune, transfer
from pipespec.controller.verdict import VerdictReceiver, pack
from pipespec.core import SEQUENCE, Batch, Opening, Verdict
from pipespec.emulation import Pace, wait_until
from pipespec.engine.runner import SliceRunner
from pipespec.errors import RankFailed, StaleEpoch, Unreachable
from pipespec.row_times import RowTimes
from pipespec.sampling.grammar import Compile
from pipespec.sampling.verifier import Verifier
from pipespec.stats import PERIOD
from pipespec.trace import Timeline
from pipespec.transport.protocol import Transport

log = logging.getLogger(__name__)

# What a stage counts of its steps.
COUNTS = ("steps", "rows", "dropped", "overruns")


# How often this stage tells what it does.
TELL_NS = 10**9


@dataclass(frozen=True)
class StageSettings:
    """How the loop of a stage runs.

    Attributes:
        layout: the stages, their groups, and whether ranks wait for verdicts.
        pace: what this rank's steps are held to.
        delay_ms: what a verdict takes to this rank, beyond what it takes here.
        attention: the backend, for whoever asks.
        compile_grammar: begins to compile a grammar, at the last stage.
    """

    layout: Layout
    pace: Pace
    delay_ms: float
    attention: str = ""
    compile_grammar: Compile | None = None


class StageLoop:
    """One stage of the pipeline, at one rank.

    In lockstep every rank does the same in step t: compute the batch that its neighbour sent
    in step t-1, hear the verdict of step t, drop what it ruled out, send on. Inside a group
    (PipeDec's G_i) the batch goes on within the step, so it is sent before the verdict is heard.
    Running free, a rank applies the verdicts that have come, before and after it computes, and
    waits for none.
    """

    def __init__(
        self,
        runner: SliceRunner,
        link: Transport,
        controller: Controller,
        settings: StageSettings,
        timeline: Timeline,
        times: RowTimes | None = None,
    ):
        """`times`: what is known of how long this stage's batches take."""
        layout = settings.layout
        self.runner = runner
        self.link = link
        self.controller = controller
        self.rank = link.rank
        self.settings = settings
        self.layout = layout
        self.last = link.rank == layout.last
        self.free = layout.sync == "free"
        # A neighbour in the same group computes the same batch in the same step.
        self.joins_previous = layout.same_group(link.rank - 1)
        self.joins_next = not self.last and layout.same_group(link.rank)
        self.timeline = timeline
        self.receiver = VerdictReceiver(controller, self.rank, timeline, settings.delay_ms)
        self.step = 0
        self._done: list[Task] = []
        self._times = times or RowTimes()
        self._told = timeline.clock()  # when this stage told what it does last
        self._worked = Counter[str]()  # what it had told when it was without a sequence last
        self._verdicts: list[Verdict] = []  # of this step, at the last stage
        self._verifiers: dict[int, Verifier] = {}  # of the open sequences, at the last stage
        self._counts = Counter[str]()  # since no sequence was open
        self._since = 0  # when that ended
        # Of each open sequence: what had been counted, of work and of time, when it was opened.
        self._opened: dict[int, tuple[Opening, Counter[str]]] = {}

    def run(self) -> None:
        """Hold the rank for an epoch: until a batch says stop, or until what ends it is raised.

        Either way every KV slot has as many owners then as are counted.
        """
        try:
            self.work()
        except (RankFailed, StaleEpoch, Unreachable):
            self.runner.check_integrity()
            raise
        self.runner.check_integrity()

    def work(self) -> None:
        """Work until a batch says stop."""
        while True:
            batch = self.receive()
            if self.free:
                self.catch_up()
            self.share(batch)
            ended = self.release(batch)
            self.open(batch)
            computed = self.compute(batch)
            if self.joins_next:
                self.send(computed)
            self.hear()
            if not (self.last or self.joins_next):
                self.send(self.prune(computed))
            for request, report in ended.items():
                self.controller.report(request, report)
            self.tell(idle=bool(ended) and not self._opened)
            if batch.stop:
                while not self.last and self.receiver.heard <= self.step:
                    self.follow(self.receiver.verdict())
                self.controller.complete(self._done)
                return
            self.step += 1

    def receive(self) -> Batch:
        """What the neighbour sent in this step or the one before; none was before step 0."""
        self.timeline.step = self.step
        # Rank 1 has the head before it, which may be idle: waiting there is not waiting for work.
        with self.timeline("receive"):
            sent = self.step if self.joins_previous else self.step - 1
            batch = self.link.recv() if sent >= 0 else Batch(step=-1)
        assert batch.step == sent, "the links are in step"
        return batch

    def compute(self, batch: Batch) -> Batch:
        """Run the batch through the slice; at the last stage, draw the verdict too.

        Under a pace both belong to the stage's time, as they do on the machine that is emulated.
        """
        # Only a verdict that has not come yet frees the slots that the batch needs.
        self.follow_until(batch, lambda: self.runner.has_room(batch))
        start = self.timeline.clock()
        self._counts["steps"] += bool(self._opened)
        with self.timeline("compute"):
            computed = self.runner.compute(batch)
        if self.last:
            start += self.hear_guesses(computed)  # which is not this stage's work
            with self.timeline("verify"):
                verifier_of = self._verifiers.__getitem__
                if any(verifier.unscored for verifier in self._verifiers.values()):
                    for sequence, told in self.runner.scores(computed, verifier_of):
                        self.controller.score(self._opened[sequence][0].request, told)
                self._verdicts = self.runner.verdicts(computed, verifier_of)
                self.tell_failures()
        with self.timeline("pace"):
            paced = wait_until(
                start, self.settings.pace.of_stage(self.rank, self.step, len(computed))
            )
        self._counts["overruns"] += not paced
        if len(computed):
            took_ms = (self.timeline.clock() - start) / 1e6
            self._times.add(len(computed), took_ms, self.runner.slots_read)
        self._counts["rows"] += len(computed)
        self._counts["dropped"] += len(batch) - len(computed)
        computed.step = self.step
        return computed

    def tell_failures(self) -> None:
        """Log why requests end whose grammars could not be followed."""
        for verdict in self._verdicts:
            if verdict.failed:
                opening, _ = self._opened[verdict.sequence]
                why = self._verifiers[verdict.sequence].failure
                log.warning("request %d is not held to its grammar: %s", opening.request, why)

    def hear(self) -> None:
        """Say that this step is computed; follow the verdicts that must be, or can be, known."""
        done, self._done = [*self._done, compute(self.rank, self.step)], []
        with self.timeline("control"):
            self.controller.complete(done, pack(self._verdicts, self.timeline.clock()))
        if self.last:
            self.receiver.heard += 1
            self.follow(self._verdicts)
        elif not self.free:
            self.follow(self.receiver.verdict())
        else:
            if self.layout.asks_for_link(self.rank, self.step):
                self.receiver.link(self.step)
            self.catch_up()

    def catch_up(self) -> None:
        """Follow every verdict that has come."""
        while not self.last and (verdicts := self.receiver.verdict(timeout=0.0)) is not None:
            self.follow(verdicts)

    def follow_until(self, batch: Batch, ready: Callable[[], bool]) -> None:
        """Follow verdicts until this stage is `ready` for a batch. Running free, one that the head
        knew when it sent the batch may not have come yet; in lockstep all have."""
        while self.free and not self.last and not ready():
            assert self.receiver.heard <= batch.step, "the head asks for no more than it knows"
            self.follow(self.receiver.verdict())

    def follow(self, verdicts: list[Verdict] | None) -> None:
        """Apply the verdict of the step after those followed so far."""
        assert verdicts is not None
        with self.timeline("prune"):
            self.runner.apply(verdicts)
        self._done.append(prune(self.rank, self.receiver.heard - 1))

    def hear_guesses(self, batch: Batch) -> int:
        """Take in what the head has fed meanwhile of the lossy sequences in a batch: in lockstep,
        at least in the step after that whose batch is here, so that a node's children are known
        when it is decided. Returns how long that took, in nanoseconds."""
        begun = self.timeline.clock()
        here = self.step - self.layout.num_steps
        waits = not self.free and self.layout.num_steps > 1
        for sequence in dict.fromkeys(batch.rows[:, SEQUENCE].tolist()):
            verifier = self._verifiers[sequence]
            if verifier.sampling.lossy:
                with self.timeline("wait"):
                    for guesses in self.controller.told(sequence, here + 1 if waits else None):
                        verifier.guess(guesses, since=here)
        return self.timeline.clock() - begun

    def prune(self, computed: Batch) -> Batch:
        with self.timeline("prune"):
            alive = self.runner.prune(computed)
        self._counts["dropped"] += len(computed) - len(alive)
        return alive

    def send(self, batch: Batch) -> None:
        with self.timeline("send"):
            self.link.send(batch)
        self._done.append(transfer(self.rank, self.step))

    def share(self, batch: Batch) -> None:
        """Let the sequences that begin with a batch share text, before anything of it is freed."""
        for opening in batch.opened:
            self.has_text(batch, opening.parent, opening.shared)
            self.runner.open(opening.sequence, opening.parent, opening.shared)

    def has_text(self, batch: Batch, sequence: int, tokens: int) -> None:
        """Know so many tokens of a sequence to be decided, as the head knew with this batch."""
        self.follow_until(batch, lambda: self.runner.length(sequence) >= tokens)

    def open(self, batch: Batch) -> None:
        """Know the sequences that begin with a batch, before its rows are computed."""
        for opening in batch.opened:
            if not self._opened:
                self.timeline.take()
                self._counts.clear()
                self._since = self.timeline.clock()
            self._opened[opening.sequence] = opening, self.counted()
            if self.last:
                verifier = Verifier(opening, self.settings.compile_grammar)
                self._verifiers[opening.sequence] = verifier

    def release(self, batch: Batch) -> dict[int, dict[str, Any]]:
        """Free what sequences held that are open no more, but for the text that stays; what is to
        be reported on those that have ended, by request.

        `period` is what this stage did since it was last without a sequence, so that what it did
        for several at once can be counted once.
        """
        ended = {}
        leaving = (*batch.released, *batch.preempted)
        worked = self.worked() if leaving else self._worked
        kept = dict.fromkeys(leaving, 0) | dict(batch.kept)
        for sequence, tokens in kept.items():
            self.has_text(batch, sequence, tokens)
            self.runner.release(sequence, tokens)
        for sequence in leaving:
            if self._verifiers.pop(sequence, None) is not None:
                self.controller.drop_guesses(sequence)
            opening, before = self._opened.pop(sequence)
            if sequence in batch.released:
                now = self.counted()
                since = {name: now[name] - before[name] for name in now}
                events = list(self.timeline.events)
                elapsed = {"since_ns": self._since, "elapsed_ns": now["elapsed_ns"] - self._since}
                period = {name: now[name] for name in PERIOD} | elapsed
                told = {"rank": self.rank, **since, "period": period}
                told["attention"] = self.settings.attention
                ended[opening.request] = told | {"events": events}
        if not self._opened:
            self._worked = worked
        return ended

    def tell(self, *, idle: bool) -> None:
        """Tell now and then how long batches take here and what this stage does; also when it has
        just become `idle`, as it may then have no step for long."""
        now = self.timeline.clock()
        if idle or now - self._told > TELL_NS:
            self._told = now
            with self.timeline("control"):
                self.controller.publish_work(self._times.measured(), self.worked())

    def worked(self) -> Counter[str]:
        """Nanoseconds of this epoch in which any sequence was open here: of those, in which this
        stage computed, waited for the batch of the rank before, and handed its own on."""
        worked = Counter(self._worked)
        if self._opened:
            totals = self.timeline.totals
            worked["active_ns"] += self.timeline.clock() - self._since
            worked["busy_ns"] += self._busy_ns
            worked["receive_ns"] += totals["receive"]
            worked["send_ns"] += totals["send"]
        return worked

    @property
    def _busy_ns(self) -> int:
        """Of computing, since no sequence was open."""
        totals = self.timeline.totals
        return totals["compute"] + totals["verify"] + totals["pace"]

    def counted(self) -> Counter[str]:
        """This rank's part of a request's statistics, as totals so far."""
        totals = self.timeline.totals
        return Counter(
            elapsed_ns=self.timeline.clock(),
            busy_ns=self._busy_ns,
            control_ns=totals["control"],
            **{name: self._counts[name] for name in COUNTS},
        )
