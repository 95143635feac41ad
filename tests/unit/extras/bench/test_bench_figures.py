from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipespec.client import answers
from pipespec.client.model_info import ModelInfo
from pipespec.cluster.decide import decide
from pipespec.config.compose import compose
from pipespec.core import SamplingParams
from pipespec.extras.bench.figures import BenchResult, RequestResult
from pipespec.timing.stats import PERIOD, empty_report
from tests.helpers.figures import LABELS
from tests.helpers.figures import request as made_up


def request(
    benchmark: str,
    token_ms: list[float],
    *,
    started_ms: float = 0.0,
    periods: Sequence[dict[str, int]] = (),
    draft_overruns: int = 0,
    **stats: Any,
) -> RequestResult:
    how = {"started_ms": started_ms, "periods": periods, "draft_overruns": draft_overruns}
    return made_up(token_ms, benchmark=benchmark, stats=stats, **how)


def period(since: int, elapsed: int, busy: int, steps: int, rows: int = 0) -> dict[str, int]:
    """What a stage says of the time since it was last without a request."""
    return dict(zip(PERIOD, (since, elapsed, busy, steps, rows, steps), strict=True))


def figures(*requests: RequestResult, duration_s: float = 2.0) -> dict[str, Any]:
    return BenchResult(list(requests), duration_s, 1, LABELS).summary()


def test_tokens_of_one_verdict_have_one_itl_and_their_own_tbt() -> None:
    got = figures(request("a", [100.0, 130.0, 130.0, 190.0]))
    assert got["mean_ttft_ms"] == 100
    assert got["mean_itl_ms"] == pytest.approx(45)  # 30 and 60
    assert got["mean_tbt_ms"] == pytest.approx(30)  # 30, 0 and 60
    assert got["mean_tpot_ms"] == pytest.approx(30)
    assert got["mean_e2el_ms"] == 190
    assert got["median_tbt_ms"] == got["p50_tbt_ms"] == 30
    assert got["accepted_per_batch"] == pytest.approx(4 / 3)


def test_tpot_weighs_requests_alike_and_tbt_tokens() -> None:
    got = figures(request("a", [0.0, 10.0]), request("a", [0.0, 40.0, 80.0, 120.0]))
    assert got["mean_tpot_ms"] == pytest.approx((10 + 40) / 2)
    assert got["mean_tbt_ms"] == pytest.approx((10 + 3 * 40) / 4)
    assert got["p90_ttft_ms"] == 0


def test_throughput_counts_over_the_whole_duration() -> None:
    got = figures(request("a", [1.0, 2.0]), request("a", [1.0, 2.0, 3.0]), duration_s=5.0)
    assert (got["completed"], got["total_input_tokens"], got["total_output_tokens"]) == (2, 6, 5)
    assert got["request_throughput"] == pytest.approx(2 / 5)
    assert got["output_throughput"] == pytest.approx(1)
    assert got["total_token_throughput"] == pytest.approx(11 / 5)


def test_rates_weigh_what_they_count() -> None:
    got = figures(
        # 2 tokens in 4 steps, of which 2 of 3 were hit; then 4 in 2 and 0 of 5.
        request("a", [1.0, 2.0, 3.0], tokens_per_step=0.5, hit_rate=2 / 3, steps=10),
        request(
            "a",
            [1.0, 2.0, 2.0, 3.0, 3.0],
            tokens_per_step=2.0,
            hit_rate=0.0,
            steps=30,
            rows_per_step=8.0,
        ),
    )
    assert got["tokens_per_step"] == pytest.approx(6 / 6)
    assert got["hit_rate"] == pytest.approx(2 / 8)
    assert got["rows_per_step"] == pytest.approx((4 * 10 + 8 * 30) / 40)


def test_a_step_that_served_several_requests_counts_once_for_the_pipeline() -> None:
    got = figures(
        # The first two were open at the same time, and the third after a pause.
        request("a", [1.0, 2.0], periods=[period(5, 20, 10, 4, 30), period(7, 20, 4, 4)]),
        request(
            "a",
            [1.0, 2.0, 3.0],
            periods=[period(5, 40, 30, 9, 60), period(7, 40, 8, 9)],
            draft_overruns=2,
        ),
        request("a", [1.0], periods=[period(90, 60, 20, 1, 4), period(95, 60, 12, 1)]),
    )
    assert got["pipeline_steps"] == 10
    assert got["pipeline_tokens_per_step"] == pytest.approx(6 / 10)
    assert got["pipeline_rows_per_step"] == pytest.approx(64 / 10)
    assert got["stage_busy"] == pytest.approx([50 / 100, 20 / 100])
    assert got["overruns"] == 10 + 10 + 2, "one per step of a stage, and the draft's"


def test_peaks_are_those_of_the_best_second_and_of_any_moment() -> None:
    got = figures(
        request("a", [500.0, 900.0, 2500.0], started_ms=100.0),
        request("a", [500.0, 1200.0], started_ms=300.0),
        request("a", [10.0, 20.0], started_ms=1500.0),
    )
    # Since the first was handed in: 500, 700, 900, then 1400, 1410, 1420, then 2500.
    assert got["max_output_tokens_per_s"] == 3
    assert got["max_concurrent_requests"] == 2, "the second ends when the third comes"


def test_load_is_reported_with_the_names_of_vllm() -> None:
    one = [request("a", [1.0])]
    got = BenchResult(one, 1.0, None, LABELS, request_rate=2.5).summary()
    assert (got["max_concurrency"], got["request_rate"]) == (None, 2.5)
    assert BenchResult(one, 1.0, 8, LABELS).summary()["request_rate"] == "inf"


def test_a_single_token_has_no_time_between_tokens() -> None:
    got = figures(request("a", [5.0], tokens_per_step=None, rows_per_step=None))
    for kind in ("tpot", "itl", "tbt"):
        assert got[f"mean_{kind}_ms"] is got[f"p99_{kind}_ms"] is None
    assert got["tokens_per_step"] is None
    assert got["rows_per_step"] is None
    assert got["mean_e2el_ms"] == 5


def test_each_benchmark_has_its_own_row() -> None:
    result = BenchResult(
        [request("b", [1.0, 11.0]), request("a", [1.0, 21.0]), request("b", [1.0, 31.0])],
        1.0,
        1,
        LABELS,
    )
    rows = result.by_benchmark()
    assert [(row["benchmark"], row["completed"]) for row in rows] == [("b", 2), ("a", 1)]
    assert [row["mean_tbt_ms"] for row in rows] == [pytest.approx(20), pytest.approx(20)]
    assert [row["total_output_tokens"] for row in rows] == [4, 2]


def reports() -> list[dict[str, Any]]:
    """Of a head and one stage: tokens after 10, 20 and 40 ms, in two steps."""
    head = empty_report(0) | {"token_ns": [10_000_000, 20_000_000, 40_000_000], "times": "4:8;0;0"}
    head["counts"] |= {"steps": 3, "rows": 3}
    head["first_token"] = head["counts"] | {"steps": 1}
    stage = {"busy_ns": 5, "elapsed_ns": 10, "control_ns": 6_000_000, "attention": "sdpa"}
    return [head, empty_report(1) | stage | {"times": "1:4,8:12;0.02;100"}]


def served(*settings: str) -> ModelInfo:
    return ModelInfo.of(decide(compose(settings)))


def test_times_are_divided_by_the_scale_of_what_is_emulated_and_shares_are_not() -> None:
    plain = answers.statistics(served(), 0, reports())
    paced = answers.statistics(
        served("emulate=fixed", "emulate.stage_ms=1", "emulate.scale=4"), 0, reports()
    )
    linked = answers.statistics(
        served("emulate_link.latency_ms=1", "emulate.scale=4"), 0, reports()
    )
    assert paced == linked
    assert (plain["ttft_ms"], paced["ttft_ms"]) == (10, 2.5)
    assert (plain["tbt_ms"]["mean"], paced["tbt_ms"]["mean"]) == (15, 3.75)
    assert (plain["step_ms"], paced["step_ms"]) == (15, 3.75)
    assert (plain["control_ms_per_step"], paced["control_ms_per_step"]) == (1, 0.25)
    assert paced["tokens_per_s"] == pytest.approx(4 * plain["tokens_per_s"])
    assert paced["stage_times"] == [
        {"points": ((1, 1.0), (8, 3.0)), "slot_ms": 0.005, "slots": 100.0}
    ]
    assert paced["round_times"] == ((4, 2.0),)
    for name in ("steps", "tokens_per_step", "stage_busy", "hit_rate"):
        assert paced[name] == plain[name]


def test_a_scale_of_nothing_emulated_changes_no_time() -> None:
    scaled = served("emulate.scale=4")
    assert answers.statistics(scaled, 0, reports()) == answers.statistics(served(), 0, reports())
    assert answers.labels(scaled, SamplingParams())["emulated"] is False


def test_guesses_made_from_the_answer_are_labelled(tmp_path: Path) -> None:
    truth = tmp_path / "truth.jsonl"
    truth.write_text("[1, 2]\n")
    told = answers.labels(served("proposer=synthetic", f"proposer.truth={truth}"), SamplingParams())
    assert told["synthetic"] and not told["emulated"]
    assert not answers.labels(served(), SamplingParams())["synthetic"]
