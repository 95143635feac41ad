import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.papers import intervals, page
from benchmarks.papers.__main__ import experiments, simulated_tables
from benchmarks.papers.cells import BATCHES, Cell, Run, Runs
from benchmarks.papers.intervals import Interval
from benchmarks.papers.machines import (
    in_pairs,
    one_stage,
    papers_pipeline,
    two_servers,
    vllm_pipeline,
)
from benchmarks.papers.missing import MISSING
from benchmarks.papers.pipedec import machine
from benchmarks.papers.swiftspec import interpolated
from benchmarks.papers.tables import AHEAD, BEHIND, REACHED, compared
from pipespec.extras.plan.simulation import TokenArrival
from pipespec.head.policies.best_first import BestFirst
from pipespec.head.policies.root import Root

# Of Student's distribution, from printed tables.
QUANTILES = {4: 2.776, 9: 2.262, 19: 2.093, 44: 2.015, 10**6: 1.960}
# What must be compared, or listed as impossible.
WANTED = {
    "SpecPipe": (*map(str, range(9, 18)), "Table 1", "Table 3", "Table 4"),
    "PipeDec": (*map(str, range(3, 9)),),
    "SwiftSpec": ("2", "7", "8", "9", "Table 3", "Table 6", "Table 7"),
    "Meta": ("1", "3", "4b", "6", "7", "8", "9", "Table 1", "Table 2"),
}


@pytest.mark.parametrize(("freedom", "quantile"), QUANTILES.items())
def test_students_quantile_is_that_of_the_tables(freedom: int, quantile: float) -> None:
    assert intervals.student(freedom) == pytest.approx(quantile, abs=2e-3)


def correlated(random: np.random.Generator, count: int) -> Iterator[float]:
    """Values around 10, each of which depends on the one before."""
    value = 0.0
    for noise in random.normal(size=count).tolist():
        value = 0.8 * value + noise
        yield 10 + value


def test_batch_means_cover_the_mean_of_dependent_values_95_times_of_100() -> None:
    random = np.random.default_rng(1)
    runs = 300
    covered = 0
    for _ in range(runs):
        found = intervals.mean(intervals.batches([*correlated(random, 2000)], BATCHES).mean(1))
        covered += found.low <= 10 <= found.high
    assert 0.91 <= covered / runs <= 0.99


def test_what_two_methods_have_in_common_does_not_widen_the_interval_of_their_ratio() -> None:
    random = np.random.default_rng(0)
    texts = random.uniform(1, 5, BATCHES)
    ours = texts * random.uniform(0.99, 1.01, BATCHES)
    paired = intervals.ratio(2 * texts, ours)
    independent = intervals.ratio(2 * texts, random.permutation(ours))
    assert paired.low < 2 < paired.high
    assert paired.high - paired.low < 0.1 < independent.high - independent.low


def test_run_leaves_out_its_first_batch_and_keeps_requests_apart() -> None:
    # Two requests; a token of each every 10 ms, the first batch slower.
    arrivals = [
        TokenArrival(request, 1000.0 * (step == 0) + 10.0 * step, 1, step % 2 == 0)
        for step in range(2 * (BATCHES + 1))
        for request in (0, 1)
    ]
    run = Run.of(arrivals, 4, 2, rows_per_step=2.0)
    assert run.tokens == 4 * BATCHES
    assert run.tbt == Interval(10.0, 10.0, 10.0)
    assert run.tokens_per_second.value == pytest.approx(200)
    assert run.hit_rate.value == 0.5
    assert {len(gaps) for gaps in run.gaps} == {4}
    assert run.percentile(99) == Interval(10.0, 10.0, 10.0)


@pytest.mark.slow
def test_plain_pipeline_takes_the_printed_time_without_an_interval() -> None:
    slow = Cell(Root(), papers_pipeline()).run()
    quick = Cell(Root(), vllm_pipeline()).run()
    assert str(slow.tbt) == "302.4 [302.4, 302.4]"
    assert quick.tbt.value == pytest.approx(181.41, rel=0.002)
    assert quick.over(slow).value == pytest.approx(302.4 / 181.6)


@pytest.mark.slow
def test_cells_of_an_interrupted_run_are_kept_unless_the_code_is_another(tmp_path: Path) -> None:
    file = tmp_path / "cells.jsonl"
    cell = Cell(BestFirst(8, 8), one_stage(10.0, 3.0), tokens=100)
    first = Runs(1.0, file, "a")
    assert [*first.simulate([cell], jobs=1)] == [0]
    again = Runs(1.0, file, "a")
    assert [*again.simulate([cell], jobs=1)] == []
    assert again[cell].as_json() == first[cell].as_json()
    assert again[cell].percentile(90) == first[cell].percentile(90)
    for changed in (Runs(1.0, file, "b"), Runs(0.5, file, "a")):
        assert [*changed.simulate([cell], jobs=1)] == [0]


def test_machines_have_the_times_of_the_whole_model() -> None:
    whole = [machine(stages).plain_tbt_ms for stages in (7, 14)]
    assert whole[0] == pytest.approx(whole[1]) == pytest.approx(302.4, rel=0.01)
    assert in_pairs(machine(14)).stages[1].ms(32) == pytest.approx(44.2, rel=0.01)
    mixed = two_servers(papers_pipeline())
    assert mixed.stages[0].ms(1) == 37.8 > mixed.stages[-1].ms(1)
    assert mixed.hop.ms(64) == pytest.approx(0.05 + 64 * 16384 * 8 / 1e7)
    assert interpolated({1: 2.0, 4: 8.0}, 2) == 4.0


@pytest.mark.parametrize(
    ("ours", "higher", "lower"),
    [
        (Interval(7.0, 6.5, 7.5), AHEAD, BEHIND),
        (Interval(5.0, 4.5, 5.5), REACHED, REACHED),
        (Interval(5.6, 5.4, 5.8), REACHED, REACHED),
        (Interval(4.0, 3.9, 4.1), BEHIND, AHEAD),
    ],
)
def test_verdict_is_of_the_whole_interval(ours: Interval, higher: str, lower: str) -> None:
    printed = (4.19, 5.53)
    assert compared("Fig. 11", "speed-up", printed, ours).verdict == higher
    found = compared("Fig. 11", "time", printed, ours, lower_is_better=True)
    assert (found.verdict, found.paper) == (lower, "4.19 to 5.53")


def expanded(listed: str) -> set[str]:
    """The figures that a text such as "Fig. 4b, 6; Tables 1, 3" names."""
    found = set()
    for kind, numbers in re.findall(r"(Fig|Table)s?\.? ((?:\d+b?(?:, )?)+)", listed):
        found |= {f"{kind}{'.' * (kind == 'Fig')} {n}" for n in numbers.strip(", ").split(", ")}
    return found


def test_every_figure_is_compared_or_listed_as_impossible() -> None:
    compared_figures = [(each.paper, figure) for each in experiments() for figure in each.figures]
    compared_figures += [(each.paper, each.figure) for each in MISSING]
    for paper, figures in WANTED.items():
        for figure in figures:
            name = figure if figure.startswith("Table") else f"Fig. {figure}"
            assert any(of == paper and name in expanded(found) for of, found in compared_figures), (
                f"{paper} {name}"
            )


@pytest.mark.slow
def test_experiments_make_their_rows_from_few_tokens() -> None:
    (chosen,) = experiments(["meta_tpc"])
    runs = Runs(share=0.01)
    assert [*runs.simulate(chosen.cells, jobs=1)][-1] == 0
    (table,) = simulated_tables([chosen], runs)
    assert table["paper"] == "Meta" and table["rows"][0]["verdict"]
    assert all(row["low"] <= row["value"] <= row["high"] for row in table["rows"][:4])


def test_page_has_the_tables_of_the_stored_result() -> None:
    text = page.PAGE.read_text()
    assert text == page.updated(text), "run python -m benchmarks.papers.page"
    assert {found["name"] for found in page.BLOCK.finditer(text)} == set(
        page.blocks(json.loads(page.RESULT.read_text()))
    )
