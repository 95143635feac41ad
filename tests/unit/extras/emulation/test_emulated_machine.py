import math

import pytest

from pipespec.errors import ConfigError
from pipespec.extras.emulation.link import EmulatedLink
from pipespec.extras.emulation.machine import EmulatedMachine
from pipespec.timing.clock import monotonic_ns, wait_until


def test_a_stage_lasts_as_its_rows_say():
    pace = EmulatedMachine(["1:10 64:10 65:20"], scale=2)
    assert [pace.min_stage_ms(3, 0, rows) for rows in (0, 1, 64, 65)] == [0, 20, 20, 40]


def test_stages_may_differ():
    pace = EmulatedMachine(["10", "30"], draft_ms=4)
    assert [pace.min_stage_ms(rank, 0, 1) for rank in (1, 2)] == [10, 30]
    with pytest.raises(ConfigError, match=r"times of 2 stages, but cluster.stages is 3"):
        pace.check(3)


def test_jitter_repeats_itself_and_has_the_mean_that_was_asked_for():
    pace = EmulatedMachine(10.0, jitter_ms=3)
    times = [pace.min_stage_ms(1, step, 8) for step in range(4000)]
    assert times == [pace.min_stage_ms(1, step, 8) for step in range(4000)]
    assert min(times) >= 10
    assert sum(times) / len(times) == pytest.approx(13, abs=0.2)


def test_a_message_takes_its_latency_and_its_size():
    # 64 rows of 16 KiB are 8.4 megabit.
    assert EmulatedLink(latency_ms=0.1, gbit_per_s=1).ms(64) == pytest.approx(0.1 + 8.388608)
    assert EmulatedLink(latency_ms=10).ms(64) == 10
    assert not EmulatedLink()


def test_work_that_took_longer_than_emulated_is_reported():
    assert not wait_until(monotonic_ns() - 10**9, 1.0)
    assert wait_until(monotonic_ns(), 0.5)


def test_draft_round_of_more_nodes_takes_longer_if_its_times_say_so():
    pace = EmulatedMachine(draft_ms="1:20 4:80")
    start = monotonic_ns()
    assert pace.wait_for_draft_round(start, nodes=3)
    assert monotonic_ns() - start >= 60e6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stage_ms": []}, "emulate.stage_ms is an empty list"),
        ({"stage_ms": ["64:1 1:2"]}, "rising numbers"),
        ({"stage_ms": ["soon"]}, "'soon' is no time of a stage"),
        ({"stage_ms": -1.0}, "from 0 to 1000000"),
        ({"stage_ms": 1e300}, "is 1e\\+300"),
        ({"draft_ms": -1.0}, "emulate.draft_ms: A stage's time in ms is -1.0"),
        ({"scale": 0.0}, "emulate.scale is 0"),
        (
            {"experts": [256.0, 8.5, 0.5]},
            r"emulate.experts is \[256.0, 8.5, 0.5\], but must be how",
        ),
        ({"experts": [math.inf, 8.0, 0.5]}, "emulate.experts is .*, but must be how"),
        ({"experts": [8.0, 9.0, 0.5]}, "experts that a row chooses .* from 1 to 8"),
        ({"experts": [8.0, 2.0, 1.5]}, "share of its time .* from 0 to 1"),
    ],
)
def test_what_is_no_pace(settings, message):
    with pytest.raises(ConfigError, match=message):
        EmulatedMachine(**settings)


def test_a_stage_of_experts_reads_those_that_its_rows_choose():
    machine = EmulatedMachine(stage_ms=10.0, experts=[4.0, 2.0, 0.8])
    # One row reads 2 of 4 experts, two rows 3 on average, and many rows all: twice those of one.
    found = [machine.min_stage_ms(1, 0, rows) for rows in (0, 1, 2, 256)]
    assert found == pytest.approx([0, 10, 14, 18])
