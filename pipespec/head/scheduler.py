"""Which rows enter the pipeline next: the requests, their trees, and what was decided.

The scheduler holds no clock, socket, file or thread. It is told what happened and says what to
do. Two drive it: the loop of rank 0 (`pipespec.head.loop`) with a running cluster, and the
simulation of `pipespec plan` (`pipespec.planning.simulation`) with an imagined one. A step is

    scheduler.begin()
    while work := scheduler.expansion(elapsed_ms):      # while the stages compute
        scheduler.graft(work, source.expand(...), ms)
    scheduler.apply(verdict, now)                       # each one that comes
    scheduler.heard(drafted_ms, wait_ms)
    while isinstance(todo := scheduler.next_batch(elapsed_ms), DraftWork):
        scheduler.graft(todo, source.expand(...), ms)   # what must be there before anything is fed
    send(todo)
    scheduler.end(ms)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pipespec.core import Batch, Request, Verdict
from pipespec.head.feed.policy import FeedPolicy, PipelineState
from pipespec.head.feed.rounds import fits
from pipespec.head.meter import Meter
from pipespec.head.sequence import Sequence, StopCheck
from pipespec.head.source.protocol import Candidates
from pipespec.head.tree import ROOT


@dataclass(frozen=True)
class SchedulerConfig:
    """What a scheduler decides by.

    Attributes:
        policy: which nodes are expanded and which are fed.
        num_steps: steps that a batch takes from the head through the last stage.
        rounds: draft rounds per step at most, or "auto".
        prefill_chunk: rows of a prompt that one batch carries.
        context_limit: tokens of the longest sequence.
    """

    policy: FeedPolicy
    num_steps: int
    rounds: int | str
    prefill_chunk: int
    context_limit: int


@dataclass(frozen=True, slots=True)
class DraftWork:
    """One draft round: the source proposes `children` children for `nodes` of a sequence's tree;
    the best `limit` of all are kept (None: all)."""

    sequence: Sequence
    nodes: np.ndarray
    children: int
    limit: int | None


@dataclass(frozen=True, slots=True)
class Progress:
    """What a verdict brought to a request.

    `accepted` is the verdict without the tokens beyond the end of the text; `reason` says why
    the request is over, None: it is not. `sequence` is the request's, also where it is closed.
    """

    sequence: Sequence
    accepted: Verdict
    reason: str | None


class Scheduler:
    """The decisions of the head. Today it holds one request at a time."""

    def __init__(self, config: SchedulerConfig):
        self.config = config
        self.step = 0  # of the next batch
        self.sequence: Sequence | None = None
        self._policy = config.policy
        self._meter = Meter(config.num_steps)
        self._guesses: bool | None = None  # whether this step knows any; None: it is not decoding
        self._decided = 0  # tokens that this step decided
        self._released: tuple[int, ...] = ()  # requests that the stages have not been told to free
        self._busy_until = 0  # the step in which the last batch that matters leaves the pipeline

    # --- requests -----------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether no request is open."""
        return self.sequence is None

    @property
    def draining(self) -> bool:
        """Whether batches are on their way, so that the pipeline must keep stepping."""
        return self.step <= self._busy_until

    @property
    def misses_per_step(self) -> float:
        """Tokens per step that had to be fed after they were decided."""
        return self.sequence.misses_per_step if self.sequence else 0.0

    def add(
        self, request: Request, stops: StopCheck, now: int, answer: tuple[int, ...] = ()
    ) -> Sequence:
        """Open a request, of which `answer` was decided before, at a moment of the caller's clock.

        If that answer is the whole of it (`Sequence.ended`), it is closed at once.
        """
        assert self.sequence is None, "one request at a time"
        sequence = Sequence.open(request, stops, self.config.context_limit, now, answer)
        self.sequence = sequence
        if sequence.ended:
            self._close(sequence)
        return sequence

    def cancel(self, request: int) -> Sequence | None:
        """Close a request for which nobody waits any more; None: it is not open."""
        sequence = self.sequence
        if sequence is None or sequence.request.id != request:
            return None
        self._close(sequence)
        return sequence

    def _close(self, sequence: Sequence) -> None:
        """The next batch tells the stages to free what the request holds."""
        self._released = (sequence.request.id,)
        self.sequence = None

    # --- a step -------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step begins."""
        self._decided = 0
        sequence = self.sequence
        self._guesses = sequence.guesses_in_flight if sequence and sequence.decoding else None
        self._meter.begin()

    def expansion(self, elapsed_ms: float) -> DraftWork | None:
        """The next draft round of a step that has lasted so long; None: none is wanted, or
        there is no time for it."""
        if self.sequence is None:
            return None
        state = self._state(self.sequence, elapsed_ms)
        work, _ = self._growth(self.sequence, state)
        return work if work is not None and fits(self.config.rounds, state) else None

    def graft(self, work: DraftWork, candidates: Candidates | None, ms: float) -> None:
        """Hang what the source proposed into the tree; the round took `ms`.

        None: the source is still reading the prompt.
        """
        sequence = work.sequence
        sequence.counts["rounds"] += 1
        self._meter.round(ms, measured=candidates is not None)
        if candidates is not None:
            sequence.tree.append(
                candidates.parents, candidates.tokens, candidates.logps, work.limit
            )
            sequence.tree.trim(self._policy.capacity)

    def apply(self, verdict: Verdict, now: int) -> Progress | None:
        """Move the root along a verdict's tokens, up to the one that ends the request.

        `now` is a moment of the caller's clock. None: the request ended while this was on its way.
        """
        sequence = self.sequence
        if sequence is None or verdict.request != sequence.request.id:
            return None
        assert verdict.base == len(sequence.context.tokens), "a verdict is missing"
        reason = None
        count = 0
        for token in verdict.tokens:
            count += 1
            reason = sequence.accept(token, now)
            if reason:
                break
        self._decided += count
        accepted = replace(
            verdict, tokens=verdict.tokens[:count], logprobs=verdict.logprobs[:count]
        )
        if reason:
            self._close(sequence)
        return Progress(sequence, accepted, reason)

    def heard(self, drafted_ms: float, wait_ms: float) -> None:
        """All verdicts of this step were applied: it had lasted `drafted_ms` when whoever drives
        it began to wait for them, for `wait_ms`."""
        if self._guesses is not None:
            self._meter.verdict(drafted_ms, wait_ms, self._decided)
        if self.sequence is not None:
            self.sequence.counts["steps"] += 1

    def has_work(self, elapsed_ms: float) -> bool:
        """Whether a batch of this step would carry anything."""
        sequence = self.sequence
        if self._released or sequence is None:
            return bool(self._released)
        if sequence.prompt_left or not sequence.tree.fed[ROOT]:
            return True
        return len(self._choice(sequence, self._state(sequence, elapsed_ms))) > 0

    def next_batch(self, elapsed_ms: float) -> Batch | DraftWork:
        """The batch of this step: the prompt's next chunk, or the nodes that the policy chooses.

        Or a draft round without which nothing can be fed, the pipeline idling meanwhile; ask
        again after it.
        """
        rows = self._next_rows(elapsed_ms)
        if isinstance(rows, DraftWork):
            return rows
        batch = Batch(self.step, rows, released=self._released)
        if len(batch) or batch.released:
            self._busy_until = self.step + self.config.num_steps
        self._released = ()
        self._meter.fed(len(batch))
        self.step += 1
        return batch

    def end(self, ms: float) -> None:
        """The step lasted `ms`."""
        if self._guesses is not None and self.sequence is not None:
            guesses = self._guesses or self._meter.rounds > 0
            self._meter.step(ms, self._decided, guesses=guesses)

    # --- choices ------------------------------------------------------------------------------

    def _state(self, sequence: Sequence, elapsed_ms: float) -> PipelineState:
        """What the policy may know at this moment of the step."""
        return self._meter.state(self.step, end=sequence.last_position, elapsed_ms=elapsed_ms)

    def _growth(self, sequence: Sequence, state: PipelineState) -> tuple[DraftWork | None, bool]:
        """The draft round that the policy wants, and whether the pipeline idles until then."""
        expansion = self._policy.grow(sequence.tree, state)
        nodes = sequence.useful(expansion.nodes)
        if not len(nodes):
            return None, False
        return DraftWork(sequence, nodes, self._policy.children, expansion.limit), expansion.urgent

    def _choice(self, sequence: Sequence, state: PipelineState) -> np.ndarray:
        """The nodes that the policy would feed now."""
        return sequence.useful(self._policy.feed(sequence.tree, state))

    def _next_rows(self, elapsed_ms: float) -> np.ndarray | DraftWork:
        sequence = self.sequence
        if sequence is None:
            return Batch(self.step).rows
        if sequence.prompt_left:
            end = min(sequence.prefilled + self.config.prefill_chunk, sequence.known)
            rows = sequence.context.rows(sequence.prefilled, end)
            sequence.prefilled = end
        else:
            state = self._state(sequence, elapsed_ms)
            nodes = self._choice(sequence, state)
            if not len(nodes) and not sequence.tree.fed[ROOT]:
                work, urgent = self._growth(sequence, state)
                if work is not None and urgent:
                    return work
            assert len(nodes) <= self._policy.max_rows, "the KV pools are made for no more"
            rows = sequence.tree.rows(sequence.request.id, nodes)
            sequence.tree.fed[nodes] = True
            if len(nodes) and not self._policy.keeps_unfed:
                sequence.tree.drop_unfed()
        sequence.counts["rows"] += len(rows)
        return rows
