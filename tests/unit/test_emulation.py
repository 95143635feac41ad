"""Emulated times: of stages by rows, of links by size, and what is refused."""

from __future__ import annotations

import pytest

from pipespec.clock import monotonic_ns
from pipespec.config.choices import options
from pipespec.config.compose import compose
from pipespec.emulation import Link, Pace, wait_until
from pipespec.errors import ConfigError


def test_a_stage_lasts_as_its_rows_say():
    pace = Pace(["1:10 64:10 65:20"], scale=2)
    assert [pace.of_stage(3, 0, rows) for rows in (0, 1, 64, 65)] == [0, 20, 20, 40]


def test_stages_may_differ():
    pace = Pace(["10", "30"], draft_ms=4)
    assert [pace.of_stage(rank, 0, 1) for rank in (1, 2)] == [10, 30]
    assert pace.of_round == 4
    with pytest.raises(ConfigError, match=r"times of 2 stages, but cluster.stages is 3"):
        pace.check(3)


def test_jitter_repeats_itself_and_has_the_mean_that_was_asked_for():
    pace = Pace(10.0, jitter_ms=3)
    times = [pace.of_stage(1, step, 8) for step in range(4000)]
    assert times == [pace.of_stage(1, step, 8) for step in range(4000)]
    assert min(times) >= 10
    assert sum(times) / len(times) == pytest.approx(13, abs=0.2)


def test_a_message_takes_its_latency_and_its_size():
    # 64 rows of 16 KiB are 8.4 megabit.
    assert Link(latency_ms=0.1, gbit_per_s=1).ms(64) == pytest.approx(0.1 + 8.388608)
    assert Link(latency_ms=10).ms(64) == 10
    assert not Link()


def test_nothing_is_held_that_is_late():
    assert not wait_until(monotonic_ns() - 10**9, 1.0)
    assert wait_until(monotonic_ns(), 0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stage_ms": []}, "pace.stage_ms is an empty list"),
        ({"stage_ms": ["64:1 1:2"]}, "rising numbers"),
        ({"stage_ms": ["soon"]}, "'soon' is no time of a stage"),
        ({"stage_ms": -1.0}, "from 0 to 1000000"),
        ({"stage_ms": 1e300}, "is 1e\\+300"),
        ({"draft_ms": -1.0}, "pace.draft_ms is -1.0"),
        ({"scale": 0.0}, "pace.scale is 0"),
    ],
)
def test_what_is_no_pace(settings, message):
    with pytest.raises(ConfigError, match=message):
        Pace(**settings)


@pytest.mark.parametrize("name", options("pace"))
def test_every_profile_can_be_chosen(name):
    stages = {"mixed_21": 21, "rtx3090_14": 14}.get(name, 8)
    config = compose([f"pace={name}", f"cluster.stages={stages}", "link=10gbe"])
    assert bool(config.pace) is (name != "none")
    assert bool(config.link)


def test_a_profile_for_other_stages_is_refused():
    with pytest.raises(ConfigError, match=r"times of 21 stages, but cluster.stages is 8"):
        compose(["pace=mixed_21", "cluster.stages=8"])
