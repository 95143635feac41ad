"""Which way to decode: the ones that there are, what each would do, and which is advised."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from pipespec.errors import ConfigError
from pipespec.head.feed.adaptive import Adaptive
from pipespec.head.feed.best_first import BestFirst
from pipespec.head.feed.level import Level
from pipespec.head.feed.policy import FeedPolicy
from pipespec.head.feed.root import Root
from pipespec.head.feed.static_tree import StaticTree
from pipespec.head.source.synthetic import Accuracy
from pipespec.planning.simulation import Machine, Rounds, level_equation, simulate, specpipe_ms

# Of predictions whose times differ by less than this share, the one with fewer rows is advised.
SAME = 0.01


@dataclass(frozen=True)
class Choice:
    """One way to decode."""

    name: str
    policy: FeedPolicy
    width: int
    children: int
    rounds: Rounds
    cascade: bool = False

    @property
    def settings(self) -> tuple[str, ...]:
        """The overrides for `pipespec generate` that decode in this way."""
        chosen = [f"feed={self.name}"]
        if self.name not in FIXED_SHAPE:
            chosen += [f"feed.width={self.width}", f"feed.children={self.children}"]
        if self.cascade:
            chosen.append("source=cascade")
        return (*chosen, f"source.rounds={self.rounds}")


@dataclass(frozen=True)
class Prediction:
    """What one way to decode will do.

    `tokens_per_step` has the standard error `error`; `equation` is the closed form, where there
    is one, with every guess within the children in time: a bound for any width. `bound_ms` is
    the time between tokens that follows from it, `specpipe_ms` what SpecPipe's equation gives
    instead. `speedup` is over plain pipeline parallelism; below 1 speculation loses. `settings`
    are the overrides for `pipespec generate` that decode in this way.
    """

    policy: str
    width: int
    children: int
    rounds: Rounds
    settings: tuple[str, ...]
    tokens_per_step: float
    error: float
    equation: float | None
    bound_ms: float | None
    specpipe_ms: float | None
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
    choice: Choice,
    machine: Machine,
    accuracy: Accuracy,
    *,
    num_tokens: int,
    seed: int = 0,
    mid: Accuracy | None = None,
) -> Prediction:
    """What one way to decode will do on a machine, with a draft of that accuracy and, in a
    cascade, a `mid`-size model of that one."""
    choice = replace(choice, cascade=mid is not None)
    ran = simulate(
        choice.policy,
        machine,
        accuracy,
        rounds=choice.rounds,
        num_tokens=num_tokens,
        seed=seed,
        mid=mid,
    )
    equation = bound_ms = paper_ms = None
    if choice.name in ONE_ROUND:
        hit_rate = accuracy.hit_rate(choice.children) if choice.name == "level" else 0.0
        equation = level_equation(hit_rate, machine.num_stages)
        # Every stage is full, and the next step waits for the hop.
        stage_ms = [c.ms(choice.policy.max_rows) + machine.hop_ms for c in machine.stages]
        if choice.name == "level":
            bound_ms = max(stage_ms) / equation
            paper_ms = specpipe_ms(hit_rate, stage_ms)
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
        bound_ms=bound_ms,
        specpipe_ms=paper_ms,
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
