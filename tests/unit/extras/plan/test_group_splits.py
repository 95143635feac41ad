"""Which devices of a host compute the draft, and which the target."""

from __future__ import annotations

import pytest

from pipespec.extras.emulation.machine import TimeCurve
from pipespec.extras.emulation.synthetic_proposer import Accuracy
from pipespec.extras.plan.advice import DecodingMethod, Division, divisions, predict_all
from pipespec.extras.plan.pipeline_times import Machine
from pipespec.head.policies.best_first import BestFirst

ACCURACY = Accuracy({1: 0.81, 8: 0.99}, 0.8)
FLAT = {1: 2.0, 2: 2.0, 3: 2.0}
HALVED = {1: 40.0, 2: 20.0, 3: 15.0}


def machine(
    target_ms: dict[int, float], draft_ms: dict[int, float], division: Division
) -> Machine | None:
    """The times of a division whose target is one group."""
    if division.stages > 1:
        return None
    stage = TimeCurve(((1, target_ms[division.members]),))
    return Machine((stage,), draft_ms=draft_ms[division.draft])


def test_every_division_uses_all_devices_once() -> None:
    assert [*divisions(4)] == [
        Division(1, 3, 1),
        Division(1, 1, 3),
        Division(2, 2, 1),
        Division(2, 1, 2),
        Division(3, 1, 1),
    ]
    assert all(sum(each.sizes) == 6 for each in divisions(6))


@pytest.mark.parametrize(("target_ms", "draft_ms", "best"), [(HALVED, FLAT, 1), (FLAT, HALVED, 3)])
def test_devices_go_where_they_shorten_the_time_most(
    target_ms: dict[int, float], draft_ms: dict[int, float], best: int
) -> None:
    found = {}
    for each in divisions(4):
        if (times := machine(target_ms, draft_ms, each)) is not None:
            layout = each.layout(times)
            found[layout.label] = each, layout
    layouts = [layout for _, layout in found.values()]
    method = DecodingMethod("best_first", BestFirst(8, 8), "auto")
    predicted = predict_all(layouts, [method], ACCURACY, num_tokens=200)
    division, _ = found[predicted[0].layout]
    assert division.draft == best
    assert len(predicted) == 3
    assert [each.tbt_ms for each in predicted] == sorted(each.tbt_ms for each in predicted)
