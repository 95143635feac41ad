"""What a cluster will do, predicted before it is built: `pipespec plan`.

A pipeline of n stages decides a token when the row of the token before it leaves the last
stage, n steps after that row was fed. So with f(j) the step in which token j's row was fed, the
time between two tokens is f(j+1) - f(j) steps: the token's *delay*. It is never more than n, as
a token that was not drafted is fed when it is decided, and

    steps per token = sum over d from 0 to n of d * P(delay = d).

With one level per step (SpecPipe, PipeDec) a token was either drafted in time, delay 1, or not
at all, delay n. With h the share that was drafted this gives, in tokens per step,

    1 / (h + (1 - h) * n).

With `best_first` a token can also share its parent's batch (delay 0) or come late (2 to n - 1),
and no closed form is known: `simulate` drives the head's own scheduler (`pipespec.head.scheduler`)
against a synthetic draft of the stated accuracy. docs/planning.md has the derivation and its
limits. Everything here is pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pipespec.extras.emulation.synthetic_proposer import Accuracy
from pipespec.extras.plan.pipeline_times import Machine
from pipespec.extras.plan.recorded_draft import TextRecord
from pipespec.extras.plan.simulated_pipeline import (
    Rounds,
    SimulatedPipeline,
    Simulation,
    TokenArrival,
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
    on_token: Callable[[TokenArrival], None] = lambda arrival: None,
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
    pipeline = SimulatedPipeline(
        policy,
        machine,
        accuracy,
        rounds,
        num_tokens,
        seed,
        num_requests,
        max_rows,
        on_token=on_token,
    )
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
