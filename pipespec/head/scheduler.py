"""Which rows enter the pipeline next: the requests, their trees, and what was decided.

The scheduler holds no clock, socket, file or thread. It is told what happened and says what to
do. Two drive it: the loop of rank 0 (`pipespec.head.loop`) with a running cluster, and the
simulation of `pipespec plan` (`pipespec.planning.simulation`) with an imagined one. Requests come
and go at any step (`add`, `cancel`). A step is

    scheduler.admit()                                   # who waits and fits is opened
    scheduler.begin()
    while work := scheduler.expansion(elapsed_ms):      # while the stages compute
        scheduler.graft(work, source.expand(...), ms)
    scheduler.apply(verdict, now)                       # each one that comes
    scheduler.heard(drafted_ms, wait_ms)
    scheduler.make_room()                               # or the last is put back
    while isinstance(todo := scheduler.next_batch(elapsed_ms), DraftWork):
        scheduler.graft(todo, source.expand(...), ms)   # what must be there before anything is fed
    send(todo)
    scheduler.end(ms)

One batch mixes the rows of all requests: unfed roots, pieces of prompts, guesses
(`pipespec.head.choice`). Which requests are open, and that the stages have KV slots for them, is
decided in `pipespec.head.admission`; here, that no guesses are fed when slots run short.
"""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from dataclasses import replace

import numpy as np

from pipespec.core import GRAMMAR, GUESS, KIND, POSITION, Batch, Verdict
from pipespec.head.admission import Admission
from pipespec.head.choice import Choice, Offer, certain, choose
from pipespec.head.drafting import draft_work
from pipespec.head.feed.policy import PipelineState
from pipespec.head.feed.rounds import fits, least_rounds
from pipespec.head.guide import held_to
from pipespec.head.meter import Meter
from pipespec.head.scoring import ScoreWork, Scoring
from pipespec.head.sequence import Sequence
from pipespec.head.source.protocol import Candidates
from pipespec.head.tree import ROOT
from pipespec.head.work import DraftWork, Progress, SchedulerConfig, Totals
from pipespec.row_times import UNKNOWN, Measured

# How much longer a step may last with rows of prompts, while answers are running, than without.
PROMPT_STRETCH = 1.5
# Of such a step's rows beside roots, one of so many is kept for guesses that pay, so that answers
# do not fall back to a token per pass; a prompt then takes at most 4/3 of its time.
KEPT_FOR_GUESSES = 4


class Scheduler(Admission):
    """The decisions of the head, for all requests that are open."""

    def __init__(self, config: SchedulerConfig):
        super().__init__(
            max_num_seqs=config.max_num_seqs,
            num_slots=config.num_slots,
            context_limit=config.context_limit,
            batch_rows=config.rows,
            root_rows=max(each.max_rows if each.whole else 1 for each in config.policies),
            max_retained=config.max_retained,
        )
        self.config = config
        self.step = 0  # of the next batch
        self.totals = Totals()
        self._policy = config.policy
        self._meter = self._new_meter()
        self._mid = Scoring(config.mid_rows, config.context_limit)
        self._measured = UNKNOWN  # by the stages
        self._decoding = 0  # requests that were past their first tokens when this step began
        self._guesses = False  # whether any of theirs were on their way
        self._decided = 0  # tokens that this step decided
        self._fruitless = False  # whether the draft had no room for any node of its last round
        self._busy_until = 0  # the step in which the last batch that matters leaves the pipeline

    @property
    def draining(self) -> bool:
        """Whether batches are on their way, so that the pipeline must keep stepping."""
        return self.untold or self.step <= self._busy_until

    @property
    def misses_per_step(self) -> float:
        """Tokens per step of one request that had to be fed after they were decided."""
        rates = [sequence.misses_per_step for sequence in self.sequences.values()]
        return sum(rates) / len(rates) if rates else 0.0

    def statistics(self) -> dict[str, int]:
        """How many requests are open and wait, what they hold, what texts hold alone that others
        may share, and what a step may feed of them beside prompts."""
        return {
            "running": len(self.sequences),
            "waiting": len(self.waiting),
            "kv_slots": self.num_slots,
            "kv_slots_held": self.num_slots - self.free_slots,
            "kv_slots_retained": self.cache.held - self.cache.pinned,
            "row_budget": self._budget(max(len(self.sequences), 1)),
        }

    def counts(self) -> dict[str, int]:
        """What was done so far (`Totals.counts`); nothing of it ever falls."""
        cached = {"cache_queries": self.cache.queries, "cache_hits": self.cache.hits}
        return {"preemptions": self.preemptions, **cached, **self.totals.counts()}

    def turn_to(self, feed: str) -> None:
        super().turn_to(feed)
        self._policy = self.config.policy_of(feed)
        self._meter = self._new_meter()  # what was seen of another policy says nothing of this one
        self._meter.stages(self._measured)

    def _new_meter(self) -> Meter:
        config = self.config
        return Meter(config.num_steps, least_rounds(config.rounds), config.rows)

    # --- a step -------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step begins."""
        self._decided = 0
        self._fruitless = False
        decoding = [each for each in self.sequences.values() if each.decoding]
        self._decoding = len(decoding)
        self._guesses = any(each.guesses_in_flight for each in decoding)
        self._meter.begin()

    def expansion(self, elapsed_ms: float) -> DraftWork | None:
        """The next draft round of a step that has lasted so long; None: none is wanted, or
        there is no time for it."""
        state = self._state(elapsed_ms)
        if not self.sequences or self._fruitless or not fits(self.config.rounds, state):
            return None
        work, _ = draft_work(self.sequences.values(), self._policy, state, self._budget)
        return work

    def graft(self, work: DraftWork, candidates: ListOf[Candidates | None], ms: float) -> None:
        """Hang what the source proposed into the trees; the round took `ms`.

        There is one answer for each part. None: the source is still reading that prompt.
        """
        self._fruitless = all(each is not None and not len(each.parents) for each in candidates)
        drafted = any(each is not None and len(each.parents) for each in candidates)
        self.totals.rounds += 1
        self._meter.round(ms, measured=drafted)
        for part, answer in zip(work.parts, candidates, strict=True):
            part.sequence.counts["rounds"] += 1
            if answer is not None:
                tree = part.sequence.tree
                if part.allowed is not None:
                    answer = held_to(answer, part.nodes, part.allowed)
                paths = answer.paths if part.deeper else None
                tree.append(answer.parents, answer.tokens, answer.logps, part.limit, paths)
                tree.trim(self._policy.capacity)

    def scoring(self) -> ScoreWork | None:
        """The next pass of the mid-size model, which has none under way; None: there is nothing to
        ask. What it answers is told by `rescore`."""
        return self._mid.work(self.sequences.values(), self._policy)

    def rescore(self, work: ScoreWork, candidates: ListOf[Candidates | None]) -> None:
        """Hang what the mid-size model said into the trees, in place of what they held, as long as
        it guesses better than the source."""

        def is_open(sequence: Sequence) -> bool:
            return self.sequences.get(sequence.number) is sequence

        self.totals.mid_passes += 1
        self.totals.scored += self._mid.restate(work, candidates, is_open, self._policy.capacity)

    def apply(self, verdict: Verdict, now: int) -> Progress | None:
        """Move the root along a verdict's tokens, up to the one that ends the request.

        `now` is a moment of the caller's clock. None: the request ended while this was on its way.
        """
        sequence = self.sequences.get(verdict.sequence)
        if sequence is None:
            return None
        assert verdict.base == len(sequence.context.tokens), "a verdict is missing"
        reason = GRAMMAR if verdict.failed else None
        count = 0
        for token in verdict.tokens:
            count += 1
            self._mid.decided(sequence.tree, token)
            over = sequence.accept(token, now)
            self.totals.decided(sequence.tree.root_fed_at)
            if over:
                reason = over
                break
        self._decided += count
        self._fruitless = False  # the draft may have room again
        if not sequence.tree.fed[ROOT]:
            sequence.waits_since = self.step
        accepted = replace(
            verdict, tokens=verdict.tokens[:count], logprobs=verdict.logprobs[:count]
        )
        if reason:
            self.close(sequence)
        return Progress(sequence, accepted, reason)

    def heard(self, drafted_ms: float, wait_ms: float) -> None:
        """All verdicts of this step were applied: it had lasted `drafted_ms` when whoever drives
        it began to wait for them, for `wait_ms`."""
        if self._decoding:
            self._meter.verdict(drafted_ms, wait_ms, self._decided)
        for sequence in self.sequences.values():
            sequence.counts["steps"] += 1

    def has_work(self, elapsed_ms: float) -> bool:
        """Whether a batch of this step would carry anything."""
        if self.untold:
            return True
        if any(each.prompt_left or not each.tree.fed[ROOT] for each in self.sequences.values()):
            return True
        choice, _, _ = self._choice(self._state(elapsed_ms))
        return any(len(nodes) for _, nodes in choice)

    def next_batch(self, elapsed_ms: float) -> Batch | DraftWork:
        """The batch of this step: unfed roots, the next rows of prompts, guesses.

        Or a draft round without which nothing can be fed, the pipeline idling meanwhile; ask
        again after it.
        """
        batch = self._next_rows(elapsed_ms)
        if isinstance(batch, DraftWork):
            return batch
        self.tell(batch)
        if len(batch) or batch.released or batch.preempted:
            self._busy_until = self.step + self.config.num_steps
        self._meter.fed(len(batch), int(np.count_nonzero(batch.rows[:, KIND] != GUESS)))
        self.step += 1
        return batch

    def end(self, ms: float) -> None:
        """The step lasted `ms`."""
        if self._decoding and self.sequences:
            guesses = self._guesses or self._meter.rounds > 0
            self._meter.step(ms, self._decided, guesses=guesses, requests=self._decoding)

    # --- choices ------------------------------------------------------------------------------

    def learn(self, measured: Measured) -> None:
        """The stages have measured how long batches take."""
        self._measured = measured
        self._meter.stages(measured)

    def _state(self, elapsed_ms: float) -> PipelineState:
        """What the policy may know at this moment of the step."""
        return self._meter.state(
            self.step,
            end=self.config.context_limit,
            elapsed_ms=elapsed_ms,
            requests=max(self._decoding, 1),
        )

    def _budget(self, requests: int) -> int:
        """Rows that so many requests may feed in a step beside prompts."""
        most = self._policy.max_rows * (1 if self._policy.shared else requests)
        return min(most, self.config.rows)

    def _choice(
        self, state: PipelineState
    ) -> tuple[list[tuple[Sequence, np.ndarray]], list[tuple[Sequence, int]], Choice]:
        """The nodes to feed now of every sequence that is past its prompt, up to where the
        prompts of others are read, and the choice among all nodes that were offered.

        Roots come first, who has waited longest before all others, then prompts, then guesses;
        of what roots leave beside running answers, guesses have a part before prompts, which
        have one row whatever roots there are.
        """
        decoding = sorted(
            (each for each in self.sequences.values() if not each.prompt_left),
            key=lambda each: each.waits_since,
        )
        offers = []
        for sequence in decoding:
            nodes = sequence.useful(self._policy.feed(sequence.tree, sequence.own(state)))
            context = len(sequence.context.tokens)
            offers.append(Offer(sequence.tree, nodes, self._policy.whole, context))
        slots = self.free_slots
        budget = min(self._budget(len(offers)), slots)
        first = min(certain(offers), budget)
        if offers and self._reads_beside:  # as many roots as there are rows leave one for prompts
            first = min(first, max(self.config.rows - 1, offers[0].certain))
        most = self._rows(first)
        spare = max(slots - self.promised_slots, 0)  # guesses have what nobody else needs
        budget = min(budget, max(first, spare))

        def beside(of_prompts: int, rows: int) -> Choice:
            return choose(offers, min(budget, rows), self._policy.row_cost, state, of_prompts)

        kept = first
        if self._reads_beside:
            chosen = beside(0, first + (most - first) // KEPT_FOR_GUESSES)
            kept = max(first, sum(map(len, chosen.taken)))
        prompts = self._prompts(min(most, slots) - kept)
        of_prompts = sum(end - each.prefilled for each, end in prompts)
        chosen = beside(of_prompts, most - of_prompts)
        return list(zip(decoding, chosen.taken, strict=True)), prompts, chosen

    @property
    def _reads_beside(self) -> bool:
        """Whether prompts are read beside running answers."""
        reading = any(each.prompt_left for each in self.sequences.values())
        return bool(self._decoding) and reading

    def _rows(self, first: int) -> int:
        """Rows of this step's batch, `first` of which are roots.

        Where prompts are read beside running answers, no more than keep their pace.
        """
        if not self._reads_beside:
            return self.config.rows
        within = self._meter.rows_within(PROMPT_STRETCH, first)
        return self.config.rows if within is None else min(self.config.rows, max(within, first + 1))

    def _prompts(self, room: int) -> list[tuple[Sequence, int]]:
        """Up to where prompts are read next, in `room` rows; who is read first changes from step
        to step, so that a short prompt does not wait for a long one."""
        room = min(room, self.config.prefill_chunk)
        reading = [each for each in self.sequences.values() if each.prompt_left]
        first = self.step % max(len(reading), 1)
        found = []
        for sequence in (*reading[first:], *reading[:first]):
            end = min(sequence.prefilled + room, sequence.known)
            if end > sequence.prefilled:
                found.append((sequence, end))
                room -= end - sequence.prefilled
        return found

    def _next_rows(self, elapsed_ms: float) -> Batch | DraftWork:
        state = self._state(elapsed_ms)
        choice, prompts, offered = self._choice(state)
        if not prompts and not any(len(nodes) for _, nodes in choice):
            stuck = [each for each, _ in choice if not each.tree.fed[ROOT]]
            work, urgent = draft_work(stuck, self._policy, state, self._budget)
            if work is not None and urgent:
                if not self._fruitless:
                    return work
                most = min(self.free_slots, self._budget(len(stuck)))
                choice = [(each, np.array([ROOT])) for each in stuck[:most]]
        if choice:
            self._meter.offered(offered.chances, offered.slots)
        found = [Batch(self.step).rows]
        of_prompts = 0
        for sequence, end in prompts:
            rows = sequence.context.rows(sequence.prefilled, end)
            sequence.prefilled = end
            sequence.counts["rows"] += len(rows)
            of_prompts += len(rows)
            found.append(rows)
        cums = [np.empty(0)]
        roots: list[int] = []  # where the tree of each row that follows has its root
        for sequence, nodes in choice:
            if len(nodes):
                tree = sequence.tree
                found.append(tree.rows(sequence.number, nodes))
                roots += [int(tree.position[ROOT])] * len(nodes)
                cums.append(tree.cum[nodes])
                tree.feed(nodes)
                if not self._policy.keeps_unfed:
                    tree.drop_unfed()
                sequence.counts["rows"] += len(nodes)
        rows = np.concatenate(found)
        depths = rows[of_prompts:, POSITION] - np.array(roots, np.int64)
        chances = np.exp(np.concatenate(cums))
        self.totals.step(len(rows), of_prompts, depths, chances, self._decided)
        return Batch(self.step, rows)
