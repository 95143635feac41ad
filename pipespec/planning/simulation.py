"""What a cluster will do, predicted before it is built: `pipespec plan`.

A pipeline of n stages decides a token when the row of the token before it leaves the last
stage, n steps after that row was fed. So with f(j) the step in which token j's row was fed, the
time between two tokens is f(j+1) - f(j) steps: the token's *delay*. It is never more than n, as
a token that no one guessed is fed when it is decided, and

    steps per token = sum over d from 0 to n of d * P(delay = d).

With one level per step (SpecPipe, PipeDec) a token was either guessed in time, delay 1, or not
at all, delay n. With h the share that was guessed this gives, in tokens per step,

    1 / (h + (1 - h) * n).

With `best_first` a token can also share its parent's batch (delay 0) or come late (2 to n - 1),
and no closed form is known: `simulate` drives the very policies, tree and meter of the head
against a synthetic draft of the stated accuracy. docs/planning.md has the derivation and its
limits. Everything here is pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from pipespec.emulation import TimeCurve
from pipespec.errors import ConfigError
from pipespec.head.feed.adaptive import Adaptive
from pipespec.head.feed.best_first import BestFirst
from pipespec.head.feed.level import Level
from pipespec.head.feed.policy import Expansion, FeedPolicy
from pipespec.head.feed.root import Root
from pipespec.head.feed.rounds import check_rounds, fits
from pipespec.head.feed.static_tree import StaticTree
from pipespec.head.meter import Meter
from pipespec.head.source.protocol import Context
from pipespec.head.source.synthetic import Accuracy, SyntheticSource
from pipespec.head.tree import ROOT, Tree
from pipespec.limits import MAX_MS, MAX_SEED, check_number, check_whole

# The simulated text is random, and longer than what is decoded, so that no guess meets its end.
VOCABULARY = 1 << 15
BEYOND = 512
MAX_TOKENS = 10**6
# Of predictions whose times differ by less than this share, the one with fewer rows is advised.
SAME = 0.01

Rounds = int | str


@dataclass(frozen=True)
class Machine:
    """What the pipeline is made of.

    One time curve per stage; `hop_ms` from the end of a stage's computation to the start of the
    next one's, the verdict's way included; `draft_ms` of one draft round. Stages that form a
    group count as one, with the sum of their times. Raises ConfigError.
    """

    stages: tuple[TimeCurve, ...]
    hop_ms: float = 0.0
    draft_ms: float = 0.0

    def __post_init__(self) -> None:
        if not self.stages:
            raise ConfigError("A pipeline without stages cannot be planned; give 1 or more.")
        for name in ("hop_ms", "draft_ms"):
            check_number(name, getattr(self, name), 0, MAX_MS)

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def plain_tbt_ms(self) -> float:
        """Plain pipeline parallelism: one row goes through every stage."""
        return sum(curve.ms(1) + self.hop_ms for curve in self.stages)

    def slowest_ms(self, rows: Sequence[int]) -> float:
        """The longest computation of a step, with so many rows in each stage."""
        return max(curve.ms(count) for curve, count in zip(self.stages, rows, strict=True))


def level_equation(hit_rate: float, num_stages: int) -> float:
    """Tokens per step where a token is either guessed in time or costs a refill."""
    return 1 / (hit_rate + (1 - hit_rate) * num_stages)


# --- simulation -------------------------------------------------------------------------------


@dataclass
class Simulation:
    """What happened between the first decided token and the last.

    `delays[d]` counts the tokens whose row was fed d steps after their parent's, `[stages + 1]`;
    `hits` those that had been fed before they were decided.
    """

    delays: np.ndarray
    hits: int = 0
    steps: int = 0
    rows: int = 0
    rounds: int = 0
    ms: float = 0.0

    @property
    def tokens(self) -> int:
        return int(self.delays.sum())

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps

    @property
    def error(self) -> float:
        """Standard error of `tokens_per_step`, as if the delays were independent."""
        delay = np.arange(len(self.delays))
        mean = delay @ self.delays / self.tokens
        variance = (delay - mean) ** 2 @ self.delays / self.tokens
        return float(self.tokens_per_step**2 * math.sqrt(variance / self.tokens))


def simulate(
    policy: FeedPolicy,
    machine: Machine,
    accuracy: Accuracy,
    *,
    rounds: Rounds,
    num_tokens: int,
    seed: int = 0,
) -> Simulation:
    """Decode some `num_tokens` with the head's own tree and policy; the stages count rows only.

    `rounds`: draft rounds per step at most, or "auto".
    """
    check_rounds(rounds)
    check_whole("tokens", num_tokens, 1, MAX_TOKENS)
    check_whole("seed", seed, 0, MAX_SEED)
    run = _Run(policy, machine, accuracy, rounds, num_tokens, seed)
    while run.result.tokens < num_tokens:
        run.step()
    return run.result


class _Run:
    """One simulated request: the head's steps on a clock that the machine drives."""

    def __init__(
        self,
        policy: FeedPolicy,
        machine: Machine,
        accuracy: Accuracy,
        rounds: Rounds,
        num_tokens: int,
        seed: int,
    ):
        self.policy, self.machine, self.rounds = policy, machine, rounds
        random = np.random.default_rng(seed)
        self.answer = random.integers(VOCABULARY, size=num_tokens + BEYOND).tolist()
        self.source = SyntheticSource(accuracy, [self.answer], VOCABULARY, seed)
        self.context = Context(0, self.answer[:1], [0])
        self.source.begin(self.context)
        self.tree = Tree(0, -1, self.answer[0], 0, fed=True)
        self.meter = Meter(machine.num_stages)
        self.fed_at = np.zeros(1 << 16, np.int64)  # by node id
        self.now = 0
        self.drafted_ms = 0.0
        self.result = Simulation(np.zeros(machine.num_stages + 1, np.int64))

    def step(self) -> None:
        """Grow, hear the verdict on the batch that was fed n steps ago, feed."""
        self.now += 1
        counts = len(self.context.tokens) > 1  # once the first token is decided
        guesses = bool(self.tree.fed[1:].any())
        self.meter.begin()
        self.grow()
        computed_ms = self.machine.slowest_ms(self.in_flight())
        decided = self.hear()
        self.meter.verdict(self.drafted_ms, max(computed_ms - self.drafted_ms, 0.0), decided)
        ms = max(computed_ms, self.drafted_ms) + self.catch_up() + self.machine.hop_ms
        fed = self.feed(ms)
        self.meter.fed(fed)
        self.meter.step(ms, decided, guesses=guesses or self.meter.rounds > 0)
        if counts:
            self.result.steps += 1
            self.result.rows += fed
            self.result.rounds += self.meter.rounds
            self.result.ms += ms

    def grow(self) -> None:
        self.drafted_ms = 0.0
        while True:
            state = self.meter.state(self.now, end=len(self.answer), elapsed_ms=self.drafted_ms)
            growth = self.policy.grow(self.tree, state)
            if not len(growth.nodes) or not fits(self.rounds, state):
                return
            self.expand(growth)
            self.drafted_ms += self.machine.draft_ms

    def catch_up(self) -> float:
        """Draft what the method must have before it can feed; the milliseconds that takes."""
        drafted_ms = 0.0
        while True:
            state = self.meter.state(self.now, end=len(self.answer), elapsed_ms=self.drafted_ms)
            growth = self.policy.grow(self.tree, state)
            if not len(growth.nodes) or not growth.urgent:
                return drafted_ms
            self.expand(growth)
            drafted_ms += self.machine.draft_ms

    def expand(self, growth: Expansion) -> None:
        candidates = self.source.expand(self.context, self.tree, growth.nodes, self.policy.children)
        assert candidates is not None
        self.tree.append(candidates.parents, candidates.tokens, candidates.logps, growth.limit)
        self.tree.trim(self.policy.capacity)
        self.meter.round(self.machine.draft_ms)

    def in_flight(self) -> list[int]:
        """Live rows in each stage: of the batch fed 1, 2, ... n steps ago."""
        ages = self.now - self.fed_at[self.tree.id[self.tree.fed]]
        return np.bincount(ages, minlength=self.machine.num_stages + 1)[1:].tolist()

    def hear(self) -> int:
        """The last stage keeps drawing while the root is in the batch that it computed."""
        leaving = self.now - self.machine.num_stages
        decided = 0
        while self.tree.fed[ROOT] and self.fed_at[self.tree.id[ROOT]] == leaving:
            token = self.answer[len(self.context.tokens)]
            self.tree.advance(token)
            self.context.tokens.append(token)
            decided += 1
            hit = bool(self.tree.fed[ROOT])
            entered = self.fed_at[self.tree.id[ROOT]] if hit else self.now
            if len(self.context.tokens) > 2:
                self.result.delays[entered - leaving] += 1
                self.result.hits += hit
        return decided

    def feed(self, elapsed_ms: float) -> int:
        state = self.meter.state(self.now, end=len(self.answer), elapsed_ms=elapsed_ms)
        nodes = self.policy.feed(self.tree, state)
        self.tree.fed[nodes] = True
        ids = self.tree.id[nodes]
        while ids.max(initial=0) >= len(self.fed_at):
            self.fed_at = np.concatenate((self.fed_at, np.zeros_like(self.fed_at)))
        self.fed_at[ids] = self.now
        return len(nodes)


# --- what to predict, and what to make of it --------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """One way to decode."""

    name: str
    policy: FeedPolicy
    width: int
    children: int
    rounds: Rounds

    @property
    def settings(self) -> tuple[str, ...]:
        """The overrides for `pipespec generate` that decode in this way."""
        chosen = [f"feed={self.name}"]
        if self.name not in FIXED_SHAPE:
            chosen += [f"feed.width={self.width}", f"feed.children={self.children}"]
        return (*chosen, f"source.rounds={self.rounds}")


@dataclass(frozen=True)
class Prediction:
    """What one way to decode will do.

    `tokens_per_step` has the standard error `error`; `equation` is the closed form, where there
    is one, with every guess within the children in time: a bound for any width. `speedup` is
    over plain pipeline parallelism; below 1 speculation loses. `settings` are the overrides for
    `pipespec generate` that decode in this way.
    """

    policy: str
    width: int
    children: int
    rounds: Rounds
    settings: tuple[str, ...]
    tokens_per_step: float
    error: float
    equation: float | None
    hit_rate: float
    rows_per_step: float
    rounds_per_step: float
    step_ms: float
    tbt_ms: float
    speedup: float


POLICIES: dict[str, Callable[[int, int], FeedPolicy]] = {
    "root": lambda width, children: Root(),
    "static_tree": lambda width, children: StaticTree(
        children=max(children, max(StaticTree().shape))
    ),
    "level": lambda width, children: Level(width, children),
    "best_first": lambda width, children: BestFirst(width, children),
    "adaptive": lambda width, children: Adaptive(width, children),
}
# These feed one thing per verdict or per step, which more rounds cannot make larger.
ONE_ROUND = ("root", "level")
# Nor does the width change a tree whose shape is fixed.
FIXED_SHAPE = ("root", "static_tree")


def choices(
    policies: Sequence[str],
    widths: Sequence[int],
    children: Sequence[int],
    rounds: Sequence[Rounds],
) -> Iterator[Choice]:
    """Every way to decode that differs from the others. Raises ConfigError."""
    for name in policies:
        if name not in POLICIES:
            raise ConfigError(
                f"The policy {name!r} is not known; choose from {', '.join(POLICIES)}."
            )
        own_widths = [max(widths)] if name in FIXED_SHAPE else widths
        own_children = [max(children)] if name in FIXED_SHAPE else children
        own_rounds = rounds[:1] if name in ONE_ROUND else rounds
        for width, count, most in product(own_widths, own_children, own_rounds):
            yield Choice(name, POLICIES[name](width, count), width, count, most)


def predict(
    choice: Choice, machine: Machine, accuracy: Accuracy, *, num_tokens: int, seed: int = 0
) -> Prediction:
    """What one way to decode will do on a machine, with a draft of that accuracy."""
    ran = simulate(
        choice.policy,
        machine,
        accuracy,
        rounds=choice.rounds,
        num_tokens=num_tokens,
        seed=seed,
    )
    equation = None
    if choice.name in ONE_ROUND:
        hit_rate = accuracy.hit_rate(choice.children) if choice.name == "level" else 0.0
        equation = level_equation(hit_rate, machine.num_stages)
    tbt_ms = ran.ms / ran.tokens
    return Prediction(
        policy=choice.name,
        width=choice.policy.max_rows,
        children=choice.policy.children,
        rounds=choice.rounds,
        settings=choice.settings,
        tokens_per_step=ran.tokens_per_step,
        error=ran.error,
        equation=equation,
        hit_rate=ran.hits / ran.tokens,
        rows_per_step=ran.rows / ran.steps,
        rounds_per_step=ran.rounds / ran.steps,
        step_ms=ran.ms / ran.steps,
        tbt_ms=tbt_ms,
        speedup=machine.plain_tbt_ms / tbt_ms if tbt_ms else math.inf,
    )


def recommend(predictions: Sequence[Prediction]) -> Prediction | None:
    """The fastest, or of several that are as fast the one with the fewest rows and rounds.

    None: nothing beats plain pipeline parallelism.
    """
    best = min(predictions, key=lambda p: p.tbt_ms)
    equal = [p for p in predictions if p.tbt_ms <= best.tbt_ms * (1 + SAME)]
    chosen = min(equal, key=lambda p: (p.rows_per_step, p.width, p.rounds_per_step))
    return chosen if chosen.speedup > 1 + SAME else None
