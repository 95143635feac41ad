"""The loop of rank 0: take requests, expand the trees, receive verdicts, send.

`HeadLoop` decides when things happen and does them (`pipespec.head.step` has their order);
`pipespec.head.scheduler` decides what is sent. Above 350 lines, as it is the only part of the head
that acts.
"""

from __future__ import annotations

import collections.abc
import logging
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from math import inf
from typing import Any

from pipespec.controller.log_records import CANCELLED, Accepted
from pipespec.controller.rank_controller import Controller
from pipespec.controller.task_graph import Task, compute, prune, step_graph, transfer
from pipespec.controller.verdict_exchange import VerdictReceiver
from pipespec.core import COMMITTED, GRAMMAR, KIND, Batch, Request, Verdict
from pipespec.head.in_flight import InFlight
from pipespec.head.proposer import Proposal, Proposer
from pipespec.head.scheduler import Scheduler
from pipespec.head.scheduler_types import ProposalBatch
from pipespec.head.sequence import NOT_IN_PIPELINE, Sequence, StopCheck
from pipespec.head.step import run_step
from pipespec.head.structured_output import GrammarGuide
from pipespec.head.tree import ROOT
from pipespec.head.tree_telemetry import TreeTelemetry
from pipespec.sampling.grammar import Compile, GrammarFailed, Matcher
from pipespec.system.fair_thread import FairThread
from pipespec.system.liveness import LOADING_S, progress
from pipespec.timing.batch_times import RowTimes, merge_times, pack
from pipespec.timing.clock import REAL_TIME, StepClock
from pipespec.timing.trace import Timeline
from pipespec.transport.transport import Transport

log = logging.getLogger(__name__)

# Between two reports of the head's gauges and counters.
PUBLISH_NS = 10**9
# Learnt steps after which they are kept again, once no request is left.
KEPT_EVERY = 32


@dataclass(frozen=True)
class HeadSettings:
    """Settings of the loop of the head.

    Attributes:
        num_stages: those of the pipeline.
        stop_check: makes the check of a request's text for its stop strings.
        delay_ms: milliseconds that a verdict takes to the head at least.
        long_links: whether links may hold batches, as ranks are on several hosts.
        clock: the least time of a draft round.
        compile_grammar: begins to compile the grammar of a request; None: no request has one.
        masks: follows the texts in their grammars.
        keep_learnt: keeps what was learnt of steps for the next run.
        receive_features: takes what the last stage returns for a draft head with each verdict, and
            returns whether that was the last; None: it returns nothing.
    """

    num_stages: int
    stop_check: Callable[[Request], StopCheck]
    delay_ms: float = 0.0
    clock: StepClock = REAL_TIME
    compile_grammar: Compile | None = None
    masks: FairThread = field(default_factory=FairThread)
    keep_learnt: Callable[[dict[str, Any]], None] = lambda learnt: None
    receive_features: Callable[[], bool] | None = None
    long_links: bool = True


class HeadLoop:
    """Rank 0, the `Pipeline` of `run_step`: connects a scheduler with a proposer, the link to the
    first stage and the controller."""

    def __init__(
        self,
        scheduler: Scheduler,
        proposer: Proposer,
        link: Transport,
        controller: Controller,
        settings: HeadSettings,
        timeline: Timeline,
    ):
        self.scheduler = scheduler
        self.admission = scheduler.admission
        self.proposer = proposer
        self.link = link
        self.controller = controller
        self.settings = settings
        self.timeline = timeline
        self.receiver = VerdictReceiver(controller, 0, timeline, settings.delay_ms)
        most = None if settings.long_links else settings.num_stages
        if scheduler.config.one_batch:
            most = 1
        self.in_flight = InFlight(settings.num_stages, most)
        self.telemetry = TreeTelemetry()
        self._step_started_ns = 0  # when this step began, on the timeline's clock
        self._done: list[Task] = []
        self._rounds = RowTimes()  # of the draft, by the nodes that they expanded
        # Verdicts that were applied, but neither logged nor passed to the proposer, by request.
        self._unlogged: list[tuple[int, Verdict]] = []
        self._kept_steps = 0  # of those learnt, how many are kept
        self._published: int | None = None  # when gauges and counters were published last
        # Time for the controller and for features, when each request began.
        self._waited_ns: dict[int, tuple[int, int]] = {}
        # Requests whose grammars are being compiled, and their answers so far.
        self._compiling: list[tuple[Request, tuple[int, ...], Future[Matcher]]] = []

    def run_until_done(self) -> None:
        """Decode requests until no more will come, then stop the stages."""
        while self.take_requests():
            run_step(self.scheduler, self)
            self.publish()
        self.stop()

    def take_requests(self) -> bool:
        """Take as many requests as the scheduler has room for, and one of each tenant at least;
        False: the pipeline is empty, and no more requests will come.

        Waits for a request only while the pipeline is empty: batches on their way need further
        steps.
        """
        idle = True
        while idle:
            idle = self.idle and not self._compiling
            if idle:
                self.in_flight.pause()
                self.publish(now=True)  # the next step may be far off
                self.keep_learnt()
            room = max(self.admission.room - len(self._compiling), 0)
            waiting = self.admission.last_waiting(request for request, _, _ in self._compiling)
            found = self.controller.next_requests(room, waiting, wait=idle)
            if not found and idle:
                return False
            for request, answer in found or ():
                if request.sampling.grammar:
                    assert self.settings.compile_grammar is not None
                    compiling = self.settings.compile_grammar(request.sampling.grammar)
                    self._compiling.append((request, answer, compiling))
                else:
                    self.start_request(request, answer)
        self.start_compiled()
        return True

    def start_request(
        self, request: Request, answer: tuple[int, ...], guide: GrammarGuide | None = None
    ) -> None:
        """Add a request to the scheduler, with the answer that an earlier epoch decided."""
        stops = self.settings.stop_check(request)
        if self.admission.idle:
            self.timeline.take()
        self._waited_ns[request.id] = self._waited
        sequence = self.admission.add(request, stops, self.timeline.clock(), answer, guide)
        if sequence.ended:
            self.finish(sequence, sequence.ended)

    @property
    def _waited(self) -> tuple[int, int]:
        return self.timeline.totals["control"], self.timeline.totals["features"]

    def start_compiled(self) -> None:
        """Start the requests whose grammars are compiled; if there is nothing else to do, wait for
        one."""
        if self._compiling and self.idle:
            with progress.part(LOADING_S):
                wait([each for _, _, each in self._compiling], return_when=FIRST_COMPLETED)
        done = [each for each in self._compiling if each[2].done()]
        self._compiling = [each for each in self._compiling if each not in done]
        for request, answer, compiling in done:
            try:
                grammar, masks = request.sampling.grammar, self.settings.masks
                guide = GrammarGuide(compiling.result(), request.eos, answer, masks, grammar)
            except GrammarFailed as error:
                log.warning("request %d cannot follow its grammar: %s", request.id, error)
                self.start_request(request, answer)
                self.end_request(request.id, GRAMMAR)
            else:
                self.start_request(request, answer, guide)

    @property
    def idle(self) -> bool:
        """Whether there is no request, and nothing to send."""
        # Verdicts that are still to come decide nothing.
        return self.admission.idle and not self.admission.has_unsent_departures

    def start_sequence(self, sequence: Sequence) -> None:
        """See `Pipeline`, as for the other methods that `run_step` calls."""
        if sequence.admitted_ns is None:
            sequence.admitted_ns = self.timeline.clock()
        self.proposer.start_sequence(sequence.context)

    def begin_step(self) -> None:
        self.timeline.step = self.scheduler.step
        self._step_started_ns = self.timeline.clock()
        self.settings.masks.grant_share(self.scheduler.stats.without_prompts.value)
        stats = self.scheduler.stats
        if (most := stats.in_flight) is not None and most > 1:
            stats.due_ms = self.in_flight.interval_ms(most)
        else:
            stats.due_ms = inf
        self.submit_step()

    def submit_step(self) -> None:
        """Submit the task graph of the step that begins."""
        with self.timeline("control"):
            self.controller.submit(step_graph(self.settings.num_stages, self.scheduler.step))

    def elapsed_ms(self) -> float:
        return self._ms_since(self._step_started_ns)

    def _ms_since(self, start: int) -> float:
        return (self.timeline.clock() - start) / 1e6

    def propose(
        self, work: ProposalBatch
    ) -> tuple[collections.abc.Sequence[Proposal | None], float]:
        self.log_accepted()  # before the proposer continues the accepted tokens
        start = self.timeline.clock()
        with self.timeline("draft"):
            proposals = self.proposer.propose(work.requests, work.children)
            nodes = sum(len(each.nodes) for each in work.requests)
            paced = self.settings.clock.wait_for_draft_round(start, nodes)
        for part in work.parts:
            part.sequence.counts["overruns"] += not paced
        took_ms = self._ms_since(start)
        if nodes and not work.unread:
            self._rounds.add(nodes, took_ms)
        return proposals, took_ms

    def receive_verdicts(self) -> None:
        """The batch is due once it has rows and fewer batches are in flight than should be."""
        done, self._done = [*self._done, compute(0, self.scheduler.step)], []
        with self.timeline("control"):
            self.controller.complete(done)
        # A pass may be long, and a request that arrives need not wait for it.
        asked = {"or_request": self.admission.room > 0}
        patience = self._patience()
        while (verdicts := self.receiver.verdict(patience, **asked)) is not None:
            self.apply_verdicts(verdicts)
            patience = self._patience()
            # A policy that delays no batch for a draft round has one for each verdict.
            if self.scheduler.stats.in_flight is None and patience == 0:
                return

    def _patience(self) -> float | None:
        """How long to wait for a verdict before the next batch is sent, in seconds; None: until it
        arrives."""
        wanted = self.scheduler.stats.in_flight
        running = self.admission.sequences.values()
        reading = any(each.prompt_left for each in running)
        if wanted is None or reading:
            wanted = max(wanted or 0, self.in_flight.depth(self.scheduler.stats.least_ms))
        if not len(self.in_flight):
            return 0.0
        if len(self.in_flight) >= wanted or not self.scheduler.has_work(self.elapsed_ms()):
            return None
        if reading or not all(each.tree.fed[ROOT] for each in running):
            return 0.0
        due_ms = self.scheduler.stats.due_ms
        return 0.0 if due_ms == inf else max(due_ms - self.elapsed_ms(), 0) / 1e3

    def apply_verdicts(self, verdicts: list[Verdict] | None) -> None:
        assert verdicts is not None
        batches = len(self.in_flight)
        took_ms = self.in_flight.add_verdict(self.receiver.num_received - 1, self.timeline.clock())
        if took_ms is not None:
            self.scheduler.stats.add_pass(took_ms, batches)
        with self.timeline("prune"):
            for verdict in verdicts:
                progress = self.scheduler.apply(verdict, self.timeline.clock())
                if progress is None:
                    continue
                self._unlogged.append((progress.sequence.request.id, progress.accepted))
                if progress.reason:
                    self.finish(progress.sequence, progress.reason)
        self._done.append(prune(0, self.receiver.num_received - 1))
        if self.settings.receive_features is not None:
            with self.timeline("features"):
                self.settings.receive_features()

    def drop_cancelled(self) -> None:
        for sequence in self.admission.requests:
            if self.controller.cancelled(sequence.request.id):
                self.end_request(sequence.request.id, CANCELLED)

    def end_request(self, request: int, reason: str) -> None:
        """End a request before its text is complete."""
        if sequence := self.admission.cancel(request):
            self.finish(sequence, reason)

    def finish(self, sequence: Sequence, reason: str) -> None:
        self.log_accepted()
        request = sequence.request
        since = zip(self._waited, self._waited_ns.pop(request.id), strict=True)
        control, features = (now - before for now, before in since)
        # The only report, if no stage knows the request.
        alone = sequence.number == NOT_IN_PIPELINE or not sequence.start_sent
        report: dict[str, Any] = {"rank": 0, "alone": alone, "control_ns": control}
        report["features_ns"] = features
        # Those of the whole pipeline: use a trace with one request at a time.
        report |= {"events": [*self.timeline.events], "times": pack(self._rounds.measured())}
        report["overlap"] = self.scheduler.stats.overlap
        self.controller.report(request.id, report | sequence.statistics())
        self.controller.finish(request.id, reason, sequence.prefill_ns, sequence.cached)
        self.end_sequence(sequence)

    def end_sequence(self, sequence: Sequence) -> None:
        """A sequence leaves the pipeline, unless it never entered."""
        self.log_accepted()
        if sequence.number == NOT_IN_PIPELINE:
            return
        self.proposer.end_sequence(sequence.number)
        sequence.leave_pipeline()

    def send(self, batch: Batch) -> None:
        self.send_draft_tokens(batch)
        batch.beside = len(self.in_flight) > 0
        with self.timeline("send"):
            self.link.send(batch)
        self._done.append(transfer(0, batch.step))
        measured = len(batch) > 0 and not (batch.rows[:, KIND] == COMMITTED).any()
        self.in_flight.add_batch(batch.step, self.timeline.clock(), measured=measured)

    def send_draft_tokens(self, batch: Batch) -> None:
        """Send the draft tokens of lossy requests ahead: the last stage prefers them."""
        for number, sequence in self.admission.sequences.items():
            if sequence.request.sampling.lossy:
                with self.timeline("control"):
                    self.controller.publish_draft_tokens(number, sequence.draft_tokens(batch))

    def after_send(self) -> None:
        self.log_accepted()
        self.publish_tree()

    def log_accepted(self) -> None:
        """Log the accepted tokens and pass them to the proposer."""
        if self._unlogged:
            self.controller.accept(
                (request, Accepted(verdict.base, verdict.tokens, verdict.logprobs))
                for request, verdict in self._unlogged
            )
        for _, verdict in self._unlogged:
            self.proposer.accept_verdict(verdict)
        self._unlogged.clear()

    def publish_tree(self) -> None:
        """Publish the batch that was just sent, and the trees, if a client watches them."""
        if self.telemetry.enabled:
            sent, totals = self.scheduler.step - 1, self.scheduler.totals
            with self.timeline("control"):
                self.controller.publish_step(
                    self.telemetry.snapshot(sent, totals, self.admission.sequences)
                )

    def publish(self, *, now: bool = False) -> None:
        """Publish gauges and counters, every second or `now`; and learn what the stages have
        measured, and which requests are watched."""
        at = self.timeline.clock()
        if now or self._published is None or at - self._published > PUBLISH_NS:
            self._published = at
            with self.timeline("control"):
                self.controller.publish_statistics(self.scheduler.gauges(), self.scheduler.counts())
                self.scheduler.update_stage_times(merge_times(self.controller.row_times()))
                if self.scheduler.learnt is not None:
                    depth = self.in_flight.depth(self.scheduler.stats.batch_ms)
                    self.scheduler.learnt.deepen(depth, self.in_flight.shortest_ms)
                requests = [each.request.id for each in self.admission.sequences.values()]
                self.telemetry.update_watchers(
                    self.controller.watched_requests(requests), self.scheduler.totals
                )

    def keep_learnt(self) -> None:
        """Keep what was learnt of steps, if that is much more than is kept."""
        learnt = self.scheduler.learnt
        if learnt is not None and learnt.steps >= self._kept_steps + KEPT_EVERY:
            self._kept_steps = learnt.steps
            self.settings.keep_learnt(learnt.stored())

    def stop(self) -> None:
        """Send the last batch."""
        self.submit_step()
        self.send(Batch(self.scheduler.step, stop=True))
        receive = self.settings.receive_features
        while receive is not None and not receive():
            pass
