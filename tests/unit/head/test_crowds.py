"""What a client with many answers takes from another one, with the scheduler on a clock."""

from collections import defaultdict
from dataclasses import replace
from functools import cache

import pytest

from pipespec.config.compose import compose
from pipespec.extras.emulation.machine import TimeCurve
from pipespec.extras.emulation.synthetic_proposer import USUAL
from pipespec.extras.plan.pipeline_times import Machine
from pipespec.extras.plan.simulation import SimulatedPipeline

pytestmark = pytest.mark.slow

TOKENS = 120  # of the client whose tokens are timed
LAST = TOKENS // 4  # from there on they are
# Milliseconds of a stage by rows, and of a draft round.
MACHINES = {
    "rows cost nothing": ("1:37.8 64:37.8 65:75.6 128:75.6", 17),
    "64 rows cost twice one": ("1:10 64:20 128:30", 5),
    "a row costs as much as another": ("1:2.3 4:3.4 16:8 64:26 128:50", 2),
}


@cache
def decoded(machine: str, answers: int, policy: str = "best_first") -> tuple[float, float]:
    """Milliseconds between the tokens of a client beside so many answers of another tenant, and
    how many of their tokens come in a second."""
    stage_ms, draft_ms = MACHINES[machine]
    times = defaultdict[int, list[float]](list)
    pipeline = SimulatedPipeline(
        compose(["model=demo", "proposer=suffix", f"policy={policy}"]).policy,
        Machine((TimeCurve.parse(stage_ms),) * 4, draft_ms=draft_ms),
        USUAL,
        rounds="auto",
        num_tokens=2 * TOKENS * (answers + 1),
        num_requests=answers + 1,
        max_rows=64,
        on_token=lambda token: times[token.request].append(token.ms),
    )
    for each in pipeline.scheduler.admission.waiting:
        each.request = replace(each.request, tenant="crowd" if each.request.id else "client")
    while len(times[0]) < TOKENS:
        pipeline.step()
    took_ms = times[0][-1] - times[0][LAST]
    beside = sum(ms > times[0][LAST] for each in range(1, answers + 1) for ms in times[each])
    return took_ms / (len(times[0]) - 1 - LAST), 1000 * beside / took_ms


@pytest.mark.parametrize("answers", [1, 63])
@pytest.mark.parametrize("machine", MACHINES)
def test_answers_of_another_client_slow_one_down_by_half_at_most(machine: str, answers: int):
    alone, _ = decoded(machine, 0)
    beside, theirs = decoded(machine, answers)
    assert beside <= 1.5 * alone
    if answers > 1:
        assert theirs >= 2 * 1000 / beside, "and a crowd gets what is left"


@pytest.mark.parametrize("policy", ["root", "level", "static_tree"])
def test_crowd_and_client_decode_with_every_policy(policy: str):
    beside, theirs = decoded("a row costs as much as another", 20, policy=policy)
    assert beside <= 1.5 * decoded("a row costs as much as another", 0, policy=policy)[0]
    assert theirs > 0
