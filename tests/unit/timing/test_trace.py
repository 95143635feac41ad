"""Where a rank's time goes, on a clock that the test turns."""

import json

from pipespec.timing.stats import empty_report, summarise
from pipespec.timing.trace import Timeline, write_chrome_trace
from tools.docs.glossary import glossary


class Ticks:
    """A clock that moves on by the next number of a list at each look."""

    def __init__(self, *steps: int):
        self.now, self.steps = 0, list(steps)

    def __call__(self) -> int:
        self.now += self.steps.pop(0)
        return self.now


def test_phases_add_up_and_become_trace_events(tmp_path):
    timeline = Timeline(record=True, clock=Ticks(10, 5, 1, 7))
    timeline.step = 3
    for _ in range(2):
        with timeline("compute"):
            pass
    totals, events = timeline.take()
    assert totals == {"compute": 12}
    assert events == [("compute", 10, 5, 3, {}), ("compute", 16, 7, 3, {})]
    assert timeline.take() == ({}, [])

    path = tmp_path / "trace.json"
    write_chrome_trace(path, [(2, "stage 2", events)])
    name, first, _ = json.loads(path.read_text())["traceEvents"]
    assert (name["ph"], name["tid"], name["args"]) == ("M", 2, {"name": "stage 2"})
    assert (first["name"], first["ts"], first["dur"]) == ("compute", 0.01, 0.005)
    assert first["args"] == {"step": 3}


def test_a_timeline_that_does_not_record_keeps_totals_alone():
    timeline = Timeline(clock=Ticks(0, 4))
    timeline.add_rows(committed=1)
    with timeline("prune"):
        pass
    assert timeline.take() == ({"prune": 4}, [])


def test_rows_of_a_step_become_a_counter_event_of_their_rank(tmp_path):
    timeline = Timeline(record=True, clock=Ticks(4000))
    timeline.add_rows(committed=1, draft=5, pruned=2)
    _, events = timeline.take()
    path = tmp_path / "trace.json"
    write_chrome_trace(path, [(2, "stage 2", events)])
    counter = json.loads(path.read_text())["traceEvents"][1]
    assert (counter["ph"], counter["name"], counter["ts"]) == ("C", "rows, rank 2", 4)
    assert counter["args"] == {"committed": 1, "draft": 5, "pruned": 2}


def test_statistics_of_a_request():
    ms = 1_000_000
    head = {
        "rank": 0,
        "replayed": 0,
        "token_ns": [20 * ms, 30 * ms, 30 * ms, 50 * ms],
        "hits": 3,
        "cached_tokens": 0,
        "counts": {"steps": 9, "rows": 40, "rounds": 12, "overruns": 0},
        "first_token": {"steps": 5, "rows": 20, "rounds": 4},
        "control_ns": 9 * ms,
        "features_ns": 18 * ms,
        "times": "4:1.5,30:2;0;0",
        "overlap": False,
    }
    stage = {
        "busy_ns": 30 * ms, "elapsed_ns": 60 * ms, "dropped": 4, "overruns": 1,
        "control_ns": 18 * ms, "attention": "triton",
        "times": "1:5.25,16:8;0.001;350",
    }  # fmt: skip
    stats = summarise(0, [stage | {"rank": 1}, head])
    documented = {
        name for group in glossary().values() for _, _, names, _ in group for name in names
    }
    assert documented == {*stats, "emulated", "synthetic", "lossy", "seed"}
    assert stats["ttft_ms"] == 20
    assert stats["tbt_ms"]["mean"] == 10
    assert stats["tbt_ms"]["p50"] == 10
    assert stats["tokens_per_s"] == 100
    assert stats["tokens_per_step"] == 3 / 4
    assert stats["step_ms"] == 7.5
    assert stats["rows_per_step"] == 5
    assert stats["draft_rounds_per_step"] == 2
    assert stats["hit_rate"] == 0.75
    assert stats["stage_busy"] == [0.5]
    assert stats["pruned_rows"] == 4
    assert stats["control_ms_per_step"] == 1.5
    assert stats["features_ms_per_step"] == 2
    assert stats["overruns"] == 1
    assert stats["attention"] == ["triton"]
    times = {"points": ((1, 5.25), (16, 8.0)), "slot_ms": 0.001, "slots": 350.0}
    assert stats["stage_times"] == [times]
    assert stats["round_times"] == ((4, 1.5), (30, 2.0))
    assert stats["overlap"] is False
    # The same after a recovery at 15 ms, for which eight tokens were decided before.
    later = head | {"replayed": 8, "token_ns": [15 * ms] * 8 + head["token_ns"]}
    resumed = summarise(0, [stage | {"rank": 1}, later])
    assert resumed == stats | {"ttft_ms": 15}


def test_a_request_of_one_token_has_no_rates():
    head = empty_report(0) | {"token_ns": [5]}
    head["counts"] |= {"steps": 2, "rows": 3}
    head["first_token"] = head["counts"]
    stage = empty_report(1) | {"busy_ns": 1, "elapsed_ns": 4, "attention": "sdpa"}
    stats = summarise(0, [head, stage])
    assert stats["tokens_per_step"] is None
    assert stats["tbt_ms"] == {"mean": None, "p50": None, "p99": None}
