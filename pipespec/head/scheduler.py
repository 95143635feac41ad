"""The scheduler: decides which rows enter the pipeline next, and applies verdicts to the trees.

The scheduler holds no clock, socket, file or thread: it gets events and returns decisions.
`pipespec.head.step.run_step` is the order of its calls in a step; requests are added and cancelled
at any moment. Two things drive it: the loop of rank 0 with a running cluster, and the simulation of
`pipespec plan` with an imagined one.

A batch mixes the rows of all requests: unfed roots, chunks of prompts, draft tokens
(`pipespec.head.row_plan`). `pipespec.head.admission` decides which requests run. Above 350 lines,
as it is one interface, of whose calls each is a few lines.
"""

from __future__ import annotations

import collections.abc
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from pipespec.core import NO_MEMORY, POSITION, Batch, Verdict
from pipespec.head.admission import ANSWER_COST, Admission
from pipespec.head.crowds import rows_for_drafts, rows_of_crowds
from pipespec.head.decoding_modes import ONE_BESIDE, LearntSteps
from pipespec.head.expansion import add_determined, plan_expansion
from pipespec.head.policies.policy import (
    AUTO,
    NO_PROBABILITIES,
    Expansion,
    PipelineState,
    TargetBatch,
    has_time_for_round,
)
from pipespec.head.proposer import Proposal
from pipespec.head.refill import worthwhile_refill
from pipespec.head.row_budget import target_batch
from pipespec.head.row_plan import Fed, RowPlan, plan_rows
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


class Scheduler:
    """The decisions of the head for all requests, which `admission` holds."""

    def __init__(self, config: SchedulerConfig):
        self.admission = Admission(config)
        self.config = config
        self.step = 0  # of the next batch
        self.totals = Totals()
        self._policy = config.policy
        self.learnt: LearntSteps | None = None
        self._measured = NO_TIMES  # by the stages
        self.stats = self._new_stats()
        self._target: TargetBatch | None = None  # the size of batches in this step
        self._answers = Counter[str]()  # that were decoded when this step began, by tenant
        self._crowds: dict[str, int] = {}  # rows of these in a batch of this step
        self._mixes = False  # whether any request had its first token when this step began
        self._decoding = 0  # such requests, without those of crowds
        self._drafts_in_flight = False  # whether draft tokens of these were in the pipeline
        self._decided = self._measured_tokens = 0  # tokens, in this step; without those of crowds
        self._draft_has_no_room = False  # for any node of its last round
        self._draft_reads_prompts = False  # in its last round of this step

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
        stats = StepStats(config.num_stages, rounds, most, overlap=overlap, learnt=self.learnt)
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
        self._decided = self._measured_tokens = 0
        self._draft_has_no_room = self._draft_reads_prompts = False
        running = self.admission.sequences.values()
        self._answers = Counter(each.request.tenant for each in running if not each.prompt_left)
        self._crowds = rows_of_crowds(self._answers, self.stats, self.config.rows)
        self._mixes = any(each.decoding for each in running)
        decoding = [each for each in running if each.decoding and not self._in_crowd(each)]
        self._decoding = len(decoding)
        self._drafts_in_flight = any(each.tree.fed[1:].any() for each in decoding)
        self.stats.begin_step()
        if self._policy.refills and decoding:
            self.stats.choose_mode(len(decoding), sum(each.unread for each in decoding))
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
        # The draft reads a prompt while the stages do, not before.
        sequences = [
            each
            for each in self.admission.sequences.values()
            if each.start_sent or each.prompt_left <= 1
        ]
        if self._policy.refills and not self.stats.overlap:  # it waits for the verdict otherwise
            sequences = [each for each in sequences if not each.decoding]
        return self._expansion(sequences, state)

    def add_determined(self, work: ProposalBatch) -> ProposalBatch:
        """Add the tokens that grammars determine below the nodes of a draft round to the trees;
        returns what is left of the round for the proposer."""
        left = (add_determined(part) for part in work.parts)
        return replace(work, parts=tuple(part for part in left if part is not None))

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
        nodes = sum(len(each.nodes) for each in work.requests)
        self.stats.add_round(ms, nodes, work.unread, measured=drafted)
        for part, answer in zip(work.parts, candidates, strict=True):
            part.sequence.counts["rounds"] += 1
            if answer is not None:
                part.sequence.drafted_text = len(part.sequence.context.tokens)
                self.stats.add_proposal(answer.logps)
                request, tree = part.request, part.sequence.tree
                if request.allowed is not None:
                    answer = masked_proposal(answer, request.nodes, request.allowed)
                paths = answer.paths if request.max_path_tokens else None
                tree.add_children(answer.parents, answer.tokens, answer.logps, part.limit, paths)
                tree.trim(self._policy.max_nodes)

    def apply(self, verdict: Verdict, now: int) -> SequenceUpdate | None:
        """Move the root along a verdict's tokens, up to the one that ends the request.

        `now` is a moment of the caller's clock. None: the request has ended meanwhile.
        """
        if verdict.failed == NO_MEMORY:
            self.admission.drop_text(verdict.sequence)
        sequence = self.admission.sequences.get(verdict.sequence)
        if sequence is None:
            return None
        assert verdict.base == len(sequence.context.tokens), "a verdict is missing"
        depths, reason = sequence.accept(verdict.tokens, now)
        reason = reason or verdict.failed
        for depth in depths:
            self.totals.hits[min(depth, DEEPEST)] += 1
        if self.config.one_batch:
            sequence.tree.drop_unfed()
        count = len(depths)
        self._decided += count
        self._measured_tokens += 0 if self._in_crowd(sequence) else count
        self.admission.served[sequence.request.tenant] += ANSWER_COST * count
        self._draft_has_no_room = False  # the draft may have room again
        if not sequence.tree.fed[ROOT]:
            sequence.root_waits_since = self.step
        accepted = verdict
        if count < len(verdict.tokens):
            tokens, logprobs = verdict.tokens[:count], verdict.logprobs[:count]
            accepted = replace(verdict, tokens=tokens, logprobs=logprobs)
        if reason:
            self.admission.finish(sequence, retain=reason != NO_MEMORY)
        return SequenceUpdate(sequence, accepted, reason)

    def end_verdicts(self, drafted_ms: float, wait_ms: float) -> None:
        """All verdicts of this step were applied; the wait for them began when the step had lasted
        `drafted_ms` and took `wait_ms`."""
        if self._decoding:
            self.stats.add_verdict(drafted_ms, wait_ms, self._measured_tokens)
        for sequence in self.admission.sequences.values():
            sequence.counts["steps"] += 1

    def has_work(self, elapsed_ms: float) -> bool:
        """Whether a batch of this step would have rows or changes."""
        if self.admission.has_unsent_departures:
            return True
        running = self.admission.sequences.values()
        if any(each.prompt_left or not each.tree.fed[ROOT] for each in running):
            return True
        return not self._plan(self._state(elapsed_ms)).is_empty

    def plan_batch(self, elapsed_ms: float) -> RowPlan:
        """The rows that this step could send now."""
        plan = self._plan(self._state(elapsed_ms))
        if self._draft_has_no_room and plan.is_empty and self._urgent_expansion(plan) is not None:
            roots = plan.unfed_roots  # without the draft tokens for which they wait
            roots = roots[: min(self.admission.free_slots, self._budget(len(roots)))]
            plan = replace(plan, nodes=[(each, np.array([ROOT])) for each in roots])
        return plan

    def next_refill(self, plan: RowPlan) -> ProposalBatch | None:
        """A draft round before the batch of `plan`, without which there are no rows to feed or
        which is worth the delay; plan again after it. None: there is none."""
        if self._draft_has_no_room:
            return None
        if not self._draft_reads_prompts:
            wanted = worthwhile_refill(plan, self._policy, self.config.rounds)
            if work := plan_expansion(wanted, self._policy, self._budget):
                return work
        # While batches of other requests are on their way the stages do not idle: the round is made
        # beside them, in the next step.
        idle = plan.is_empty and len(plan.unfed_roots) == len(plan.nodes)
        return self._urgent_expansion(plan) if idle else None

    def next_batch(self, plan: RowPlan) -> Batch:
        """The batch with the rows of a plan, which count as fed from now on."""
        fed = plan.fed
        batch = Batch(self.step, plan.rows(fed))
        self._count(plan, fed, batch)
        self._mark_fed(plan, fed)
        self.admission.attach_changes(batch)
        self.step += 1
        return batch

    def _count(self, plan: RowPlan, fed: Fed, batch: Batch) -> None:
        """Count the rows of a batch, before they count as fed."""
        trees = [(each.tree, nodes) for each, nodes in fed]
        roots = np.array([tree.position[ROOT] for tree, _ in trees], np.int64)
        num_prompt_rows = plan.num_prompt_rows
        depths = batch.rows[num_prompt_rows:, POSITION]
        depths = depths - np.repeat(roots, [len(nodes) for _, nodes in trees])
        probabilities = np.exp(
            np.concatenate([NO_PROBABILITIES, *(tree.cum[nodes] for tree, nodes in trees)])
        )
        self.totals.add_step(len(batch), num_prompt_rows, depths, probabilities, self._decided)
        if plan.nodes and self._policy.row_cost is None:
            self.stats.add_candidates(plan.selection)
        self.stats.add_answers(sum(len(nodes) for _, nodes in plan.nodes), len(plan.nodes))
        self.stats.add_batch(len(batch), num_prompt_rows)

    def _mark_fed(self, plan: RowPlan, fed: Fed) -> None:
        for sequence, end in plan.prompts:
            self.admission.cache.read(sequence.number, end)
            sequence.counts["rows"] += end - sequence.prefilled
            sequence.prefilled = end
        for sequence, nodes in fed:
            sequence.counts["rows"] += len(nodes)
            sequence.tree.mark_fed(nodes)
            if not self._policy.keeps_unfed:
                sequence.tree.drop_unfed()

    def end_step(self, ms: float) -> None:
        if self._decoding and self.admission.sequences:
            speculating = self._drafts_in_flight or self.stats.rounds > 0
            tokens = self._measured_tokens
            self.stats.add_step(ms, tokens, speculating=speculating, requests=self._decoding)

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
            most_held=self._policy.max_held(self.config.num_stages),
        )

    def _budget(self, num_requests: int) -> int:
        return self.config.row_budget(self._policy, num_requests)

    def _plan(self, state: PipelineState) -> RowPlan:
        return plan_rows(
            self.config,
            self.admission,
            self._policy,
            self.stats,
            state,
            mixes=self._mixes,
            crowds=self._crowds,
        )

    def _in_crowd(self, sequence: Sequence) -> bool:
        return sequence.request.tenant in self._crowds

    def _expansion(
        self, sequences: Iterable[Sequence], state: PipelineState
    ) -> ProposalBatch | None:
        """The draft round that the policy wants of these, in which crowds have a share."""
        select = self._policy.select_to_expand
        wanted, crowded = list[tuple[Sequence, Expansion]](), list[tuple[Sequence, Expansion]]()
        for each in sequences:
            found = crowded if self._in_crowd(each) else wanted
            found.append((each, select(each.tree, each.policy_state(state))))
        most = rows_for_drafts(self._crowds, self._answers, self._policy, state.num_stages)
        return plan_expansion(wanted, self._policy, self._budget, crowded, most)

    def _urgent_expansion(self, plan: RowPlan) -> ProposalBatch | None:
        """The draft round for which the roots that are not in the plan wait."""
        work = self._expansion(plan.unfed_roots, plan.state)
        return work if work is not None and work.urgent else None
