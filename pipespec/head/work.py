"""What a scheduler decides by, and what it says: draft rounds, progress, totals."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from pipespec.core import STEP_TOKENS, Verdict
from pipespec.head.feed.policy import FeedPolicy
from pipespec.head.sequence import Sequence
from pipespec.head.source.protocol import Asked


@dataclass(frozen=True)
class SchedulerConfig:
    """What a scheduler decides by.

    Attributes:
        policy: which nodes are expanded and which may be fed.
        ways: policies that requests may name instead (`Request.feed`).
        num_steps: steps that a batch takes from the head through the last stage.
        rounds: draft rounds per step at most, or "auto".
        prefill_chunk: rows of prompts that one batch carries.
        context_limit: tokens of the longest sequence.
        max_num_seqs: requests that are open at once.
        max_rows: rows of one batch, and nodes that one draft round expands, of all requests.
            0: as many as one request needs.
        num_slots: tokens and guesses of all requests that every stage can hold.
        mid_rows: nodes that one pass of the mid-size model scores; 0: there is no such model.
        max_retained: requests that have left whose text may stay in KV, for others that begin
            alike; 0: no request shares anything.
    """

    policy: FeedPolicy
    num_steps: int
    rounds: int | str
    prefill_chunk: int
    context_limit: int
    max_num_seqs: int = 1
    max_rows: int = 0
    num_slots: int = 2**62
    mid_rows: int = 0
    max_retained: int = 0
    ways: Mapping[str, FeedPolicy] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """`max_rows`, resolved."""
        return self.max_rows or max(self.prefill_chunk, *(each.max_rows for each in self.policies))

    @property
    def policies(self) -> tuple[FeedPolicy, ...]:
        """All that requests may be decoded by."""
        return self.policy, *self.ways.values()

    def policy_of(self, feed: str) -> FeedPolicy:
        """The one that a request names (`Request.feed`)."""
        return self.ways[feed] if feed else self.policy


@dataclass(frozen=True, slots=True)
class DraftPart:
    """What a draft round does for one sequence: the best `limit` children of its `nodes` are kept
    (None: all), of those `allowed`, with so many guesses `deeper` down (`Asked`)."""

    sequence: Sequence
    nodes: np.ndarray
    limit: int | None
    allowed: np.ndarray | None = None
    deeper: int = 0

    @property
    def asked(self) -> Asked:
        sequence = self.sequence
        return Asked(sequence.context, sequence.tree, self.nodes, self.allowed, self.deeper)


@dataclass(frozen=True, slots=True)
class DraftWork:
    """One draft round: the source proposes `children` children for the nodes of each part."""

    parts: tuple[DraftPart, ...]
    children: int

    @property
    def asked(self) -> list[Asked]:
        return [part.asked for part in self.parts]


# The depth up to which guesses are counted by theirs; deeper ones count as of this one.
DEEPEST = 64


@dataclass(slots=True)
class Totals:
    """What was done since the scheduler began.

    A guess has the depth that it had below the last decided token when it was fed.

    Attributes:
        steps: that fed any row.
        rounds: of the draft.
        mid_passes, scored: passes of the mid-size model, and nodes that it said what follows.
        prompt_rows: rows of prompts that were fed.
        fed: rows of trees that were fed, by depth, `[1 + DEEPEST]`; of depth 0 are roots, which
            were decided before they were fed.
        expected: how many of them were to come true as their sources stated, likewise.
        hits: tokens that were decided, by the depth that they were fed at before,
            `[1 + DEEPEST]`; of depth 0 are those that were not fed.
        step_tokens: steps, by how many tokens of prompts they fed and of answers they decided
            together (`STEP_TOKENS`); those that did neither and fed nothing are left out.
    """

    steps: int = 0
    rounds: int = 0
    mid_passes: int = 0
    scored: int = 0
    prompt_rows: int = 0
    fed: np.ndarray = field(default_factory=lambda: np.zeros(1 + DEEPEST, np.int64))
    expected: np.ndarray = field(default_factory=lambda: np.zeros(1 + DEEPEST))
    hits: list[int] = field(default_factory=lambda: [0] * (1 + DEEPEST))
    step_tokens: list[int] = field(default_factory=lambda: [0] * len(STEP_TOKENS))

    def decided(self, depth: int) -> None:
        """A token was decided that had been fed at this depth."""
        self.hits[min(depth, DEEPEST)] += 1

    def step(
        self, rows: int, of_prompts: int, depths: np.ndarray, chances: np.ndarray, decided: int
    ) -> None:
        """A step fed so many rows, those of trees at these depths and with these chances to lie on
        the accepted path, `[rows]`, and had decided so many tokens."""
        if rows:
            self.steps += 1
            self.prompt_rows += of_prompts
            depths = np.minimum(depths, DEEPEST)
            self.fed += np.bincount(depths, minlength=1 + DEEPEST)
            self.expected += np.bincount(depths, chances, 1 + DEEPEST)
        if rows or decided:
            self.step_tokens[bisect_left(STEP_TOKENS, of_prompts + decided)] += 1

    def counts(self) -> dict[str, int]:
        """Whole numbers by name, or by "name/label"; labelled ones that are 0 are left out."""
        fed = self.fed.tolist()
        labelled = {
            **{f"fed/{depth}": count for depth, count in enumerate(fed)},
            "mid_passes": self.mid_passes,
            "scored": self.scored,
            **{f"expected/{depth}": int(count) for depth, count in enumerate(self.expected)},
            **{f"hits/{depth}": count for depth, count in enumerate(self.hits)},
            **{
                f"step_tokens/{most:g}": count
                for most, count in zip(STEP_TOKENS, self.step_tokens, strict=True)
            },
        }
        return {
            "steps": self.steps,
            "tokens": sum(self.hits),
            "rounds": self.rounds,
            "root_rows": fed[0],
            "prompt_rows": self.prompt_rows,
            "guess_rows": sum(fed[1:]),
            "guess_hits": sum(self.hits[1:]),
            "guess_hits_expected": int(self.expected[1:].sum()),
            **{name: count for name, count in labelled.items() if count},
        }


@dataclass(frozen=True, slots=True)
class Progress:
    """What a verdict brought to a request.

    `accepted` is the verdict without the tokens beyond the end of the text; `reason` says why
    the request is over, None: it is not.
    """

    sequence: Sequence
    accepted: Verdict
    reason: str | None
