"""The default policy beside the optimum, where that can be computed.

    python -m benchmarks.pipeline.optimum --json FILE

Exact and simulated. In small pipelines, for a draft whose candidates all have the same
probabilities by rank, the best choice of rows in every state is found by dynamic programming
(`Optimum`); the head's own scheduler then decodes there with a draft that costs no time, with
measured times and with every fixed width. A ratio of 1 means: as fast as any policy can be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from benchmarks.common import experiment
from pipespec.extras.emulation.machine import TimeCurve
from pipespec.extras.emulation.synthetic_proposer import Accuracy
from pipespec.extras.plan.pipeline_times import Machine
from pipespec.extras.plan.simulation import (
    simulate,
)
from pipespec.head.policies.best_first import BestFirst
from pipespec.head.policies.policy import SpeculationPolicy

# A node is the ranks of the candidates on its path from the root; a batch is a set of nodes.
Node = tuple[int, ...]
Rows = frozenset[Node]
# The batches in the pipeline, the oldest first: live rows alone.
State = tuple[Rows, ...]

ROOT: Node = ()
NO_ROWS: Rows = frozenset()
PRECISION = 1e-9


@dataclass(frozen=True)
class Optimum:
    """The highest speed that any choice of rows can reach, by dynamic programming.

    The text is decoded as in `pipespec plan`: a batch takes one step for each stage, a step lasts
    as long as the largest batch in the pipeline takes, the last stage decides, and rows that a
    verdict rules out are dropped at once. The draft has proposed every candidate to any depth.

    The state after a verdict is the set of batches in the pipeline; an action is the next batch.
    The first state, in which the pipeline is empty, comes back after every miss. So the speed is
    that of the cycle from miss to miss with the most tokens per millisecond, which Dinkelbach's
    method finds: the policy that is best if a millisecond costs so many tokens, then the speed of
    that policy as the cost.

    Args:
        probabilities: that the first, second, ... candidate for a node is the target's token.
        step_ms: of a step whose largest batch has 1, 2, ... rows.
        num_stages: of the pipeline.
    """

    probabilities: tuple[float, ...]
    step_ms: tuple[float, ...]
    num_stages: int

    @cached_property
    def tokens_per_ms(self) -> float:
        states: dict[State, int] = {(NO_ROWS,) * (self.num_stages - 1): 0}
        # Of every action: its state, milliseconds, and expected tokens; of every outcome: its
        # action, probability and next state.
        owners: list[int] = []
        ms: list[float] = []
        tokens: list[float] = []
        outcomes: list[tuple[int, float, int]] = []
        waiting = list(states)
        while waiting:
            state = waiting.pop()
            for batch in self._actions(state):
                batches = (*state, batch)
                expected = 0.0
                for probability, decided, after in self._verdicts(batches):
                    expected += probability * decided
                    if after not in states:
                        states[after] = len(states)
                        waiting.append(after)
                    outcomes.append((len(owners), probability, states[after]))
                owners.append(states[state])
                ms.append(self.step_ms[max(map(len, batches)) - 1])
                tokens.append(expected)
        return _fastest_cycle(
            np.array(owners), np.array(ms), np.array(tokens), np.array(outcomes).T, len(states)
        )

    def _actions(self, state: State) -> Iterator[Rows]:
        """Every batch that could be sent, its rows after their parents."""
        before = NO_ROWS.union(*state)
        known = {NO_ROWS}
        if ROOT in before:  # otherwise there is nothing to wait for
            yield NO_ROWS
        for _ in self.step_ms:
            known = {batch | {node} for batch in known for node in self._addable(before | batch)}
            yield from known

    def _addable(self, fed: Rows) -> Iterator[Node]:
        """Nodes whose parents and likelier siblings have entered the pipeline."""
        if not fed:
            yield ROOT
        for node in fed:
            for rank in range(len(self.probabilities)):
                child = (*node, rank)
                if child not in fed:
                    yield child
                    break

    def _verdicts(self, batches: State) -> list[tuple[float, int, State]]:
        """Probability, decided tokens and next state of every outcome of the oldest batch."""
        oldest = batches[0]
        if ROOT not in oldest:
            return [(1.0, 0, batches[1:])]
        found = []
        missed = 1.0
        for rank, probability in enumerate(self.probabilities):
            rest = tuple(
                frozenset(node[1:] for node in batch if node[:1] == (rank,)) for batch in batches
            )
            if not any(ROOT in batch for batch in rest):
                continue
            missed -= probability
            found += [
                (probability * share, 1 + tokens, after)
                for share, tokens, after in self._verdicts(rest)
            ]
        found.append((missed, 1, (NO_ROWS,) * (len(batches) - 1)))
        return found


def _fastest_cycle(
    owners: np.ndarray, ms: np.ndarray, tokens: np.ndarray, outcomes: np.ndarray, num_states: int
) -> float:
    """Tokens per millisecond of the policy that is best between two visits of state 0.

    Args:
        owners, ms, tokens: state, milliseconds and expected tokens of each action, `[actions]`.
        outcomes: action, probability and next state, `[3, outcomes]`.
    """
    action, probability, after = outcomes
    action, after = action.astype(int), after.astype(int)
    order = np.argsort(owners, kind="stable")
    starts = np.searchsorted(owners[order], np.arange(num_states))
    speed = 0.0
    while True:
        value = np.zeros(num_states)  # tokens beyond what the time until a miss costs
        while True:
            value[0] = 0.0
            expected = tokens - speed * ms
            expected = expected + np.bincount(action, probability * value[after], len(owners))
            best = np.maximum.reduceat(expected[order], starts)
            if np.abs(best[1:] - value[1:]).max(initial=0.0) < PRECISION:
                break
            value = best
        chosen = expected >= best[owners] - PRECISION
        policy = np.zeros(num_states, int)
        policy[owners[chosen]] = np.flatnonzero(chosen)
        earned = _until_miss(policy, tokens, action, probability, after)
        lasted = _until_miss(policy, ms, action, probability, after)
        if earned / lasted <= speed + PRECISION:
            return speed
        speed = earned / lasted


def _until_miss(
    policy: np.ndarray,
    reward: np.ndarray,
    action: np.ndarray,
    probability: np.ndarray,
    after: np.ndarray,
) -> float:
    """The expected sum of `reward` `[actions]` from state 0 until it comes back, with the action
    `policy` `[states]` in each state."""
    transitions = np.zeros((len(policy), len(policy)))
    state = np.full(len(reward), -1)
    state[policy] = np.arange(len(policy))
    used = (state[action] >= 0) & (after != 0)
    np.add.at(transitions, (state[action[used]], after[used]), probability[used])
    return float(np.linalg.solve(np.eye(len(policy)) - transitions, reward[policy])[0])


@dataclass(frozen=True)
class Instance:
    """A small pipeline and a draft.

    Attributes:
        curve: of `CURVES`, step times by rows.
        draft: of `DRAFTS`, the probabilities of the candidates.
        rows: of a batch at most.
    """

    stages: int
    curve: str
    draft: str
    rows: int

    @property
    def optimum(self) -> Optimum:
        return Optimum(DRAFTS[self.draft], CURVES[self.curve][: self.rows], self.stages)

    def simulated(self, policy: SpeculationPolicy, tokens: int, seed: int = 0) -> float:
        """Tokens per millisecond of a policy under the head's own scheduler."""
        points = tuple(enumerate(CURVES[self.curve][: self.rows], 1))
        hits = accumulate(DRAFTS[self.draft])
        found = simulate(
            policy,
            Machine((TimeCurve(points),) * self.stages),
            Accuracy(dict(enumerate(hits, 1)), spread=0.0),
            rounds="auto",
            num_tokens=tokens,
            seed=seed,
        )
        return found.tokens / found.ms

    def compare(self, tokens: int) -> dict[str, Any]:
        """The default and the best fixed width, as shares of the optimum."""
        best = self.optimum.tokens_per_ms
        children = len(DRAFTS[self.draft])
        fixed = {
            width: self.simulated(BestFirst(width, children, row_cost=0.0), tokens) / best
            for width in range(1, self.rows + 1)
        }
        width = max(fixed, key=fixed.__getitem__)
        return {
            "stages": self.stages,
            "times": self.curve,
            "draft": self.draft,
            "rows": self.rows,
            "ms_per_token": 1 / best,
            "default": self.simulated(BestFirst(self.rows, children), tokens) / best,
            "best_fixed": fixed[width],
            "its_width": width,
        }


# Milliseconds of a step by its rows.
CURVES: Mapping[str, tuple[float, ...]] = {
    "flat": (10.0, 10.2, 10.4, 10.6),
    "a sixth each": (10.0, 11.7, 13.3, 15.0),
    "two thirds each": (10.0, 16.7, 23.3, 30.0),
    "dear second row": (10.0, 18.0, 19.0, 20.0),
}
DRAFTS: Mapping[str, tuple[float, ...]] = {
    ".6 and .2": (0.6, 0.2),
    ".85 and .1": (0.85, 0.1),
}
# Stages, and rows of a batch: as many as the number of states allows.
SIZES = ((1, 4), (2, 4), (3, 3), (4, 2))
TOKENS = 20_000


def instances() -> list[Instance]:
    return [
        Instance(stages, curve, draft, rows)
        for stages, rows in SIZES
        for curve in CURVES
        for draft in DRAFTS
    ]


def main() -> None:
    """Compare in every instance, show and store."""
    parser = experiment.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each simulation")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = experiment.parse(parser, tokens=500)
    with ProcessPoolExecutor(options.jobs) as pool:
        futures = [pool.submit(each.compare, options.tokens) for each in instances()]
        rows: Sequence[dict[str, Any]] = [future.result() for future in futures]
    experiment.publish(options, "exact optimum, and simulated shares of it", rows, unit="ms")


if __name__ == "__main__":
    main()
