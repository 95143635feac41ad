"""One step of the head: the order in which the scheduler decides and its surroundings act."""

from __future__ import annotations

import collections.abc
from typing import Protocol

from pipespec.core import Batch
from pipespec.head.proposer import Proposal
from pipespec.head.scheduler import Scheduler
from pipespec.head.scheduler_types import ProposalBatch
from pipespec.head.sequence import Sequence


class Pipeline(Protocol):
    """The surroundings of a scheduler: a running cluster (`pipespec.head.head_loop`), or an
    imagined one (`pipespec plan`)."""

    def begin_step(self) -> None:
        """A step begins; `elapsed_ms` counts from here."""

    def elapsed_ms(self) -> float:
        """Milliseconds since the step began."""

    def start_sequence(self, sequence: Sequence) -> None:
        """A sequence has entered the pipeline; the proposer must know it before it proposes."""

    def propose(
        self, work: ProposalBatch
    ) -> tuple[collections.abc.Sequence[Proposal | None], float]:
        """The proposals of one draft round, one for each part, and how many milliseconds it took.

        The proposer must know every token that was accepted before.
        """

    def receive_verdicts(self) -> None:
        """Wait until the batch of this step is due; apply every verdict that arrives until then
        (`Scheduler.apply`)."""

    def drop_cancelled(self) -> None:
        """End the requests that their clients have cancelled."""

    def end_sequence(self, sequence: Sequence) -> None:
        """A preempted sequence has left the pipeline; the proposer must forget it."""

    def send(self, batch: Batch) -> None:
        """Send a batch to the first stage."""

    def after_send(self) -> None:
        """Do what must not delay the batch, such as logging the accepted tokens."""


def run_step(scheduler: Scheduler, pipeline: Pipeline) -> Batch:
    """Run one step; returns the batch that was sent."""
    for sequence in scheduler.admit():
        pipeline.start_sequence(sequence)
    pipeline.begin_step()
    scheduler.begin_step()

    # The draft expands the trees while the stages compute; a draft head needs their verdict.
    if not scheduler.config.one_batch:
        expand_all(scheduler, pipeline)

    drafted_ms = pipeline.elapsed_ms()
    pipeline.receive_verdicts()
    scheduler.end_verdicts(drafted_ms, pipeline.elapsed_ms() - drafted_ms)
    pipeline.drop_cancelled()
    for sequence in scheduler.admission.preempt():
        pipeline.end_sequence(sequence)

    if scheduler.config.one_batch:
        expand_all(scheduler, pipeline)
    while work := scheduler.next_refill(plan := scheduler.plan_batch(pipeline.elapsed_ms())):
        # The stages wait for this draft round: without it there is nothing to send, or less than
        # the wait is worth.
        expand(scheduler, pipeline, work)
    batch = scheduler.next_batch(plan)
    pipeline.send(batch)
    pipeline.after_send()
    scheduler.end_step(pipeline.elapsed_ms())
    return batch


def expand_all(scheduler: Scheduler, pipeline: Pipeline) -> None:
    """The draft rounds for which a step has time."""
    while work := scheduler.next_expansion(pipeline.elapsed_ms()):
        expand(scheduler, pipeline, work)


def expand(scheduler: Scheduler, pipeline: Pipeline, work: ProposalBatch) -> None:
    """Add the tokens of a draft round to the trees: those that grammars determine, and below them
    those of the proposer."""
    work = scheduler.add_determined(work)
    if work.parts:
        scheduler.add_proposals(work, *pipeline.propose(work))
