"""Known texts decoded with the head's own scheduler and a real source; the stages only count.

A text costs its draft rounds alone, so hundreds can be tried in minutes. Tokens per step are those
of a cluster in lockstep with that many stages and the same settings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pipespec.core import NODE, SEQUENCE, Batch, Request, Sampling, Verdict
from pipespec.head.feed.policy import FeedPolicy
from pipespec.head.scheduler import Scheduler
from pipespec.head.sequence import Sequence as Open
from pipespec.head.source.protocol import TokenSource
from pipespec.head.tree import ROOT
from pipespec.head.work import DraftWork, SchedulerConfig

GREEDY = Sampling()
# Prompts enter whole.
PREFILL = 1 << 16


@dataclass
class Replayed:
    """What happened between the first decided token and the last, of all texts.

    `stated` and `came` are of every guess that was fed: how likely it was said to lie on the
    accepted path, and whether it did. `by_text` has the tokens and steps of each text.
    """

    steps: int = 0
    tokens: int = 0
    rows: int = 0
    stated: list[float] = field(default_factory=list)
    came: list[bool] = field(default_factory=list)
    by_text: list[tuple[int, int]] = field(default_factory=list)

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps


class Replay:
    """One source, through one text after another."""

    def __init__(
        self,
        policy: FeedPolicy,
        source: TokenSource,
        *,
        stages: int,
        rounds: int,
        expanding: Callable[[Callable[[], list]], list] = lambda expand: expand(),
    ):
        """`expanding` calls a draft round, and may measure it."""
        self.policy, self.source = policy, source
        self.stages, self.rounds = stages, rounds
        self.expanding = expanding
        self.result = Replayed()
        self._fed: dict[int, int] = {}  # the step of each node
        self._place: dict[int, int] = {}  # of each guess, among those that were fed

    def decode(self, prompt: Sequence[int], answer: Sequence[int], how: Sampling = GREEDY) -> None:
        """One request whose answer is known."""
        text = [*prompt, *answer]
        config = SchedulerConfig(
            self.policy,
            num_steps=self.stages,
            rounds=self.rounds,
            prefill_chunk=PREFILL,
            context_limit=len(text) + 1,
        )
        scheduler = Scheduler(config)
        self._fed.clear()
        self._place.clear()
        scheduler.add(Request(1, tuple(prompt), len(answer), sampling=how), lambda _: False, 0)
        (sequence,) = scheduler.admit()
        self.source.begin(sequence.context)
        known = len(prompt)
        before = self.result.tokens, self.result.steps
        while scheduler.sequences:
            scheduler.begin()
            while work := scheduler.expansion(0.0):
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
                self.source.accept(verdict)
            scheduler.heard(0.0, 0.0)
            if not scheduler.sequences:
                break
            while isinstance(todo := scheduler.next_batch(0.0), DraftWork):
                self._draft(scheduler, todo)
            self._enter(sequence, todo)
            scheduler.end(0.0)
            if len(sequence.context.tokens) > known:
                self.result.steps += 1
                self.result.rows += len(todo)
        self.result.tokens += len(sequence.context.tokens) - known - 1
        self.source.end(sequence.number)
        after = self.result.tokens, self.result.steps
        self.result.by_text.append((after[0] - before[0], after[1] - before[1]))

    def _draft(self, scheduler: Scheduler, work: DraftWork) -> None:
        found = self.expanding(lambda: self.source.expand(work.asked, work.children))
        scheduler.graft(work, found, 0.0)

    def _enter(self, sequence: Open, batch: Batch) -> None:
        """Remember when rows were fed, and what was said of them."""
        tree = sequence.tree
        chance = dict(zip(tree.id.tolist(), np.exp(tree.cum).tolist(), strict=True))
        root = int(tree.id[ROOT])
        for node in batch.rows[batch.rows[:, SEQUENCE] == sequence.number, NODE].tolist():
            self._fed[node] = batch.step
            if node in chance and node != root:
                self.result.stated.append(chance[node])
                self.result.came.append(False)
                self._place[node] = len(self.result.came) - 1

    def _observe(self, sequence: Open, text: Sequence[int]) -> None:
        """A token is about to be decided: its node came true if it was fed."""
        tree = sequence.tree
        child = tree.child(ROOT, text[len(sequence.context.tokens)])
        if child is not None and tree.fed[child]:
            self.result.came[self._place.pop(int(tree.id[child]))] = True

    def _verdict(self, scheduler: Scheduler, sequence: Open, text: Sequence[int]) -> Verdict | None:
        """The last stage keeps drawing while the newest token is in the batch it has computed."""
        if sequence.prompt_left:
            return None
        tree, base = sequence.tree, len(sequence.context.tokens)
        leaving = scheduler.step - self.stages
        tokens: list[int] = []
        node: int | None = ROOT
        while node is not None and base + len(tokens) < len(text):
            entered = self._fed.get(int(tree.id[node]))
            if entered != leaving:
                break
            tokens.append(text[base + len(tokens)])
            node = tree.child(node, tokens[-1])
        return Verdict(sequence.number, base, tuple(tokens)) if tokens else None
