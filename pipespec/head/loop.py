"""The loop of rank 0: admit, grow, hear, send.

In step t the head lets the source grow the tree while the stages compute, hears the verdict of
step t, and sends what the scheduler chooses to the first stage. What is decided here is when;
what is sent is decided in `pipespec.head.scheduler`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

from pipespec.controller.client import Controller
from pipespec.controller.graph import Layout, Task, compute, prune, step_graph, transfer
from pipespec.controller.guesses import NO_MORE
from pipespec.controller.records import CANCELLED, Accepted
from pipespec.controller.verdict import VerdictReceiver
from pipespec.core import GRAMMAR, Batch, Request, Verdict
from pipespec.emulation import Pace, wait_until
from pipespec.head.guide import Guide
from pipespec.head.scheduler import Scheduler
from pipespec.head.scoring import ScoreWork
from pipespec.head.sequence import NOT_OPEN, Sequence, StopCheck
from pipespec.head.source.beside import Beside
from pipespec.head.source.protocol import TokenSource
from pipespec.head.timing import SendTiming
from pipespec.head.watching import Watching
from pipespec.head.work import DraftWork
from pipespec.row_times import together
from pipespec.sampling.grammar import Compile, GrammarFailed, Matcher
from pipespec.trace import Timeline
from pipespec.transport.protocol import Transport

log = logging.getLogger(__name__)

# How often the head says what it is doing.
PUBLISH_NS = 10**9


@dataclass(frozen=True)
class HeadSettings:
    """How the loop of the head runs.

    Attributes:
        layout: the stages, their groups, and whether ranks wait for verdicts.
        stop_check: what watches the text of a request for its stop strings.
        pace: what draft rounds are held to.
        delay_ms: what a verdict takes to the head, beyond what it takes here.
        compile_grammar: begins to compile the grammar of a request.
    """

    layout: Layout
    stop_check: Callable[[Request], StopCheck]
    pace: Pace
    delay_ms: float
    compile_grammar: Compile | None = None


class HeadLoop:
    """Rank 0: a scheduler, a source of guesses, the first stage's link and the controller; in a
    cascade also a `mid`-size model beside it."""

    def __init__(
        self,
        scheduler: Scheduler,
        source: TokenSource,
        link: Transport,
        controller: Controller,
        settings: HeadSettings,
        timeline: Timeline,
        mid: Beside | None = None,
    ):
        self.scheduler = scheduler
        self.source = source
        self.link = link
        self.controller = controller
        self.settings = settings
        self.layout = settings.layout
        self.timeline = timeline
        self.receiver = VerdictReceiver(controller, 0, timeline, settings.delay_ms)
        self.timing = SendTiming()
        self.watching = Watching()
        self.mid = mid
        # Who hears of sequences.
        self._told: list[TokenSource | Beside] = [source] if mid is None else [source, mid]
        self._scoring: ScoreWork | None = None  # what the mid-size model is at
        self._began = 0  # when this step began, on the timeline's clock
        self._done: list[Task] = []
        self._submitted = 0  # steps
        # Applied, but neither logged nor told to the source; with the request of each.
        self._unlogged: list[tuple[int, Verdict]] = []
        self._published: int | None = None  # when what is shown was said last
        self._control_ns: dict[int, int] = {}  # what the controller had taken when each was opened
        # Requests whose grammars are being compiled, what was answered before, and who does it.
        self._compiling: list[tuple[Request, tuple[int, ...], Future[Matcher]]] = []

    def run(self) -> None:
        """Serve requests until there will be no more, then stop the stages."""
        while self.admit():
            self.begin()
            self.grow()
            self.hear()
            self.drop_cancelled()
            self.make_room()
            self.send()
            self.log_accepted()
            self.show()
            self.scheduler.end(self._elapsed_ms())
            self.publish()
        self.stop()

    def admit(self) -> bool:
        """Take the next requests, as many as can be open; False: none is, and no more will come.

        While batches are on their way the pipeline must keep stepping, so only an empty one
        is left to wait.
        """
        while (room := self.scheduler.room - len(self._compiling)) > 0:
            busy = not self.idle or bool(self._compiling)
            if not busy:
                self.publish(now=True)  # it may be the last for long
            found = self.controller.next_requests(room, wait=not busy)
            if not found:
                if not busy:
                    return False
                break
            for request, answer in found:
                if request.sampling.grammar:
                    assert self.settings.compile_grammar is not None
                    compiling = self.settings.compile_grammar(request.sampling.grammar)
                    self._compiling.append((request, answer, compiling))
                else:
                    self.open(request, answer)
        self.open_compiled()
        for sequence in self.scheduler.admit():
            if sequence.opened_ns is None:
                sequence.opened_ns = self.timeline.clock()
            for each in self._told:
                each.begin(sequence.context)
        return True

    @property
    def idle(self) -> bool:
        """Whether no request is open, and no batch on its way."""
        return self.scheduler.idle and not self.scheduler.draining

    def open_compiled(self) -> None:
        """Begin with the requests whose grammars are compiled; without anything else to do, wait
        for one."""
        if self._compiling and self.idle:
            wait([compiling for _, _, compiling in self._compiling], return_when=FIRST_COMPLETED)
        done = [each for each in self._compiling if each[2].done()]
        self._compiling = [each for each in self._compiling if each not in done]
        for request, answer, compiling in done:
            try:
                guide = Guide(compiling.result(), request.eos, answer)
            except GrammarFailed as error:
                log.warning("request %d is not held to its grammar: %s", request.id, error)
                self.open(request, answer)
                self.end(request.id, GRAMMAR)
            else:
                self.open(request, answer, guide)

    def open(self, request: Request, answer: tuple[int, ...], guide: Guide | None = None) -> None:
        """Begin with a request, or go on with what an earlier epoch has left of it."""
        stops = self.settings.stop_check(request)
        if self.scheduler.idle:
            self.timeline.take()
        self._control_ns[request.id] = self.timeline.totals["control"]
        sequence = self.scheduler.add(request, stops, self.timeline.clock(), answer, guide)
        if sequence.ended:
            self.finish(sequence, sequence.ended)

    def publish(self, *, now: bool = False) -> None:
        """Show how many requests are open and what is fed, every second or `now`; and hear what
        the stages have measured, and whether anybody watches."""
        at = self.timeline.clock()
        if now or self._published is None or at - self._published > PUBLISH_NS:
            self._published = at
            with self.timeline("control"):
                self.controller.publish(self.scheduler.statistics(), self.scheduler.counts())
                self.scheduler.learn(together(self.controller.row_times()))
                requests = [each.request.id for each in self.scheduler.sequences.values()]
                self.watching.look(self.controller.watched(requests), self.scheduler.totals)

    def show(self) -> None:
        """Show the batch that was just sent, and the trees behind it, to whoever watches."""
        if self.watching.on:
            scheduler = self.scheduler
            with self.timeline("control"):
                sent, totals = scheduler.step - 1, scheduler.totals
                self.controller.show(self.watching.shown(sent, totals, scheduler.sequences))

    def begin(self) -> None:
        """A step begins."""
        step = self.timeline.step = self.scheduler.step
        self._began = self.timeline.clock()
        self.scheduler.begin()
        # Running free, a stage may be ahead of the head, by its place in the pipeline at most.
        ahead = self.layout.num_steps if self.layout.sync == "free" else 0
        self.submit(step + ahead)

    def submit(self, last: int) -> None:
        """Lay out the tasks of the steps up to `last`."""
        with self.timeline("control"):
            while self._submitted <= last:
                self.controller.submit(step_graph(self.layout, self._submitted))
                self._submitted += 1

    def grow(self) -> None:
        """Let the source expand the tree while the stages compute."""
        self.score()
        while work := self.scheduler.expansion(self._elapsed_ms()):
            self.draft(work)
            self.score()

    def score(self) -> None:
        """Take what the mid-size model has said, and ask it anew."""
        self.take_scores()
        if self.mid is not None and self._scoring is None:
            self._scoring = self.scheduler.scoring()
            if self._scoring is not None:
                self.mid.ask(self._scoring.asked, self._scoring.children)

    def take_scores(self) -> None:
        """Hang what the mid-size model has said into the trees, if it is done."""
        answered = None if self.mid is None else self.mid.answer()
        if answered is not None:
            assert self._scoring is not None
            for part in self._scoring.parts:
                part.sequence.counts["overruns"] += not answered.paced
            self.scheduler.rescore(self._scoring, answered.candidates)
            self._scoring = None

    def draft(self, work: DraftWork) -> None:
        """One draft round."""
        start = self.timeline.clock()
        with self.timeline("draft"):
            candidates = self.source.expand(work.asked, work.children)
            paced = wait_until(start, self.settings.pace.of_round)
        for part in work.parts:
            part.sequence.counts["overruns"] += not paced
        self.scheduler.graft(work, candidates, self._ms_since(start))

    def hear(self) -> None:
        """Wait until this step's batch is due, and follow the verdicts that come until then.

        In lockstep it is due when the verdict of the step has come. Running free, it is due
        when the first stage is about to need it, or with that verdict, whichever is earlier;
        without anything to feed there is nothing to hurry for.
        """
        step = self.scheduler.step
        drafted_ms, start = self._elapsed_ms(), self.timeline.clock()
        done, self._done = [*self._done, compute(0, step)], []
        with self.timeline("control"):
            self.controller.complete(done)
        due = self.due(step) if self.layout.asks_for_link(0, step) else None
        while self.receiver.heard <= step:
            left = None
            if due is not None and self.scheduler.has_work(self._elapsed_ms()):
                left = max((due - self.timeline.clock()) / 1e9, 0.0)
            verdicts = self.receiver.verdict(left)
            if verdicts is None:
                break
            self.timing.heard(self.receiver.heard - 1, self.timeline.clock())
            self.follow(verdicts)
        self.scheduler.heard(drafted_ms, self._ms_since(start))

    def due(self, step: int) -> int | None:
        """When the batch of this step should be sent without its verdict; None: with it."""
        taken = self.receiver.link(step)
        return self.timing.due(step, taken, self.timeline.clock(), self.scheduler.misses_per_step)

    def follow(self, verdicts: list[Verdict]) -> None:
        """Apply the verdict of the step after those followed so far."""
        with self.timeline("prune"):
            for verdict in verdicts:
                progress = self.scheduler.apply(verdict, self.timeline.clock())
                if progress is None:
                    continue
                self._unlogged.append((progress.sequence.request.id, progress.accepted))
                if progress.reason:
                    self.finish(progress.sequence, progress.reason)
        self._done.append(prune(0, self.receiver.heard - 1))

    def drop_cancelled(self) -> None:
        """End the requests for which nobody waits any more."""
        for sequence in self.scheduler.requests:
            if self.controller.cancelled(sequence.request.id):
                self.end(sequence.request.id, CANCELLED)

    def end(self, request: int, reason: str) -> None:
        """End a request that has not ended by itself."""
        sequence = self.scheduler.cancel(request)
        if sequence is not None:
            self.finish(sequence, reason)

    def make_room(self) -> None:
        """Put requests back for which the stages have no slots."""
        if put_back := self.scheduler.make_room():
            self.log_accepted()
            for sequence in put_back:
                self.forget(sequence)

    def finish(self, sequence: Sequence, reason: str) -> None:
        """Log that a request is over, after all that was accepted."""
        self.log_accepted()
        request = sequence.request
        control = self.timeline.totals["control"] - self._control_ns.pop(request.id)
        # Events are of the whole pipeline: a trace is of one request alone.
        events = list(self.timeline.events)
        alone = sequence.number == NOT_OPEN or not sequence.told
        report = {"rank": 0, "alone": alone, "control_ns": control, "events": events}
        self.controller.report(request.id, report | sequence.statistics())
        self.controller.finish(request.id, reason, sequence.prefill_ns, sequence.cached)
        self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """A sequence has left the pipeline, if it was there."""
        if sequence.number == NOT_OPEN:
            return
        if sequence.request.sampling.lossy:
            self.controller.tell(sequence.number, NO_MORE)
        for each in self._told:
            each.end(sequence.number)
        sequence.leave()

    def log_accepted(self) -> None:
        """Log what was accepted and tell the source; the next batch is on its way already."""
        if self._unlogged:
            self.controller.accept(
                (request, Accepted(verdict.base, verdict.tokens, verdict.logprobs))
                for request, verdict in self._unlogged
            )
        for _, verdict in self._unlogged:
            for each in self._told:
                each.accept(verdict)
        self._unlogged.clear()

    def send(self) -> None:
        """Send the batch of this step to the first stage.

        What a method must have before it can feed anything is drafted first: the pipeline idles
        anyway.
        """
        self.take_scores()
        while isinstance(todo := self.scheduler.next_batch(self._elapsed_ms()), DraftWork):
            self.log_accepted()  # the source may need it
            self.draft(todo)
        self.pass_on(todo)

    def pass_on(self, batch: Batch) -> None:
        self.tell_guesses(batch)
        with self.timeline("send"):
            self.link.send(batch)
        self._done.append(transfer(0, batch.step))
        self.timing.sent(len(batch))

    def tell_guesses(self, batch: Batch) -> None:
        """Lossy rules prefer what was guessed, so the last stage must know it ahead."""
        for number, sequence in self.scheduler.sequences.items():
            if sequence.request.sampling.lossy:
                with self.timeline("control"):
                    self.controller.tell(number, sequence.guesses(batch))

    def stop(self) -> None:
        """Send the last batch, and lay out the steps in which it passes the stages."""
        self.submit(self.scheduler.step + self.layout.num_steps)
        self.pass_on(Batch(self.scheduler.step, stop=True))

    def _elapsed_ms(self) -> float:
        """How long this step has lasted."""
        return self._ms_since(self._began)

    def _ms_since(self, start: int) -> float:
        """Milliseconds since a moment of the timeline's clock."""
        return (self.timeline.clock() - start) / 1e6
