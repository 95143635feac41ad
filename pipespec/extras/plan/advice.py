"""Which way to decode: what each would do on each layout of the devices, and which is advised."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from itertools import product
from operator import add
from typing import Any, NamedTuple

from pipespec.config.compose import default_policy, sized_policy
from pipespec.extras.emulation.synthetic_proposer import Accuracy
from pipespec.extras.plan.pipeline_times import DraftRecord, Machine
from pipespec.extras.plan.simulation import (
    MAX_TOKENS,
    Rounds,
    Simulation,
    simulate,
    simulate_texts,
)
from pipespec.head.policies.policy import SpeculationPolicy
from pipespec.limits import check_whole

# The settings of a policy that are varied, if it has them.
SIZE = ("width", "children")
# Of predictions whose times differ by less than this share, the one with the fewest devices and
# rows is advised.
SAME = 0.01


@dataclass(frozen=True)
class DecodingMethod:
    """A policy with its draft rounds, which `pipespec plan` predicts."""

    name: str
    policy: SpeculationPolicy
    rounds: Rounds

    @property
    def settings(self) -> tuple[str, ...]:
        """The overrides for `pipespec generate` that decode by this method."""
        chosen = [f"policy={self.name}"]
        if not self.policy.has_fixed_size:
            known = {entry.name for entry in fields(self.policy)}  # type: ignore[arg-type]
            chosen += [
                f"policy.{name}={getattr(self.policy, name)}" for name in SIZE if name in known
            ]
        return (*chosen, f"proposer.rounds={self.rounds}")


@dataclass(frozen=True)
class PlannedLayout:
    """One way to use the devices: in words, its times, how many it uses, and its settings;
    `accuracy`: of a draft of its own."""

    label: str
    machine: Machine
    num_devices: int = 0
    settings: tuple[str, ...] = ()
    accuracy: Accuracy | None = None


class Division(NamedTuple):
    """So many devices of a host for the draft, and so many stages of so many devices each, all
    tensor-parallel groups: SwiftSpec (arXiv 2506.11309, 3.1) gives x of k to the target."""

    draft: int
    stages: int
    members: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the groups, the draft's first."""
        return (self.draft, *[self.members] * self.stages)

    def layout(self, machine: Machine) -> PlannedLayout:
        """With its times, for `advice.predict_all`."""
        settings = (
            f"cluster.tensor_parallel={self.members}",
            f"cluster.draft_tensor_parallel={self.draft}",
            f"cluster.stages={self.stages}",
        )
        return PlannedLayout(
            f"{self.draft} + {self.stages} x {self.members}", machine, settings=settings
        )


def divisions(count: int) -> Iterator[Division]:
    """All ways to use `count` devices, of which every stage has as many as the others."""
    for draft in range(1, count):
        left = count - draft
        for members in range(1, left + 1):
            if left % members == 0:
                yield Division(draft, left // members, members)


@dataclass(frozen=True)
class Prediction:
    """What a decoding method will do on a layout, with so many batches `in_flight`, a step from one
    to the next; `tokens_per_step` has the standard error `error`, `speedup` is over plain pipeline
    parallelism there, and `texts` are those of a recorded draft."""

    layout: str
    policy: str
    width: int
    children: int
    rounds: Rounds
    settings: tuple[str, ...]
    tokens_per_step: float
    error: float
    hit_rate: float
    rows_per_step: float
    rounds_per_step: float
    step_ms: float
    tbt_ms: float
    speedup: float
    num_devices: int = 0
    texts: tuple[TextPrediction, ...] = ()
    in_flight: int = 0


@dataclass(frozen=True)
class TextPrediction:
    """What a decoding method will do with one text of which the draft was recorded; `tokens` are
    those after the first."""

    id: str
    benchmark: str
    tokens: int
    tokens_per_step: float
    tbt_ms: float


def choices(
    policies: Sequence[str],
    widths: Sequence[int],
    children: Sequence[int],
    rounds: Sequence[Rounds],
) -> Iterator[DecodingMethod]:
    """Every decoding method that differs from the others. Raises ConfigError.

    A policy of fixed size has its own settings, whatever the `widths` and `children`.
    """
    for name in policies:
        policy = default_policy(name)
        sized = [sized_policy(policy, *size) for size in product(widths, children)]
        own_rounds = rounds[:1] if policy.needs_one_round else rounds
        different = [each for place, each in enumerate(sized) if each not in sized[:place]]
        for policy, most in product(different, own_rounds):
            yield DecodingMethod(name, policy, most)


def predict(
    choice: DecodingMethod,
    machine: Machine,
    accuracy: Accuracy | DraftRecord,
    *,
    num_tokens: int,
    layout: PlannedLayout | None = None,
) -> Prediction:
    """What one decoding method will do on a machine, with a draft of that accuracy. Of a draft that
    was recorded, about `num_tokens` of its texts are decoded."""
    layout = layout or PlannedLayout("", machine)
    records = [*accuracy.sample(num_tokens)] if isinstance(accuracy, DraftRecord) else []

    def ran_with(in_flight: int) -> list[Simulation]:
        """One of each recorded text, or of all tokens."""
        how: dict[str, Any] = {"rounds": choice.rounds, "in_flight": in_flight}
        if isinstance(accuracy, DraftRecord):
            return simulate_texts(choice.policy, machine, records, **how)
        return [simulate(choice.policy, machine, accuracy, num_tokens=num_tokens, **how)]

    # A policy that delays no batch for a draft round has as many in flight as it can.
    windows = machine.windows()
    tried = [ran_with(each) for each in (windows if choice.policy.refills else windows[-1:])]
    each = min(tried, key=lambda runs: reduce(add, runs).tbt_ms)
    ran = reduce(add, each)
    texts = tuple(
        TextPrediction(r.id, r.benchmark, of.tokens, of.tokens_per_step, of.tbt_ms)
        for r, of in zip(records, each, strict=False)
    )
    return Prediction(
        layout=layout.label,
        policy=choice.name,
        width=choice.policy.max_rows,
        children=choice.policy.children,
        rounds=choice.rounds,
        settings=(*layout.settings, *choice.settings),
        tokens_per_step=ran.tokens_per_step,
        error=ran.error,
        hit_rate=ran.hits / ran.tokens,
        rows_per_step=ran.rows / ran.steps,
        rounds_per_step=ran.rounds / ran.steps,
        step_ms=ran.ms / ran.steps,
        tbt_ms=ran.tbt_ms,
        speedup=machine.plain_tbt_ms / ran.tbt_ms if ran.tbt_ms else math.inf,
        num_devices=layout.num_devices,
        texts=texts,
        in_flight=ran.in_flight,
    )


def predict_all(
    layouts: Sequence[PlannedLayout],
    methods: Sequence[DecodingMethod],
    accuracy: Accuracy | DraftRecord,
    *,
    num_tokens: int,
    on_done: Callable[[int, int], None] = lambda done, of: None,
) -> list[Prediction]:
    """What each of the methods will do on each of the layouts, the fastest first. `on_done` is
    called with how many simulations have ended, and of how many."""
    check_whole("tokens", num_tokens, 1, MAX_TOKENS)
    cells = list(product(layouts, methods))
    found = []
    for done, (layout, method) in enumerate(cells, 1):
        of = layout.accuracy or accuracy
        found.append(predict(method, layout.machine, of, num_tokens=num_tokens, layout=layout))
        on_done(done, len(cells))
    return sorted(found, key=lambda each: each.tbt_ms)


def recommend(predictions: Sequence[Prediction], same: float = SAME) -> Prediction | None:
    """The fastest, or of several that are as fast the one with the fewest devices, rows and rounds.
    None: nothing beats plain pipeline parallelism."""
    best = min(predictions, key=lambda p: p.tbt_ms)
    equal = [p for p in predictions if p.tbt_ms <= best.tbt_ms * (1 + same)]
    chosen = min(equal, key=lambda p: (p.num_devices, p.rows_per_step, p.width, p.rounds_per_step))
    return chosen if chosen.speedup > 1 + SAME else None
