"""The scheduler: decides which rows enter the pipeline next, and applies verdicts to the trees.

The scheduler holds no clock, socket, file or thread: it gets events and returns decisions.
`pipespec.head.step.run_step` is the order of its calls in a step; requests are added and cancelled
at any moment. Two things drive it: the loop of rank 0 with a running cluster, and the simulation of
`pipespec plan` with an imagined one.

A batch mixes the rows of all requests: unfed roots, chunks of prompts, draft tokens
(`pipespec.head.row_plan`, `pipespec.head.row_budget`). `pipespec.head.admission` decides which
requests run, so that the stages have KV slots for them.
"""

from __future__ import annotations

import collections.abc
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from pipespec.core import DRAFT, KIND, POSITION, Batch, Request, Verdict
from pipespec.head.admission import Admission
from pipespec.head.expansion import next_proposal_batch
from pipespec.head.policies.draft_rounds import has_time_for_round, min_rounds
from pipespec.head.policies.policy import Expansion, PipelineState, TargetBatch
from pipespec.head.proposers.proposer import Proposal
from pipespec.head.refill import next_refill
from pipespec.head.row_budget import target_batch
from pipespec.head.row_plan import RowPlan, RowPlanner
from pipespec.head.scheduler_types import (
    ProposalBatch,
    SchedulerConfig,
    SequenceUpdate,
    Totals,
    TreeScorer,
)
from pipespec.head.sequence import Sequence, StopCheck
from pipespec.head.step_stats import StepStats
from pipespec.head.step_times import LearntSteps
from pipespec.head.structured_output import GrammarGuide, masked_proposal
from pipespec.head.tree import ROOT
from pipespec.timing.batch_times import NO_TIMES, BatchTimes


class Scheduler:
    """The decisions of the head for all requests; `admission` holds them."""

    def __init__(self, config: SchedulerConfig, scorer: TreeScorer | None = None):
        self.admission = Admission(
            max_num_seqs=config.max_num_seqs,
            num_slots=config.num_slots,
            context_limit=config.context_limit,
            batch_rows=config.rows,
            root_rows=max(each.max_rows if each.whole else 1 for each in config.policies),
            max_retained=config.max_retained,
            states=config.make_states(),
        )
        self.config = config
        self._planner = RowPlanner(config, self.admission)
        self.step = 0  # of the next batch
        self.totals = Totals()
        self._policy_name, self._policy = "", config.policy
        self.learnt: LearntSteps | None = None
        self._stats = self._new_stats()
        self._scorer = scorer
        self._measured = NO_TIMES  # by the stages
        self._target: TargetBatch | None = None  # the size of batches in this step
        self._decoding = 0  # requests that had a first token when this step began
        self._drafts_in_flight = False  # whether draft tokens of these were in the pipeline
        self._decided = 0  # tokens, in this step
        self._draft_has_no_room = False  # for any node of its last round
        self._draft_reads_prompts = False  # in its last round of this step
        self._busy_until = 0  # the step in which the last batch with rows leaves the pipeline

    # --- requests -----------------------------------------------------------------------------

    def add(
        self,
        request: Request,
        stops: StopCheck,
        now: int,
        answer: tuple[int, ...] = (),
        guide: GrammarGuide | None = None,
    ) -> Sequence:
        """Add a request; see `Admission.add`."""
        return self.admission.add(request, stops, now, answer, guide)

    def cancel(self, request: int) -> Sequence | None:
        """Remove the request with this id; returns its sequence, None if there is none."""
        return self.admission.cancel(request)

    def admit(self) -> Iterator[Sequence]:
        """Start waiting requests; the proposer must know each of them before it proposes."""
        for sequence in self.admission.admit():
            if sequence.request.policy != self._policy_name:
                self._switch_policy(sequence.request.policy)
            yield sequence

    def preempt(self) -> list[Sequence]:
        """Preempt the requests for which the stages have no slots; returns their sequences."""
        return self.admission.preempt()

    @property
    def sequences(self) -> dict[int, Sequence]:
        """Those of the running requests, by number."""
        return self.admission.sequences

    @property
    def requests(self) -> list[Sequence]:
        """The sequences of all requests, running or waiting."""
        return self.admission.requests

    @property
    def room(self) -> int:
        """How many more requests can be added."""
        return self.admission.room

    @property
    def idle(self) -> bool:
        """Whether there is no request."""
        return self.admission.idle

    @property
    def draining(self) -> bool:
        """Whether batches are on their way, so that the pipeline must keep stepping."""
        return self.admission.has_unsent_departures or self.step <= self._busy_until

    @property
    def overlap(self) -> bool:
        """Whether the draft works while the stages compute, now."""
        return self._stats.overlap

    @property
    def misses_per_step(self) -> float:
        """Tokens per step of one request that had to be fed after they were decided."""
        rates = [sequence.misses_per_step for sequence in self.sequences.values()]
        return sum(rates) / len(rates) if rates else 0.0

    def statistics(self) -> dict[str, int]:
        """Gauges: numbers of requests, KV slots in all, held by requests, and held by retained
        prefixes alone, and the rows that a step may carry beside prompts."""
        admission = self.admission
        return {
            "running": len(self.sequences),
            "waiting": len(admission.waiting),
            "kv_slots": admission.num_slots,
            "kv_slots_held": admission.num_slots - admission.free_slots,
            "kv_slots_retained": admission.cache.held - admission.cache.pinned,
            "row_budget": self._budget(max(len(self.sequences), 1)),
        }

    def counts(self) -> dict[str, int]:
        """Counters since the start (`Totals.counts`); none of them ever falls."""
        cache = self.admission.cache
        cached = {"cache_queries": cache.queries, "cache_hits": cache.hits}
        return {"preemptions": self.admission.preemptions, **cached, **self.totals.counts()}

    def _switch_policy(self, name: str) -> None:
        """Decode by the policy of this name; no request of another one is running."""
        self._policy_name, self._policy = name, self.config.policy_of(name)
        self._stats = self._new_stats()  # measurements of another policy do not apply
        self._stats.set_stage_times(self._measured)

    def _new_stats(self) -> StepStats:
        config = self.config
        most = self._budget(config.max_num_seqs)
        rounds = min_rounds(config.rounds)
        overlap = config.overlap is not False
        return StepStats(config.num_steps, rounds, most, overlap=overlap, learnt=self.learnt)

    # --- a step -------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """A step begins."""
        self._decided = 0
        self._draft_has_no_room = self._draft_reads_prompts = False
        decoding = [each for each in self.sequences.values() if each.decoding]
        self._decoding = len(decoding)
        self._drafts_in_flight = any(each.has_drafts_in_flight for each in decoding)
        self._stats.begin_step()
        if self._policy.refills and decoding:
            self._stats.choose_mode(len(decoding))
        # Here and not when the batch is due: the stages compute meanwhile.
        self._target = None
        if self._policy.row_cost is None:
            self._target = self._stats.choose_trial(target_batch(self._state(0.0)))

    def next_expansion(self, elapsed_ms: float) -> ProposalBatch | None:
        """The next draft round of a step that has lasted so long; None: the policy wants none, or
        there is no time for it."""
        state = self._state(elapsed_ms)
        rounds = 1 if self._stats.one_round else self.config.rounds
        if self._draft_has_no_room or not has_time_for_round(rounds, state):
            return None
        sequences = list(self.sequences.values())
        if self._policy.refills and not self._stats.overlap:
            # The draft reads prompts while the stages do, and waits for the verdict otherwise.
            sequences = [each for each in sequences if not each.decoding]
        work, _ = self._expansion(sequences, state)
        return work

    def add_proposals(
        self, work: ProposalBatch, candidates: collections.abc.Sequence[Proposal | None], ms: float
    ) -> None:
        """Add the proposals of a draft round that took `ms` to the trees.

        There is one for each part. None: the proposer is still reading that prompt.
        """
        self._draft_has_no_room = all(
            each is not None and not len(each.parents) for each in candidates
        )
        self._draft_reads_prompts = any(each is None for each in candidates)
        drafted = any(each is not None and len(each.parents) for each in candidates)
        self.totals.rounds += 1
        nodes = sum(len(part.nodes) for part in work.parts)
        self._stats.add_round(ms, nodes, measured=drafted)
        for part, answer in zip(work.parts, candidates, strict=True):
            part.sequence.counts["rounds"] += 1
            if answer is not None:
                self._stats.add_proposal(answer.logps)
                tree = part.sequence.tree
                if part.allowed is not None:
                    answer = masked_proposal(answer, part.nodes, part.allowed)
                paths = answer.paths if part.max_path_tokens else None
                tree.add_children(answer.parents, answer.tokens, answer.logps, part.limit, paths)
                tree.trim(self._policy.max_nodes)

    def refine(self) -> None:
        """Add the scores that have arrived to the trees, and request scores of further nodes."""
        if self._scorer is not None:
            self.take_scores()
            self._scorer.request_scores(self.sequences.values(), self._policy)

    def take_scores(self) -> None:
        """Add the scores that have arrived to the trees, in place of the draft's own."""

        def is_open(sequence: Sequence) -> bool:
            return self.sequences.get(sequence.number) is sequence

        if self._scorer is None:
            return
        scored = self._scorer.take_scores(is_open, self._policy.max_nodes)
        if scored is not None:
            self.totals.mid_passes += 1
            self.totals.scored += scored

    def apply(self, verdict: Verdict, now: int) -> SequenceUpdate | None:
        """Move the root along a verdict's tokens, up to the one that ends the request.

        `now` is a moment of the caller's clock. None: the request has ended meanwhile.
        """
        sequence = self.sequences.get(verdict.sequence)
        if sequence is None:
            return None
        assert verdict.base == len(sequence.context.tokens), "a verdict is missing"
        reason = verdict.failed
        count = 0
        for token in verdict.tokens:
            count += 1
            if self._scorer is not None:
                self._scorer.token_decided(sequence.tree, token)
            over = sequence.accept(token, now)
            self.totals.add_decided(sequence.tree.root_fed_depth)
            if over:
                reason = over
                break
        self._decided += count
        self._draft_has_no_room = False  # the draft may have room again
        if not sequence.tree.fed[ROOT]:
            sequence.root_waits_since = self.step
        accepted = replace(
            verdict, tokens=verdict.tokens[:count], logprobs=verdict.logprobs[:count]
        )
        if reason:
            self.admission.finish(sequence)
        return SequenceUpdate(sequence, accepted, reason)

    def end_verdicts(self, drafted_ms: float, wait_ms: float) -> None:
        """All verdicts of this step were applied; the wait for them began when the step had lasted
        `drafted_ms` and took `wait_ms`."""
        if self._decoding:
            self._stats.add_verdict(drafted_ms, wait_ms, self._decided)
        for sequence in self.sequences.values():
            sequence.counts["steps"] += 1

    def has_work(self, elapsed_ms: float) -> bool:
        """Whether a batch of this step would have rows or changes."""
        if self.admission.has_unsent_departures:
            return True
        if any(each.prompt_left or not each.tree.fed[ROOT] for each in self.sequences.values()):
            return True
        return self._plan(self._state(elapsed_ms)).has_nodes

    def next_batch(self, elapsed_ms: float) -> Batch | ProposalBatch:
        """The batch of this step, or a draft round before it, without which there are no rows to
        feed or which is worth the delay; call again after that round.
        """
        batch = self._next_rows(elapsed_ms)
        if isinstance(batch, ProposalBatch):
            return batch
        self.admission.attach_changes(batch)
        if len(batch) or batch.finished or batch.preempted:
            self._busy_until = self.step + self.config.num_steps
        self._stats.add_batch(len(batch), int(np.count_nonzero(batch.rows[:, KIND] != DRAFT)))
        self.step += 1
        return batch

    def end_step(self, ms: float) -> None:
        """The step lasted `ms`."""
        if self._decoding and self.sequences:
            speculating = self._drafts_in_flight or self._stats.rounds > 0
            self._stats.add_step(
                ms, self._decided, speculating=speculating, requests=self._decoding
            )

    # --- choices ------------------------------------------------------------------------------

    def learn(self, learnt: LearntSteps) -> None:
        """Measure whole steps from now on, which `learnt` knows from earlier runs."""
        self.learnt = learnt
        self._stats = self._new_stats()
        self._stats.set_stage_times(self._measured)

    def update_stage_times(self, measured: BatchTimes) -> None:
        """Take over what the stages have measured of how long batches take."""
        self._measured = measured
        self._stats.set_stage_times(measured)

    def _state(self, elapsed_ms: float) -> PipelineState:
        """The policy's view of the pipeline at this moment of the step."""
        return self._stats.state(
            self.step,
            end=self.config.context_limit,
            elapsed_ms=elapsed_ms,
            requests=max(self._decoding, 1),
            target=self._target,
        )

    def _budget(self, num_requests: int) -> int:
        return self.config.row_budget(self._policy, num_requests)

    def _plan(self, state: PipelineState) -> RowPlan:
        return self._planner.plan(self._policy, self._stats, state, decoding=self._decoding > 0)

    def _expansion(
        self, sequences: Iterable[Sequence], state: PipelineState
    ) -> tuple[ProposalBatch | None, bool]:
        """The draft round that the policy wants; see `next_proposal_batch`."""

        def select(sequence: Sequence) -> Expansion:
            return self._policy.select_to_expand(sequence.tree, sequence.policy_state(state))

        return next_proposal_batch(sequences, self._policy, select, self._budget)

    def _next_rows(self, elapsed_ms: float) -> Batch | ProposalBatch:
        state = self._state(elapsed_ms)
        plan = self._plan(state)
        if not (self._draft_has_no_room or self._draft_reads_prompts):
            sizes = [len(sequence.tree) for sequence, _ in plan.nodes]
            refill = next_refill(plan, self._policy, state, self.config.rounds, self._budget)
            if refill is not None:
                return refill
            if sizes != [len(sequence.tree) for sequence, _ in plan.nodes]:
                plan = self._plan(state)  # grammars have determined tokens
        if not plan.prompts and not plan.has_nodes:
            stuck = [each for each, _ in plan.nodes if not each.tree.fed[ROOT]]
            work, urgent = self._expansion(stuck, state)
            if work is not None and urgent:
                if not self._draft_has_no_room:
                    return work
                count = min(self.admission.free_slots, self._budget(len(stuck)))
                roots = [(each, np.array([ROOT])) for each in stuck[:count]]
                plan = replace(plan, nodes=roots)
        if plan.nodes and self._policy.row_cost is None:
            self._stats.add_candidates(plan.selection)
        return Batch(self.step, self._take_rows(plan))

    def _take_rows(self, plan: RowPlan) -> np.ndarray:
        """The rows of a plan, which count as fed from now on."""
        found = [Batch(self.step).rows]
        for sequence, end in plan.prompts:
            rows = sequence.context.rows(sequence.prefilled, end)
            self.admission.cache.read(sequence.number, end)
            sequence.prefilled = end
            sequence.counts["rows"] += len(rows)
            found.append(rows)
        prompt_rows = sum(map(len, found))
        cums = [np.empty(0)]
        roots: list[int] = []  # the position of the root above each row that follows
        for sequence, nodes in plan.nodes:
            if len(nodes):
                tree = sequence.tree
                found.append(tree.rows(sequence.number, nodes))
                roots += [int(tree.position[ROOT])] * len(nodes)
                cums.append(tree.cum[nodes])
                tree.mark_fed(nodes)
                if not self._policy.keeps_unfed:
                    tree.drop_unfed()
                sequence.counts["rows"] += len(nodes)
        rows = np.concatenate(found)
        depths = rows[prompt_rows:, POSITION] - np.array(roots, np.int64)
        probabilities = np.exp(np.concatenate(cums))
        self.totals.add_step(len(rows), prompt_rows, depths, probabilities, self._decided)
        return rows
