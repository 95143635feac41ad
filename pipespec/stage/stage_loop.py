"""The loop of a stage: receive, compute, verify, prune, send."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipespec.controller.rank_controller import Controller
from pipespec.controller.task_graph import Task, compute, prune, transfer
from pipespec.controller.verdict_exchange import VerdictReceiver, pack_verdicts
from pipespec.core import DRAFT, KIND, SEQUENCE, Batch, SequenceStart, Verdict
from pipespec.engine.slice.runner import SliceRunner
from pipespec.errors import RankFailed, StaleEpoch, Unreachable
from pipespec.sampling.grammar import Compile
from pipespec.sampling.sampling_state import SamplingState
from pipespec.system.fair_thread import FairThread
from pipespec.timing.batch_times import Ema, RowTimes, pack
from pipespec.timing.clock import REAL_TIME, StepClock
from pipespec.timing.stats import PERIOD
from pipespec.timing.trace import Timeline
from pipespec.transport.transport import Transport

log = logging.getLogger(__name__)

# Names of a stage's counters.
COUNTS = ("steps", "rows", "dropped", "overruns")
# Between two reports of a stage's measurements.
PUBLISH_NS = 10**9


@dataclass(frozen=True)
class StageSettings:
    """Settings of the loop of a stage.

    Attributes:
        num_stages: those of the pipeline.
        delay_ms: milliseconds that a verdict takes to this rank at least.
        clock: the least time of a step.
        attention: the backend, for the statistics.
        compile_grammar: begins to compile a grammar, at the last stage.
        masks: follows the texts in their grammars there.
        share_cores: is told before a batch whether other stages compute meanwhile.
    """

    num_stages: int
    delay_ms: float = 0.0
    clock: StepClock = REAL_TIME
    attention: str = ""
    compile_grammar: Compile | None = None
    masks: FairThread = field(default_factory=FairThread)
    share_cores: Callable[[bool], None] = lambda shares: None


class StageLoop:
    """One stage of the pipeline, at one rank.

    It applies the verdicts that have arrived, before and after it computes, and waits for none but
    those that free what a batch needs.
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
        """`times`: measurements of this stage's batches so far."""
        self.runner, self.link, self.controller = runner, link, controller
        self.settings, self.timeline = settings, timeline
        self.rank = link.rank
        self.last = link.rank == settings.num_stages
        self.receiver = VerdictReceiver(controller, self.rank, timeline, settings.delay_ms)
        self.step = 0  # of the batch that is computed
        self._done: list[Task] = []
        self._times = times or RowTimes()
        self._usual_ms = Ema()  # of a batch with rows
        self._published_ns = timeline.clock()  # when measurements were published last
        self._worked = Counter[str]()  # totals when the last sequence ended
        self._verdicts: list[Verdict] = []  # of this step, at the last stage
        # Of the running sequences, at the last stage.
        self._verifiers: dict[int, SamplingState] = {}
        self._counts = Counter[str]()  # since there was no sequence
        self._since = 0  # when that ended
        # The running sequences, with the counts and times when they started.
        self._sequences: dict[int, tuple[SequenceStart, Counter[str]]] = {}

    def run_until_stop(self) -> None:
        """Run until a batch stops the stage, or the epoch fails; then no KV slot may be lost."""
        try:
            while self.run_step():
                pass
        except (RankFailed, StaleEpoch, Unreachable):
            self.runner.check_integrity()
            raise
        self.runner.check_integrity()

    def run_step(self) -> bool:
        batch = self.receive()
        self.apply_arrived_verdicts()
        self.share_prefixes(batch)
        reports = self.finish_sequences(batch)
        self.start_sequences(batch)
        dropped = self._counts["dropped"]
        computed = self.compute(batch)
        self.receive_verdicts()
        if not self.last:
            self.send(self.prune(computed))
        elif self.link.returns is not None:
            self.return_features(computed, self.link.returns)
        if self.timeline.record:
            draft, pruned = batch.rows[:, KIND] == DRAFT, self._counts["dropped"] - dropped
            count = int(np.count_nonzero(draft))
            self.timeline.add_rows(
                committed=len(batch) - count, draft=count - pruned, pruned=pruned
            )
        for request, report in reports.items():
            self.controller.report(request, report)
        self.publish(idle=bool(reports) and not self._sequences)
        if batch.stop:
            while not self.last and self.receiver.num_received <= self.step:
                self.apply_verdicts(self.receiver.verdict())
            self.controller.complete(self._done)
        return not batch.stop

    def receive(self) -> Batch:
        # Counts the wait of rank 1 for an idle head too.
        with self.timeline("receive"), self.controller.unattended():
            batch = self.link.recv()
        self.step = self.timeline.step = batch.step
        return batch

    def share_prefixes(self, batch: Batch) -> None:
        """Before any sequence is freed whose prefix one that starts with this batch shares."""
        for start in batch.started:
            self.wait_for_prefix(batch, start.parent, start.shared_len)
            self.runner.start_sequence(
                start.sequence, start.parent, start.shared_len, start.prompt_len
            )

    def wait_for_prefix(self, batch: Batch, sequence: int, tokens: int) -> None:
        self.apply_verdicts_until(batch, lambda: self.runner.length(sequence) >= tokens)

    def finish_sequences(self, batch: Batch) -> dict[int, dict[str, Any]]:
        """Free what the sequences that leave with a batch hold, but for retained prefixes; returns
        the reports on those that have ended, by request. Their `period` has the counts of this
        stage since it last had no sequence, so that steps for several requests at once are counted
        once (`stats.merge_periods`)."""
        reports = {}
        leaving = (*batch.finished, *batch.preempted)
        worked = self.worked() if leaving else self._worked
        kept = dict.fromkeys(leaving, 0) | dict(batch.retained_prefixes)
        for sequence, tokens in kept.items():
            self.wait_for_prefix(batch, sequence, tokens)
            self.runner.release(sequence, tokens)
        for sequence in leaving:
            if self._verifiers.pop(sequence, None) is not None:
                self.controller.drop_draft_tokens(sequence)
            start, before = self._sequences.pop(sequence)
            if sequence in batch.finished:
                now = self.counted()
                since = {name: now[name] - before[name] for name in now}
                elapsed = {"since_ns": self._since, "elapsed_ns": now["elapsed_ns"] - self._since}
                reports[start.request] = {
                    "rank": self.rank,
                    **since,
                    "period": {name: now[name] for name in PERIOD} | elapsed,
                    "attention": self.settings.attention,
                    "times": pack(self._times.measured()),
                    "events": list(self.timeline.events),
                }
        if not self._sequences:
            self._worked = worked
        return reports

    def start_sequences(self, batch: Batch) -> None:
        """Add the sequences that start with a batch, before its rows are computed."""
        for start in batch.started:
            if not self._sequences:
                self.timeline.take()
                self._counts.clear()
                self._since = self.timeline.clock()
            self._sequences[start.sequence] = start, self.counted()
            if self.last:
                verifier = SamplingState(start, self.settings.compile_grammar, self.settings.masks)
                self._verifiers[start.sequence] = verifier

    def compute(self, batch: Batch) -> Batch:
        """Run the batch through the slice; at the last stage, decide the verdicts too. The least
        time of a step (`StepClock`) covers both."""
        # A verdict that has not arrived may free the slots that the batch needs.
        self.apply_verdicts_until(batch, lambda: len(batch) <= self.runner.slots.num_free)
        self.settings.share_cores(batch.beside)
        start = self.timeline.clock()
        self._counts["steps"] += bool(self._sequences)
        with self.timeline("compute"):
            computed = self.runner.compute(batch)
        if self.last:
            start += self.receive_draft_tokens(computed)  # not the time of this stage
            with self.timeline("verify"):
                state_of = self._verifiers.__getitem__
                if any(verifier.num_unscored for verifier in self._verifiers.values()):
                    for sequence, logprobs in self.runner.score_prompts(computed, state_of):
                        start_of, _ = self._sequences[sequence]
                        self.controller.add_prompt_logprobs(start_of.request, logprobs)
                self.settings.masks.grant_share(self._usual_ms.value)
                self._verdicts = self.runner.verify(computed, state_of)
                self.log_failures()
        with self.timeline("pace"):
            wait = self.settings.clock.wait_for_stage
            paced = wait(start, self.rank, self.step, len(computed))
        self._counts["overruns"] += not paced
        if len(computed):
            took_ms = (self.timeline.clock() - start) / 1e6
            self._times.add(len(computed), took_ms, self.runner.slots_read)
            self._usual_ms.add(took_ms)
        self._counts["rows"] += len(computed)
        self._counts["dropped"] += len(batch) - len(computed)
        return computed

    def receive_draft_tokens(self, batch: Batch) -> int:
        """Receive what the head has fed meanwhile of the lossy sequences in a batch, so that a
        node's children are known when the next token is decided, as far as they have arrived.
        Returns its nanoseconds."""
        begun = self.timeline.clock()
        for sequence in dict.fromkeys(batch.rows[:, SEQUENCE].tolist()):
            verifier = self._verifiers[sequence]
            if verifier.sampling.lossy:
                with self.timeline("wait"):
                    for draft in self.controller.read_draft_tokens(sequence):
                        verifier.add_draft_tokens(draft, since=batch.step)
        return self.timeline.clock() - begun

    def log_failures(self) -> None:
        for verdict in self._verdicts:
            if verdict.failed is not None:
                start, _ = self._sequences[verdict.sequence]
                why = self._verifiers[verdict.sequence].failure or verdict.failed
                log.warning("request %d ends: %s", start.request, why)

    def send(self, batch: Batch) -> None:
        with self.timeline("send"), self.controller.unattended():
            self.link.send(batch)
        self._done.append(transfer(self.rank, self.step))

    def return_features(self, computed: Batch, link: Transport) -> None:
        """Send the head the features of the rows that are decided text, once their verdict is on
        its way: what is behind their hidden states, or, without any, these."""
        with self.timeline("features"):
            decided = computed.select(self.runner.committed_rows(computed))
            features, size = decided.hidden, self.runner.model.hidden_size
            if features is not None and features.shape[1] > size:
                features = features[:, size:]
            back = Batch(computed.step, decided.rows, features, stop=computed.stop)
            with self.controller.unattended():
                link.send(back)

    def prune(self, computed: Batch) -> Batch:
        with self.timeline("prune"):
            alive = self.runner.prune(computed)
        self._counts["dropped"] += len(computed) - len(alive)
        return alive

    def receive_verdicts(self) -> None:
        """Report this step as computed; apply the verdicts that have arrived."""
        done, self._done = [*self._done, compute(self.rank, self.step)], []
        with self.timeline("control"):
            self.controller.complete(done, pack_verdicts(self._verdicts, self.timeline.clock()))
        if self.last:
            self.receiver.num_received += 1
            self.apply_verdicts(self._verdicts)
        else:
            self.apply_arrived_verdicts()

    def apply_arrived_verdicts(self) -> None:
        while not self.last and (verdicts := self.receiver.verdict(timeout=0.0)) is not None:
            self.apply_verdicts(verdicts)

    def apply_verdicts_until(self, batch: Batch, ready: Callable[[], bool]) -> None:
        """Apply verdicts until this stage is `ready` for a batch. One that the head knew when it
        sent the batch may not have arrived yet."""
        while not self.last and not ready():
            assert self.receiver.num_received < batch.step, "the head knew what this batch needs"
            self.apply_verdicts(self.receiver.verdict())

    def apply_verdicts(self, verdicts: list[Verdict] | None) -> None:
        assert verdicts is not None
        with self.timeline("prune"):
            self.runner.apply(verdicts)
        self._done.append(prune(self.rank, self.receiver.num_received - 1))

    def publish(self, *, idle: bool) -> None:
        """Publish measurements every second, and when the stage has just become `idle`."""
        now = self.timeline.clock()
        if idle or now - self._published_ns > PUBLISH_NS:
            self._published_ns = now
            with self.timeline("control"):
                self.controller.publish_stage_stats(self._times.measured(), self.worked())

    def worked(self) -> Counter[str]:
        """Nanoseconds of this epoch with any sequence here, and how many of these it computed,
        waited for batches, and sent its own."""
        worked = Counter(self._worked)
        if self._sequences:
            totals = self.timeline.totals
            worked["active_ns"] += self.timeline.clock() - self._since
            worked["busy_ns"] += self._busy_ns
            worked["receive_ns"] += totals["receive"]
            worked["send_ns"] += totals["send"]
        return worked

    @property
    def _busy_ns(self) -> int:
        totals = self.timeline.totals
        return totals["compute"] + totals["verify"] + totals["pace"]

    def counted(self) -> Counter[str]:
        totals = self.timeline.totals
        return Counter(
            elapsed_ns=self.timeline.clock(),
            busy_ns=self._busy_ns,
            control_ns=totals["control"],
            **{name: self._counts[name] for name in COUNTS},
        )
