"""What a cluster will do, predicted before it is built: `pipespec plan`. Pure.

`simulate` drives the head's own scheduler (`pipespec.head.scheduler`) against a synthetic draft of
the stated accuracy. docs/planning.md has the derivation of the closed forms, and its limits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipespec.extras.emulation.synthetic_proposer import Accuracy
from pipespec.extras.plan.pipeline_times import Machine
from pipespec.extras.plan.recorded_draft import TextRecord
from pipespec.extras.plan.simulated_pipeline import (
    Arrived,
    Rounds,
    SimulatedPipeline,
    Simulation,
    ignored,
)
from pipespec.head.policies.policy import SpeculationPolicy, check_rounds
from pipespec.head.proposers.calibration import Calibration
from pipespec.limits import MAX_SEED, check_whole

MAX_TOKENS = 10**6
MAX_REQUESTS = 4096


def level_equation(hit_rate: float, num_stages: int) -> float:
    """Tokens per step if a token is either drafted in time or costs a refill."""
    return 1 / (hit_rate + (1 - hit_rate) * num_stages)


def specpipe_ms(hit_rate: float, stage_ms: Sequence[float]) -> float:
    """SpecPipe's expected time of a token, E(T) = max t_i(w) + (1 - P(w)) sum t_i(w).

    There a miss costs a whole pipeline beyond its step; in this schedule it costs that in all.
    """
    return max(stage_ms) + (1 - hit_rate) * sum(stage_ms)


def simulate(
    policy: SpeculationPolicy,
    machine: Machine,
    accuracy: Accuracy,
    *,
    rounds: Rounds,
    num_tokens: int,
    seed: int = 0,
    num_requests: int = 1,
    max_rows: int = 0,
    on_token: Arrived = ignored,
) -> Simulation:
    """Decode some `num_tokens` with the head's own scheduler; the stages count rows only.

    `rounds`: draft rounds per step at most, or "auto"; `max_rows`: see `SchedulerConfig`;
    `on_token` is called for every token that is counted, in the order in which they arrive. With
    many requests, all of them are there the whole time, and the tokens are those of all.
    """
    check_rounds(rounds)
    check_whole("tokens", num_tokens, 1, MAX_TOKENS)
    check_whole("seed", seed, 0, MAX_SEED)
    check_whole("requests", num_requests, 1, MAX_REQUESTS)
    sizes = (num_tokens, seed, num_requests, max_rows)
    pipeline = SimulatedPipeline(policy, machine, accuracy, rounds, *sizes, on_token=on_token)
    while pipeline.result.tokens < num_tokens:
        pipeline.step()
    return pipeline.result


def simulate_texts(
    policy: SpeculationPolicy,
    machine: Machine,
    texts: Iterable[TextRecord],
    *,
    rounds: Rounds,
    seed: int = 0,
) -> list[Simulation]:
    """Decode texts of which a draft was recorded, one after another, as `simulate` does.

    The head learns from one text to the next how sure the draft may be, as a running one does.
    """
    check_rounds(rounds)
    check_whole("seed", seed, 0, MAX_SEED)
    calibration = Calibration()
    found = []
    for text in texts:
        later = len(text.ranks) - 1  # the first token is not counted
        pipeline = SimulatedPipeline(
            policy, machine, text, rounds, later, seed, calibration=calibration
        )
        while pipeline.result.tokens < later:
            pipeline.step()
        pipeline.end()
        found.append(pipeline.result)
    return found
