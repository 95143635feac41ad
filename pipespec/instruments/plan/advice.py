"""Which decoding method to use: those that there are, what each would do, and which is advised."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from itertools import product
from operator import add

from pipespec.config.method_registry import default_policy, sized_policy
from pipespec.head.policies.level import Level
from pipespec.head.policies.policy import SpeculationPolicy
from pipespec.head.policies.root import Root
from pipespec.instruments.emulation.synthetic_proposer import Accuracy
from pipespec.instruments.plan.pipeline_times import Machine
from pipespec.instruments.plan.recorded_draft import DraftRecord
from pipespec.instruments.plan.simulated_pipeline import Rounds
from pipespec.instruments.plan.simulation import (
    level_equation,
    simulate,
    simulate_texts,
    specpipe_ms,
)

# The settings of a policy that are varied, if it has them.
SIZE = ("width", "children")
# Of predictions whose times differ by less than this share, the one with fewer rows is advised.
SAME = 0.01


@dataclass(frozen=True)
class DecodingMethod:
    """A policy with its draft rounds, which `pipespec plan` predicts."""

    name: str
    policy: SpeculationPolicy
    rounds: Rounds
    cascade: bool = False

    @property
    def settings(self) -> tuple[str, ...]:
        """The overrides for `pipespec generate` that decode by this method."""
        chosen = [f"policy={self.name}"]
        if not self.policy.has_fixed_size:
            known = {entry.name for entry in fields(self.policy)}  # type: ignore[arg-type]
            chosen += [
                f"policy.{name}={getattr(self.policy, name)}" for name in SIZE if name in known
            ]
        if self.cascade:
            chosen.append("proposer=cascade")
        return (*chosen, f"proposer.rounds={self.rounds}")


@dataclass(frozen=True)
class Prediction:
    """What a decoding method will do.

    `tokens_per_step` has the standard error `error`; `equation` is the closed form, where there
    is one, with every draft token within the children in time: a bound for any width. `bound_ms` is
    the time between tokens that follows from it, `specpipe_ms` what SpecPipe's equation gives
    instead. `speedup` is over plain pipeline parallelism; below 1 speculation loses. `settings`
    are the overrides for `pipespec generate` that decode by this method, and `texts` the figures of
    each text, if the draft was recorded.
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
    texts: tuple[TextPrediction, ...] = ()


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
    seed: int = 0,
    mid: Accuracy | None = None,
) -> Prediction:
    """What one decoding method will do on a machine, with a draft of that accuracy and, in a
    cascade, a `mid`-size model of that one. Of a draft that was recorded, about `num_tokens` of its
    texts are decoded; no cascade can be."""
    assert mid is None or not isinstance(accuracy, DraftRecord)
    choice = replace(choice, cascade=mid is not None)
    rounds = choice.rounds
    texts: tuple[TextPrediction, ...] = ()
    if isinstance(accuracy, DraftRecord):
        records = list(accuracy.sample(num_tokens))
        each = simulate_texts(choice.policy, machine, records, rounds=rounds, seed=seed)
        ran = reduce(add, each)
        texts = tuple(
            TextPrediction(r.id, r.benchmark, of.tokens, of.tokens_per_step, of.tbt_ms)
            for r, of in zip(records, each, strict=True)
        )
    else:
        ran = simulate(
            choice.policy,
            machine,
            accuracy,
            rounds=rounds,
            num_tokens=num_tokens,
            seed=seed,
            mid=mid,
        )
    equation = bound_ms = paper_ms = None
    if isinstance(choice.policy, Root):
        equation = level_equation(0.0, machine.num_stages)
    elif isinstance(choice.policy, Level) and choice.policy.levels_per_step == 1:
        hit_rate = accuracy.hit_rate(choice.policy.children)
        equation = level_equation(hit_rate, machine.num_stages)
        # Every stage is full, and the next step waits for the hop.
        stage_ms = machine.full_ms(choice.policy.max_rows)
        bound_ms = max(stage_ms) / equation
        paper_ms = specpipe_ms(hit_rate, stage_ms)
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
        tbt_ms=ran.tbt_ms,
        speedup=machine.plain_tbt_ms / ran.tbt_ms if ran.tbt_ms else math.inf,
        texts=texts,
    )


def recommend(predictions: Sequence[Prediction]) -> Prediction | None:
    """The fastest, or of several that are as fast the one with the fewest rows and rounds.

    None: nothing beats plain pipeline parallelism.
    """
    best = min(predictions, key=lambda p: p.tbt_ms)
    equal = [p for p in predictions if p.tbt_ms <= best.tbt_ms * (1 + SAME)]
    chosen = min(equal, key=lambda p: (p.rows_per_step, p.width, p.rounds_per_step))
    return chosen if chosen.speedup > 1 + SAME else None
