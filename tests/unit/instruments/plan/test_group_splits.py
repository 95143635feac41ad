"""Which devices of a host compute the draft, and which the target."""

from __future__ import annotations

import json

import pytest

from pipespec.cli.main import main
from pipespec.errors import ConfigError
from pipespec.head.policies.best_first import BestFirst
from pipespec.instruments.emulation.synthetic_proposer import Accuracy
from pipespec.instruments.plan.advice import DecodingMethod, predict_all
from pipespec.instruments.plan.group_splits import (
    Division,
    divisions,
    layouts_of,
    machine_by_devices,
)

ACCURACY = Accuracy({1: 0.81, 8: 0.99}, 0.8)
FLAT = {1: 2.0, 4: 2.0}
HALVED = {1: 40.0, 2: 20.0, 4: 10.0}


def test_every_division_uses_all_devices_once() -> None:
    assert [*divisions(4)] == [
        Division(1, 3, 1),
        Division(1, 1, 3),
        Division(2, 2, 1),
        Division(2, 1, 2),
        Division(3, 1, 1),
    ]
    assert all(sum(each.sizes) == 6 for each in divisions(6))
    assert [each.members for each in divisions(4, one_stage=True)] == [3, 2, 1]


@pytest.mark.parametrize(("target_ms", "draft_ms", "best"), [(HALVED, FLAT, 1), (FLAT, HALVED, 3)])
def test_devices_go_where_they_shorten_the_time_most(
    target_ms: dict[int, float], draft_ms: dict[int, float], best: int
) -> None:
    found = layouts_of(
        divisions(4, one_stage=True), lambda each: machine_by_devices(target_ms, draft_ms, each)
    )
    layouts = [layout for _, layout in found.values()]
    method = DecodingMethod("best_first", BestFirst(8, 8), "auto")
    predicted = predict_all(layouts, [method], ACCURACY, num_tokens=200)
    division, _ = found[predicted[0].layout]
    assert division.draft == best
    assert len(predicted) == 3
    assert [each.tbt_ms for each in predicted] == sorted(each.tbt_ms for each in predicted)


def test_divisions_that_do_not_fit_are_left_out() -> None:
    found = layouts_of(
        divisions(4, one_stage=True),
        lambda each: machine_by_devices(FLAT, FLAT, each) if each.draft == 2 else None,
    )
    assert [each for each, _ in found.values()] == [Division(2, 1, 2)]


def test_times_between_given_sizes_are_interpolated() -> None:
    machine = machine_by_devices(HALVED, HALVED, Division(2, 1, 3))
    assert machine.stages[0].ms(8) == 15.0
    assert machine.draft_ms == 20.0
    with pytest.raises(ConfigError, match="times of 1 to 4 devices, but 5"):
        machine_by_devices(HALVED, HALVED, Division(1, 1, 5))


def test_command_divides_devices_by_given_times(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--devices", "4", "--tokens", "100", "policy.width=8"]
    times = ["target_group_ms=1:40,2:20,4:10", "draft_group_ms=1:2,4:2"]
    assert main([*asked, *times]) == 0
    assert "cluster.tensor_parallel=3 cluster.draft_tensor_parallel=1" in capsys.readouterr().out
    assert main([*asked, "--json", *times]) == 0
    first, *_ = json.loads(capsys.readouterr().out)["predictions"]
    assert first["layout"] == "1 + 1 x 3"
    for wrong, said in (
        (times[:1], "needs target_group_ms and draft_group_ms"),
        ([*times, "stages=2"], "takes no setting 'stages=2'"),
        (["target_group_ms=2:a", times[1]], "target_group_ms is '2:a'"),
        (["--devices", "0", *times], "--devices is 0"),
    ):
        assert main([*asked, *wrong]) == 2
        assert said in capsys.readouterr().err
