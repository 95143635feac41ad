"""Known texts decoded with the head's own scheduler and a real proposer, without stages.

A text takes only the time of its draft rounds, so hundreds can be replayed in minutes. Tokens per
step are those of a cluster in lockstep with that many stages and the same settings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.common.run_options import DATA
from pipespec.core import NODE, SEQUENCE, Batch, Request, SamplingParams, Verdict
from pipespec.head.policies.policy import SpeculationPolicy
from pipespec.head.proposers.proposer import Proposer
from pipespec.head.scheduler import Scheduler
from pipespec.head.scheduler_types import ProposalBatch, SchedulerConfig
from pipespec.head.sequence import Sequence as TreeSequence
from pipespec.head.tree import ROOT

GREEDY = SamplingParams()
REPETITIVE_PROMPTS = DATA / "repetitive" / "repetitive.jsonl"
# Whole prompts are one chunk.
PREFILL = 1 << 16


@dataclass
class Replayed:
    """Counts from the first decided token to the last, over all texts.

    `stated` and `accepted` have an item for every scheduled draft token: its stated probability of
    being on the accepted path, and whether it was. `by_text` has the tokens and steps of each text.
    """

    steps: int = 0
    tokens: int = 0
    rows: int = 0
    stated: list[float] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)
    by_text: list[tuple[int, int]] = field(default_factory=list)

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps


class Replay:
    """One proposer, through one text after another."""

    def __init__(
        self,
        policy: SpeculationPolicy,
        proposer: Proposer,
        *,
        stages: int,
        rounds: int,
        around_round: Callable[[Callable[[], list]], list] = lambda expand: expand(),
    ):
        """`around_round` calls a draft round, and may time it."""
        self.policy, self.proposer = policy, proposer
        self.stages, self.rounds = stages, rounds
        self.around_round = around_round
        self.result = Replayed()
        self._steps: dict[int, int] = {}  # the step in which each node was scheduled
        self._indices: dict[int, int] = {}  # of scheduled draft tokens, in the result

    def decode(
        self, prompt: Sequence[int], answer: Sequence[int], sampling: SamplingParams = GREEDY
    ) -> None:
        """Replay one request whose answer is known."""
        text = [*prompt, *answer]
        config = SchedulerConfig(
            self.policy,
            num_steps=self.stages,
            rounds=self.rounds,
            prefill_chunk=PREFILL,
            context_limit=len(text) + 1,
        )
        scheduler = Scheduler(config)
        self._steps.clear()
        self._indices.clear()
        scheduler.add(Request(1, tuple(prompt), len(answer), sampling=sampling), lambda _: False, 0)
        (sequence,) = scheduler.admit()
        self.proposer.start_sequence(sequence.context)
        prompt_len = len(prompt)
        before = self.result.tokens, self.result.steps
        while scheduler.sequences:
            scheduler.begin_step()
            while work := scheduler.next_expansion(0.0):
                self._draft(scheduler, work)
            verdict = self._verdict(scheduler, sequence, text)
            if verdict is not None:
                for _ in verdict.tokens:
                    self._observe(sequence, text)
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
            if not scheduler.sequences:
                break
            while isinstance(todo := scheduler.next_batch(0.0), ProposalBatch):
                self._draft(scheduler, todo)
            self._enter(sequence, todo)
            scheduler.end_step(0.0)
            if len(sequence.context.tokens) > prompt_len:
                self.result.steps += 1
                self.result.rows += len(todo)
        self.result.tokens += len(sequence.context.tokens) - prompt_len - 1
        self.proposer.end_sequence(sequence.number)
        after = self.result.tokens, self.result.steps
        self.result.by_text.append((after[0] - before[0], after[1] - before[1]))

    def _draft(self, scheduler: Scheduler, work: ProposalBatch) -> None:
        found = self.around_round(lambda: self.proposer.propose(work.requests, work.children))
        scheduler.add_proposals(work, found, 0.0)

    def _enter(self, sequence: TreeSequence, batch: Batch) -> None:
        """Record the step and the stated probability of the rows."""
        tree = sequence.tree
        chance = dict(zip(tree.id.tolist(), np.exp(tree.cum).tolist(), strict=True))
        root = int(tree.id[ROOT])
        for node in batch.rows[batch.rows[:, SEQUENCE] == sequence.number, NODE].tolist():
            self._steps[node] = batch.step
            if node in chance and node != root:
                self.result.stated.append(chance[node])
                self.result.accepted.append(False)
                self._indices[node] = len(self.result.accepted) - 1

    def _observe(self, sequence: TreeSequence, text: Sequence[int]) -> None:
        """Record that the next token was a scheduled draft token, if it was."""
        tree = sequence.tree
        child = tree.child(ROOT, text[len(sequence.context.tokens)])
        if child is not None and tree.fed[child]:
            self.result.accepted[self._indices.pop(int(tree.id[child]))] = True

    def _verdict(
        self, scheduler: Scheduler, sequence: TreeSequence, text: Sequence[int]
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
        return Verdict(sequence.number, base, tuple(tokens)) if tokens else None
