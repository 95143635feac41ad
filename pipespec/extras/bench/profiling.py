"""Measures a pair of models on a cluster and a user's own prompts, for `pipespec bench --profile`.

Devices and links of a hosts file are measured first, as `pipespec plan HOSTS.yaml` does. The
prompts are decoded twice on the cluster, plainly and with its policy; the stages and the head
report how long their batches and draft rounds took. Then the draft reads the answers.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from operator import add
from typing import Any

from pipespec.cluster.decide import decide
from pipespec.cluster.diagnostics.measure_hosts import measure_hosts
from pipespec.config.compose import compose
from pipespec.config.hosts import load_hosts
from pipespec.config.schema import Config
from pipespec.errors import ConfigError
from pipespec.extras.bench.dataset import Sample
from pipespec.extras.bench.draft_reader import read_answers
from pipespec.extras.bench.figures import BenchResult
from pipespec.extras.bench.measurement import bench
from pipespec.extras.plan.machine_profile import Profile
from pipespec.extras.plan.recorded_draft import DraftRecord
from pipespec.extras.plan.simulation import simulate_texts
from pipespec.head.proposers.draft_model import DraftModelConfig
from pipespec.system.versions import package_version
from pipespec.timing.batch_times import BatchTimes

# Candidates that are recorded of each token, unless a policy takes more.
CANDIDATES = 16

Progress = Callable[[int, int], None]


def nothing(done: int, of: int) -> None:
    """Show no progress."""


@dataclass(frozen=True)
class Shown:
    """Where progress is shown: of measuring hosts, of loading, of the plain run, of the other one,
    and of the draft's reading."""

    measuring: Progress = nothing
    loading: Progress = nothing
    plain: Progress = nothing
    speculating: Progress = nothing
    reading: Progress = nothing


def profile(
    settings: Sequence[str],
    samples: Sequence[Sample],
    *,
    prompt_tokens: int | None = None,
    shown: Shown = Shown(),
) -> Profile:
    """Measure a pair; `settings` are those of the cluster. Raises as `bench` does."""
    config = compose(settings)
    check(config)
    figures = None
    if config.cluster.hosts is not None:
        figures = measure_hosts(load_hosts(config.cluster.hosts), config, shown.measuring)
    plain = bench(
        plain_config(settings),
        samples,
        prompt_tokens=prompt_tokens,
        on_loaded=shown.loading,
        on_done=shown.plain,
    )
    speculating = bench(
        config,
        samples,
        prompt_tokens=prompt_tokens,
        on_loaded=shown.loading,
        on_done=shown.speculating,
    )
    candidates = max(CANDIDATES, *(each.children for each in config.policies))
    record = read_answers(decide(config), speculating.requests, candidates, shown.reading)
    found = combine(config, plain, speculating, record)
    if figures is not None:
        found = replace(found, figures=figures.as_json())
    return with_wide_hop(found, config, speculating)


def plain_config(settings: Sequence[str]) -> Config:
    """That of the plain run. Raises ConfigError."""
    # root drafts nothing, so proposer.overlap=no is refused with it.
    of_draft = ("policy", "proposer.overlap")
    return compose([*(each for each in settings if not each.startswith(of_draft)), "policy=root"])


def check(config: Config) -> None:
    """Raise ConfigError unless the pair can be measured so."""
    if not config.proposer.needs_draft:
        raise ConfigError(
            "`pipespec bench --profile` measures a draft model, but the proposer has none; pass "
            "proposer=draft_model."
        )
    if type(config.proposer) is not DraftModelConfig:
        raise ConfigError(
            "`pipespec bench --profile` measures what a draft model proposes by itself; pass "
            "proposer=draft_model."
        )
    if any(size > 1 for size in config.cluster.group_sizes or ()):
        raise ConfigError(
            f"cluster.groups is {config.cluster.groups}, but `pipespec bench --profile` "
            "measures stages that are a step each; leave cluster.groups out."
        )
    if config.policy.max_rows == 1:
        raise ConfigError(
            "`pipespec bench --profile` decodes with draft tokens to measure their batches, but "
            "this policy schedules one row a step; leave policy out."
        )
    if config.sampling.temperature:
        raise ConfigError(
            "`pipespec bench --profile` measures greedy decoding; leave sampling.temperature out."
        )


def combine(
    config: Config, plain: BenchResult, speculating: BenchResult, record: DraftRecord
) -> Profile:
    """A profile from what was measured, with the hop of one row."""
    before, after = _stage_times(plain), _stage_times(speculating)
    stages = [stage_points(one, wide) for one, wide in zip(before, after, strict=True)]
    count = len(stages)
    plain_ms = _mean_tbt(plain)
    hop_ms = max(plain_ms - sum(points[0][1] for points in stages), 0.0) / count
    of_draft = speculating.requests[-1].stats
    rounds = of_draft["round_times"]
    return Profile(
        stages=count,
        stage_ms=tuple(_texts(points) for points in stages),
        hop_ms=_texts([(1, hop_ms)]),
        draft_ms=_texts(rounds) or (0.0,),
        curve=record.curve(),
        spread=record.spread(),
        slot_ms=tuple(each.slot_ms for each in after),
        slots=tuple(each.slots for each in after),
        overlap=of_draft["overlap"],
        texts=record.texts,
        about={
            "target": str(config.model.target),
            "draft": str(config.model.draft),
            "pipespec": package_version("pipespec"),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "emulated": bool(speculating.labels["emulated"]),
            "confidence": record.confidence(),
            "measured": measured(plain, speculating),
        },
    )


def measured(plain: BenchResult, speculating: BenchResult) -> list[dict[str, Any]]:
    """The times between tokens of the two runs, by benchmark."""
    return [
        {
            "benchmark": one["benchmark"],
            "tokens": one["total_output_tokens"],
            "plain_tbt_ms": one["mean_tbt_ms"],
            "tbt_ms": other["mean_tbt_ms"],
            "tokens_per_step": other["tokens_per_step"],
            "hit_rate": other["hit_rate"],
        }
        for one, other in zip(plain.by_benchmark(), speculating.by_benchmark(), strict=True)
    ]


def stage_points(plain: BatchTimes, wide: BatchTimes) -> list[tuple[float, float]]:
    """The times of one stage by rows, at the context that was measured: of one row from the plain
    run, of more from the other; more rows never take less time."""
    one = next(ms for _, ms in plain.with_slots())
    points = [(1, one), *((rows, ms) for rows, ms in wide.with_slots() if rows > 1)]
    highest = one
    rising = []
    for rows, ms in points:
        highest = max(highest, ms)
        rising.append((rows, highest))
    return rising


def with_wide_hop(found: Profile, config: Config, speculating: BenchResult) -> Profile:
    """The profile with the hop of a wide batch: what a step of the speculating run took longer than
    simulation says. It holds what more rows take on links, and what the head does between a verdict
    and the next batch."""
    simulated = reduce(
        add,
        simulate_texts(config.policy, found.machine(), found.texts, rounds=config.proposer.rounds),
    )
    more_ms = step_ms(speculating) - simulated.ms / simulated.steps
    rows = round(simulated.rows / simulated.steps)
    if more_ms <= 0 or rows < 2:
        return found
    hop = found.machine().hop.ms(1)
    return replace(found, hop_ms=_texts([(1, hop), (rows, hop + more_ms)]))


def step_ms(result: BenchResult) -> float:
    """The mean time of a step between the first and the last token of requests."""
    counted = [
        (request.token_ms[-1] - request.token_ms[0], request.stats["step_ms"])
        for request in result.requests
        if request.stats["step_ms"]
    ]
    return sum(ms for ms, _ in counted) / sum(ms / step for ms, step in counted)


def _stage_times(result: BenchResult) -> list[BatchTimes]:
    """The latest times of each stage."""
    return [BatchTimes(**each) for each in result.requests[-1].stats["stage_times"]]


def _mean_tbt(result: BenchResult) -> float:
    gaps = [b - a for request in result.requests for a, b in pairwise(request.token_ms)]
    return sum(gaps) / len(gaps) if gaps else 0.0


def _texts(points: Sequence[tuple[float, float]]) -> tuple[str, ...]:
    return tuple(f"{rows}:{ms:.5g}" for rows, ms in points)
