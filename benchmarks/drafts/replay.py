"""Known texts decoded with the head's own scheduler and a real proposer, without stages.

A text takes only the time of its draft rounds, so hundreds can be replayed in minutes. Tokens per
step are those of a cluster in lockstep with that many stages and the same settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.common.run_options import DATA
from pipespec.cluster.deployment.deployment import Deployment
from pipespec.cluster.ranks import rank_components
from pipespec.core import NODE, SEQUENCE, Batch, Request, SamplingParams, Verdict
from pipespec.engine.slice.runner import SliceRunner
from pipespec.head.policies.policy import SpeculationPolicy
from pipespec.head.proposer import Proposer
from pipespec.head.scheduler import Scheduler
from pipespec.head.scheduler_types import ProposalBatch, SchedulerConfig
from pipespec.head.sequence import Sequence as TreeSequence
from pipespec.head.tree import ROOT

GREEDY = SamplingParams()
REPETITIVE_PROMPTS = DATA / "repetitive" / "repetitive.jsonl"
# Whole prompts are one chunk.
PREFILL = 1 << 16


def proposer_of(deployment: Deployment) -> Proposer:
    """The proposer of a deployment's head, with its draft loaded."""
    model = rank_components.load_model(deployment, 0)
    runner = None if model is None else SliceRunner(model, model.num_slots)
    return rank_components.make_proposer(deployment, runner, None)


@dataclass
class Replayed:
    """Counts from the first decided token to the last, over all texts; `hits` are tokens that had
    been scheduled before they were decided, `by_text` has the tokens and steps of each."""

    steps: int = 0
    tokens: int = 0
    rows: int = 0
    hits: int = 0
    by_text: list[tuple[int, int]] = field(default_factory=list)

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps


class Replay:
    """One proposer, through one text after another."""

    def __init__(
        self, policy: SpeculationPolicy, proposer: Proposer, *, stages: int, rounds: int
    ) -> None:
        self.policy, self.proposer = policy, proposer
        self.stages, self.rounds = stages, rounds
        self.result = Replayed()
        self._steps: dict[int, int] = {}  # the step in which each node was scheduled

    def decode(
        self, prompt: Sequence[int], answer: Sequence[int], sampling: SamplingParams = GREEDY
    ) -> None:
        """Replay one request whose answer is known."""
        text = [*prompt, *answer]
        config = SchedulerConfig(
            self.policy,
            num_stages=self.stages,
            rounds=self.rounds,
            prefill_chunk=PREFILL,
            context_limit=len(text) + 1,
        )
        scheduler = Scheduler(config)
        self._steps.clear()
        scheduler.admission.add(
            Request(1, tuple(prompt), len(answer), sampling=sampling), lambda _: False, 0
        )
        (sequence,) = scheduler.admit()
        self.proposer.start_sequence(sequence.context)
        prompt_len = len(prompt)
        before = self.result.tokens, self.result.steps
        while scheduler.admission.sequences:
            scheduler.begin_step()
            while work := scheduler.next_expansion(0.0):
                self._draft(scheduler, work)
            verdict = self._verdict(scheduler, sequence, text, prompt_len)
            if verdict is not None:
                for _ in verdict.tokens:
                    scheduler.apply(
                        Verdict(
                            sequence.number,
                            len(sequence.context.tokens),
                            (text[len(sequence.context.tokens)],),
                        ),
                        0,
                    )
                self.proposer.accept_verdict(verdict)
            scheduler.end_verdicts(0.0, 0.0)
            if not scheduler.admission.sequences:
                break
            while work := scheduler.next_refill(plan := scheduler.plan_batch(0.0)):
                self._draft(scheduler, work)
            batch = scheduler.next_batch(plan)
            self._enter(sequence, batch)
            scheduler.end_step(0.0)
            if len(sequence.context.tokens) > prompt_len:
                self.result.steps += 1
                self.result.rows += len(batch)
        self.result.tokens += len(sequence.context.tokens) - prompt_len - 1
        self.proposer.end_sequence(sequence.number)
        after = self.result.tokens, self.result.steps
        self.result.by_text.append((after[0] - before[0], after[1] - before[1]))

    def _draft(self, scheduler: Scheduler, work: ProposalBatch) -> None:
        found = self.proposer.propose(work.requests, work.children)
        scheduler.add_proposals(work, found, 0.0)

    def _enter(self, sequence: TreeSequence, batch: Batch) -> None:
        """Record the step of the rows."""
        for node in batch.rows[batch.rows[:, SEQUENCE] == sequence.number, NODE].tolist():
            self._steps[node] = batch.step

    def _verdict(
        self, scheduler: Scheduler, sequence: TreeSequence, text: Sequence[int], prompt_len: int
    ) -> Verdict | None:
        """The tokens that the last stage decides: as long as their nodes are in its batch."""
        if sequence.prompt_left:
            return None
        tree, base = sequence.tree, len(sequence.context.tokens)
        leaving = scheduler.step - self.stages
        tokens: list[int] = []
        node: int | None = ROOT
        while node is not None and base + len(tokens) < len(text):
            entered = self._steps.get(int(tree.id[node]))
            if entered != leaving:
                break
            tokens.append(text[base + len(tokens)])
            node = tree.child(node, tokens[-1])
            if base + len(tokens) > prompt_len + 1:  # the first token is not counted
                self.result.hits += node is not None and int(tree.id[node]) in self._steps
        return Verdict(sequence.number, base, tuple(tokens)) if tokens else None
