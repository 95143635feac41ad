"""The scheduler: decides which rows enter the pipeline next, and applies verdicts to the trees.

The scheduler holds no clock, socket, file or thread: it gets events and returns decisions.
`pipespec.head.step.run_step` is the order of its calls in a step; requests are added and cancelled
at any moment. Two things drive it: the loop of rank 0 with a running cluster, and the simulation of
`pipespec plan` with an imagined one.

A batch mixes the rows of all requests: unfed roots, chunks of prompts, draft tokens
(`pipespec.head.row_plan`). `pipespec.head.admission` decides which requests run.
"""

from __future__ import annotations

import collections.abc
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from pipespec.core import DRAFT, KIND, POSITION, Batch, Verdict
from pipespec.head.admission import Admission
from pipespec.head.decoding_modes import ONE_BESIDE, LearntSteps
from pipespec.head.expansion import Select, add_determined, plan_expansion
from pipespec.head.policies.policy import (
    AUTO,
    Expansion,
    PipelineState,
    TargetBatch,
    has_time_for_round,
)
from pipespec.head.proposer import Proposal
from pipespec.head.refill import worthwhile_refill
from pipespec.head.row_budget import target_batch
from pipespec.head.row_plan import RowPlan, plan_rows
from pipespec.head.scheduler_types import (
    DEEPEST,
    ProposalBatch,
    SchedulerConfig,
    SequenceUpdate,
    Totals,
)
from pipespec.head.sequence import Sequence
from pipespec.head.step_stats import StepStats
from pipespec.head.structured_output import masked_proposal
from pipespec.head.tree import ROOT
from pipespec.timing.batch_times import NO_TIMES, BatchTimes

if TYPE_CHECKING:
    from pipespec.head.proposers.cascade import CascadeProposer


class Scheduler:
    """The decisions of the head for all requests, which `admission` holds."""

    def __init__(self, config: SchedulerConfig, scorer: CascadeProposer | None = None):
        self.admission = Admission(config)
        self.config = config
        self.step = 0  # of the next batch
        self.totals = Totals()
        self._policy = config.policy
        self.learnt: LearntSteps | None = None
        self._measured = NO_TIMES  # by the stages
        self.stats = self._new_stats()
        self._scorer = scorer
        self._target: TargetBatch | None = None  # the size of batches in this step
        self._decoding = 0  # requests that had a first token when this step began
        self._drafts_in_flight = False  # whether draft tokens of these were in the pipeline
        self._decided = 0  # tokens, in this step
        self._draft_has_no_room = False  # for any node of its last round
        self._draft_reads_prompts = False  # in its last round of this step
        self._busy_until = 0  # the step in which the last batch with rows leaves the pipeline

    @property
    def draining(self) -> bool:
        """Whether batches are on their way, so that the pipeline must keep stepping."""
        return self.admission.has_unsent_departures or self.step <= self._busy_until

    def gauges(self) -> dict[str, int]:
        """Numbers of requests, KV slots in all, held by requests, and held by retained prefixes
        alone, and the rows that a step may carry beside prompts."""
        admission = self.admission
        running = len(admission.sequences)
        return {
            "running": running,
            "waiting": len(admission.waiting),
            "kv_slots": self.config.num_slots,
            "kv_slots_held": self.config.num_slots - admission.free_slots,
            "kv_slots_retained": admission.cache.held - admission.cache.pinned,
            "row_budget": self._budget(max(running, 1)),
        }

    def counts(self) -> dict[str, int]:
        """Counters since the start (`Totals.counts`); none of them ever falls."""
        cache = self.admission.cache
        cached = {"cache_queries": cache.queries, "cache_hits": cache.hits}
        return {"preemptions": self.admission.preemptions, **cached, **self.totals.counts()}

    def _new_stats(self) -> StepStats:
        config, most = self.config, self._budget(self.config.max_num_seqs)
        rounds = 1 if config.rounds == AUTO else int(config.rounds)  # that every step has
        overlap = config.overlap is not False
        stats = StepStats(config.num_steps, rounds, most, overlap=overlap, learnt=self.learnt)
        stats.set_stage_times(self._measured)
        return stats

    def admit(self) -> Iterator[Sequence]:
        """Start waiting requests; the proposer must know each of them before it proposes."""
        for sequence in self.admission.admit():
            policy = self.config.policy_of(sequence.request.policy)
            if policy is not self._policy:  # no request of another one is running
                self._policy = policy
                self.stats = self._new_stats()  # measurements of another policy do not apply
            yield sequence

    def begin_step(self) -> None:
        self._decided = 0
        self._draft_has_no_room = self._draft_reads_prompts = False
        decoding = [each for each in self.admission.sequences.values() if each.decoding]
        self._decoding = len(decoding)
        self._drafts_in_flight = any(each.tree.fed[1:].any() for each in decoding)
        self.stats.begin_step()
        if self._policy.refills and decoding:
            self.stats.choose_mode(len(decoding))
        # Here and not when the batch is due: the stages compute meanwhile.
        self._target = None
        if self._policy.row_cost is None:
            self._target = self.stats.choose_trial(target_batch(self._state(0.0)))

    def next_expansion(self, elapsed_ms: float) -> ProposalBatch | None:
        """The next draft round of a step that has lasted so long; None: the policy wants none, or
        there is no time for it."""
        state = self._state(elapsed_ms)
        rounds = 1 if self.stats.mode == ONE_BESIDE else self.config.rounds
        if self._draft_has_no_room or not has_time_for_round(rounds, state):
            return None
        sequences = list(self.admission.sequences.values())
        if self._policy.refills and not self.stats.overlap:
            # The draft reads prompts while the stages do, and waits for the verdict otherwise.
            sequences = [each for each in sequences if not each.decoding]
        work, _ = self._draft_round(sequences, self._to_expand(state))
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
        self.stats.add_round(ms, nodes, measured=drafted)
        for part, answer in zip(work.parts, candidates, strict=True):
            part.sequence.counts["rounds"] += 1
            if answer is not None:
                self.stats.add_proposal(answer.logps)
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
            self._scorer.request_scores(self.admission.sequences.values(), self._policy)

    def take_scores(self) -> None:
        """Add the scores that have arrived to the trees, in place of the draft's own."""

        def is_open(sequence: Sequence) -> bool:
            return self.admission.sequences.get(sequence.number) is sequence

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
        sequence = self.admission.sequences.get(verdict.sequence)
        if sequence is None:
            return None
        assert verdict.base == len(sequence.context.tokens), "a verdict is missing"
        depths, reason = sequence.accept(verdict.tokens, now)
        reason = reason or verdict.failed
        for depth in depths:
            self.totals.hits[min(depth, DEEPEST)] += 1
        if self._scorer is not None:
            self._scorer.tokens_decided(sequence.tree, sequence.context, verdict.base)
        count = len(depths)
        self._decided += count
        self._draft_has_no_room = False  # the draft may have room again
        if not sequence.tree.fed[ROOT]:
            sequence.root_waits_since = self.step
        accepted = verdict
        if count < len(verdict.tokens):
            tokens, logprobs = verdict.tokens[:count], verdict.logprobs[:count]
            accepted = replace(verdict, tokens=tokens, logprobs=logprobs)
        if reason:
            self.admission.finish(sequence)
        return SequenceUpdate(sequence, accepted, reason)

    def end_verdicts(self, drafted_ms: float, wait_ms: float) -> None:
        """All verdicts of this step were applied; the wait for them began when the step had lasted
        `drafted_ms` and took `wait_ms`."""
        if self._decoding:
            self.stats.add_verdict(drafted_ms, wait_ms, self._decided)
        for sequence in self.admission.sequences.values():
            sequence.counts["steps"] += 1

    def has_work(self, elapsed_ms: float) -> bool:
        """Whether a batch of this step would have rows or changes."""
        if self.admission.has_unsent_departures:
            return True
        if any(
            each.prompt_left or not each.tree.fed[ROOT]
            for each in self.admission.sequences.values()
        ):
            return True
        return self._plan(self._state(elapsed_ms)).has_nodes

    def plan_batch(self, elapsed_ms: float) -> RowPlan:
        """The rows of this step, or a draft round before them (`RowPlan.refill`), without which
        there are no rows to feed or which is worth the delay; plan again after that round."""
        state = self._state(elapsed_ms)
        plan = self._plan(state)
        if not (self._draft_has_no_room or self._draft_reads_prompts):
            select = worthwhile_refill(plan, self._policy, state, self.config.rounds)
            if select is not None:
                work, _ = self._draft_round([each for each, _ in plan.nodes], select)
                if work is not None:
                    return replace(plan, refill=work)
                plan = self._plan(state)  # grammars have determined tokens
        if not plan.prompts and not plan.has_nodes:
            stuck = [each for each, _ in plan.nodes if not each.tree.fed[ROOT]]
            work, urgent = self._draft_round(stuck, self._to_expand(state))
            if work is not None and urgent:
                if not self._draft_has_no_room:
                    return replace(plan, refill=work)
                count = min(self.admission.free_slots, self._budget(len(stuck)))
                roots = [(each, np.array([ROOT])) for each in stuck[:count]]
                plan = replace(plan, nodes=roots)
        return plan

    def next_batch(self, plan: RowPlan) -> Batch:
        """The batch with the rows of a plan, which count as fed from now on."""
        if plan.nodes and self._policy.row_cost is None:
            self.stats.add_candidates(plan.selection)
        batch = Batch(self.step, self._take_rows(plan))
        self.admission.attach_changes(batch)
        if len(batch) or batch.finished or batch.preempted:
            self._busy_until = self.step + self.config.num_steps
        self.stats.add_batch(len(batch), int(np.count_nonzero(batch.rows[:, KIND] != DRAFT)))
        self.step += 1
        return batch

    def end_step(self, ms: float) -> None:
        if self._decoding and self.admission.sequences:
            speculating = self._drafts_in_flight or self.stats.rounds > 0
            self.stats.add_step(ms, self._decided, speculating=speculating, requests=self._decoding)

    def learn(self, learnt: LearntSteps) -> None:
        """Measure whole steps from now on, which `learnt` knows from earlier runs."""
        self.learnt = learnt
        self.stats = self._new_stats()

    def update_stage_times(self, measured: BatchTimes) -> None:
        self._measured = measured
        self.stats.set_stage_times(measured)

    def _state(self, elapsed_ms: float) -> PipelineState:
        return self.stats.state(
            self.step,
            end=self.config.context_limit,
            elapsed_ms=elapsed_ms,
            requests=max(self._decoding, 1),
            target=self._target,
        )

    def _budget(self, num_requests: int) -> int:
        return self.config.row_budget(self._policy, num_requests)

    def _plan(self, state: PipelineState) -> RowPlan:
        return plan_rows(
            self.config, self.admission, self._policy, self.stats, state, mixes=self._decoding > 0
        )

    def _to_expand(self, state: PipelineState) -> Select:
        def select(sequence: Sequence) -> Expansion:
            return self._policy.select_to_expand(sequence.tree, sequence.policy_state(state))

        return select

    def _draft_round(
        self, sequences: Iterable[Sequence], select: Select
    ) -> tuple[ProposalBatch | None, bool]:
        """The draft round of what `select` chooses, and whether the pipeline idles until it is
        done. Tokens that a grammar determines are added to the trees without the proposer."""
        among = list(sequences)
        while True:
            parts, urgent = plan_expansion(among, self._policy, select, self._budget)
            left = [each for part in parts if (each := add_determined(part)) is not None]
            if left or not parts:  # else the grammars determined all of these; look further
                work = ProposalBatch(tuple(left), self._policy.children) if left else None
                return work, urgent

    def _take_rows(self, plan: RowPlan) -> np.ndarray:
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
