"""The scheduler's settings, draft rounds, progress and totals."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from pipespec.core import STEP_TOKENS, Verdict
from pipespec.head.kept_states import KeptStates
from pipespec.head.policies.policy import SpeculationPolicy
from pipespec.head.proposer import ProposalRequest
from pipespec.head.sequence import Sequence
from pipespec.head.structured_output import LookAhead


@dataclass(frozen=True)
class SchedulerConfig:
    """Settings of a scheduler.

    Attributes:
        policy: which nodes are expanded and which may be fed.
        num_stages: those of the pipeline.
        rounds: draft rounds per step at most, or "auto".
        prefill_chunk: rows of prompts that one batch carries.
        context_limit: tokens of the longest sequence.
        max_num_seqs: requests that run at once.
        max_rows: rows of one batch, and nodes that one draft round expands, of all requests.
            0: as many as one request needs.
        num_slots: KV slots of every stage, for the tokens and draft tokens of all requests.
        max_retained: sequences that have left whose prefixes may stay in the KV cache for others;
            0: requests share nothing.
        kept_states: running states that the stages keep of texts; None: layers have none, and
            requests share any prefix.
        state_interval: tokens of a prompt behind which one is kept, or 0.
        overlap: whether the draft works while the stages compute; else, where the policy can do
            without, only while they do not. None: as measured (`LearntSteps`).
        one_batch: one batch at a time is in the pipeline, which then counts as one stage, and trees
            are drafted anew after each verdict: a draft head reads what the target has computed.
        request_policies: policies that requests may name instead (`Request.policy`).
    """

    policy: SpeculationPolicy
    num_stages: int
    rounds: int | str
    prefill_chunk: int
    context_limit: int
    max_num_seqs: int = 1
    max_rows: int = 0
    num_slots: int = 2**62
    max_retained: int = 0
    kept_states: int | None = None
    state_interval: int = 0
    overlap: bool | None = True
    one_batch: bool = False
    request_policies: Mapping[str, SpeculationPolicy] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """`max_rows`, resolved."""
        return self.max_rows or max(self.prefill_chunk, *(each.max_rows for each in self.policies))

    def make_states(self) -> KeptStates | None:
        """The states that the stages keep, none yet; None: layers have none."""
        if self.kept_states is None:
            return None
        return KeptStates(self.kept_states if self.max_retained else 0, self.state_interval)

    @property
    def policies(self) -> tuple[SpeculationPolicy, ...]:
        """The default and those that requests may name."""
        return self.policy, *self.request_policies.values()

    def row_budget(self, policy: SpeculationPolicy, num_requests: int) -> int:
        """Rows that so many requests may feed in a step beside prompts."""
        return min(policy.max_rows * (1 if policy.shared else num_requests), self.rows)

    def policy_of(self, name: str) -> SpeculationPolicy:
        return self.request_policies[name] if name else self.policy


@dataclass(frozen=True, slots=True)
class ProposalPart:
    """A draft round's part for one sequence, of whose candidates the best `limit` are kept (None:
    all). `ahead` is what a grammar determines below the requested nodes."""

    sequence: Sequence
    request: ProposalRequest
    limit: int | None
    ahead: tuple[LookAhead, ...] = ()


@dataclass(frozen=True, slots=True)
class ProposalBatch:
    """One draft round: `children` children for the nodes of each part. `urgent`: a request
    has no batch until it is done."""

    parts: tuple[ProposalPart, ...]
    children: int
    urgent: bool = False

    @property
    def requests(self) -> list[ProposalRequest]:
        return [part.request for part in self.parts]

    @property
    def unread(self) -> int:
        """Tokens of text that the draft has to read first (`Sequence.unread`)."""
        return sum(part.sequence.unread for part in self.parts)


# Draft tokens are counted by depth; deeper ones count as of this depth.
DEEPEST = 64


@dataclass(slots=True)
class Totals:
    """Counters since the scheduler began, by the depth of draft tokens below the last decided token
    when they were fed.

    Attributes:
        steps: with any row.
        rounds: of the draft.
        prompt_rows: rows of prompts that were fed.
        fed: rows of trees that were fed, by depth, `[1 + DEEPEST]`; of depth 0 are roots, which
            were decided before they were fed.
        expected: how many of them were to be accepted by the proposer's probabilities, likewise.
        hits: decided tokens by the depth at which they had been fed, `[1 + DEEPEST]`; of depth 0
            are those that had not.
        step_tokens: steps by the tokens of prompts that they fed and of answers that they decided
            together (`STEP_TOKENS`); steps without rows and decided tokens are left out.
    """

    steps: int = 0
    rounds: int = 0
    prompt_rows: int = 0
    fed: np.ndarray = field(default_factory=lambda: np.zeros(1 + DEEPEST, np.int64))
    expected: np.ndarray = field(default_factory=lambda: np.zeros(1 + DEEPEST))
    hits: list[int] = field(default_factory=lambda: [0] * (1 + DEEPEST))
    step_tokens: list[int] = field(default_factory=lambda: [0] * len(STEP_TOKENS))

    def add_step(
        self,
        rows: int,
        prompt_rows: int,
        depths: np.ndarray,
        probabilities: np.ndarray,
        decided: int,
    ) -> None:
        """Count a step with the depths `[rows]` of rows of trees, and their probabilities to be on
        the accepted path."""
        if rows:
            self.steps += 1
            self.prompt_rows += prompt_rows
            depths = np.minimum(depths, DEEPEST)
            self.fed += np.bincount(depths, minlength=1 + DEEPEST)
            self.expected += np.bincount(depths, probabilities, 1 + DEEPEST)
        if rows or decided:
            self.step_tokens[bisect_left(STEP_TOKENS, prompt_rows + decided)] += 1

    def counts(self) -> dict[str, int]:
        """Integers by name, or by "name/label"; labelled ones that are 0 are left out."""
        fed = self.fed.tolist()
        depths = range(1 + DEEPEST)
        labelled = {
            f"{name}/{label:g}": int(count)
            for name, labels, counts in (
                ("fed", depths, fed),
                ("expected", depths, self.expected),
                ("hits", depths, self.hits),
                ("step_tokens", STEP_TOKENS, self.step_tokens),
            )
            for label, count in zip(labels, counts, strict=True)
        }
        return {
            "steps": self.steps,
            "tokens": sum(self.hits),
            "rounds": self.rounds,
            "root_rows": fed[0],
            "prompt_rows": self.prompt_rows,
            "draft_rows": sum(fed[1:]),
            "draft_hits": sum(self.hits[1:]),
            "draft_hits_expected": int(self.expected[1:].sum()),
            **{name: count for name, count in labelled.items() if count},
        }


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """The effect of a verdict on a request.

    `accepted` is the verdict without the tokens beyond the end of the text; `reason` is why the
    request is over, None: it is not.
    """

    sequence: Sequence
    accepted: Verdict
    reason: str | None
