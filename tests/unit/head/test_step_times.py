"""What steps take by their rows, and which way of decoding is the fastest, as learnt from steps."""

import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipespec.extras.emulation.machine import TimeCurve
from pipespec.extras.emulation.synthetic_proposer import Accuracy
from pipespec.extras.plan.pipeline_times import Machine
from pipespec.extras.plan.simulation import SimulatedPipeline
from pipespec.head.decoding_modes import (
    BESIDE,
    BETWEEN,
    BLOCKS,
    ONE_BESIDE,
    ONE_TREE,
    PLAIN,
    TRIAL,
    Cost,
    LearntSteps,
    Modes,
    deep,
)
from pipespec.head.policies.best_first import BestFirst
from pipespec.head.policies.policy import SpeculationPolicy, TargetBatch
from pipespec.head.policies.static_tree import StaticTree
from pipespec.head.row_budget import Selection
from pipespec.head.step_stats import GROWTH, StepStats
from pipespec.head.step_times import COMPARED, KNOWN, LearntTimes, SizeTimes, SizeTrials
from pipespec.timing.batch_times import Points

FLAT = ((1, 3.0), (64, 4.0))  # as stages have measured it, one by one
# 8 rows of Q4_K cost 6.4 times one row on two cores with AVX2.
BEST_FIRST = BestFirst(16)
DEAR = ((1, 13.4), (2, 19.5), (4, 31.2), (8, 52.9), (16, 83.6), (64, 324.8))


def times(*steps: tuple[float, float], known: tuple = (), stages: tuple = ()) -> SizeTimes:
    made = SizeTimes(known)
    made.set_stage_times(stages)
    for rows, ms in steps:
        made.add(rows, ms)
    return made


def test_stage_times_are_the_first_guess_and_fade_as_steps_come_in():
    assert times(stages=FLAT).points == FLAT
    once = times((1, 13.0), stages=FLAT)
    assert 3 < once.at(1) <= 13
    assert once.at(64) == pytest.approx(14), "what a step takes beside its stages is added"
    often = times(*[(1, 13.0), (64, 50.0)] * 32, stages=FLAT)
    assert often.at(1) == pytest.approx(13, rel=0.1)
    assert often.at(64) == pytest.approx(50, rel=0.1)


@pytest.mark.parametrize(
    ("known", "stages", "least"), [(((1.0, 92.0),), (), 92), ((), ((1, 38.0), (16, 400.0)), 67)]
)
def test_a_large_batch_says_little_about_small_ones(known: Points, stages: Points, least: float):
    """Rows of a batch beside a draft cost more: so does the first one, but no more than others."""
    found = times(*[(10, 450.0)] * 8, known=known, stages=stages)
    assert found.at(1) == pytest.approx(least, rel=0.02)


def test_steps_that_lasted_long_by_chance_do_not_count():
    usual = times(*[(4, 10.0)] * 16)
    assert times(*[(4, 10.0)] * 15, (4, 900.0)).at(4) == pytest.approx(usual.at(4))


@given(
    st.lists(st.tuples(st.floats(0.1, 64), st.floats(0.1, 99)), min_size=1),
    st.sampled_from([(), FLAT, ((1, 900.0), (4, 2000.0), (64, 18000.0))]),
)
def test_learnt_times_are_positive_and_never_fall_with_the_rows(
    steps: list[tuple[float, float]], stages: Points
):
    """Also where stages were measured while the machine was busy."""
    points = times(*steps, stages=stages).points
    assert [rows for rows, _ in points] == sorted({rows for rows, _ in points})
    assert [ms for _, ms in points] == sorted(ms for _, ms in points)
    assert points[0][1] > 0


def test_an_earlier_run_gives_the_shape_and_the_steps_of_this_one_the_speed():
    slower = times(*[(2, 40.0)] * 8, known=((1.0, 10.0), (2.0, 20.0), (8.0, 80.0)))
    assert slower.at(8) == pytest.approx(160)
    assert slower.is_known(8)
    assert not slower.is_known(32)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_stages_that_took_no_time_do_not_divide_steps_by_zero():
    made = times((1, 13.0), (64, 50.0), stages=((1, 0.0), (64, 0.0)))
    assert 0 < made.at(1) < made.at(64) <= 50
    assert times((10, 450.0), stages=((1, 0.0), (16, 400.0))).at(1) > 0
    assert times(stages=((1, 0.0), (64, 0.0))).at(1) > 0


@pytest.mark.parametrize(("shared", "rows", "ms"), [(True, 8, 32), (False, 14, 56)])
def test_whether_the_sum_of_the_rows_counts_is_learnt(shared: bool, rows: int, ms: float):
    """Ranks that share cores take as long as all rows together, others as the largest batch."""
    learnt = LearntTimes(4)
    for i in range(4 * COMPARED):
        batches = [1 + (7 * i + 3 * place) % 16 for place in range(4)]
        learnt.add(batches, float(sum(batches)) if shared else 4.0 * max(batches))
    assert learnt.by_mean == shared
    assert learnt.times.at(rows) == pytest.approx(ms, rel=0.15)


def test_what_was_learnt_survives_as_json():
    learnt = LearntSteps(1)
    for rows, ms in DEAR * 4:
        learnt.next_mode(requests=1)
        learnt.add([rows], ms, rounds=0)
        learnt.modes.add(ms, tokens=2)
    kept = json.loads(json.dumps(learnt.stored()))
    assert [rows for rows, _ in kept[BETWEEN]["largest"]] == [rows for rows, _ in DEAR]
    assert json.loads(json.dumps(LearntSteps(1, stored=kept).stored())) == kept


@pytest.mark.parametrize("num_stages", [1, 8])
def test_near_sizes_are_tried_until_they_are_known(num_stages: int):
    trials, known = SizeTrials(num_stages), times(*[(64, 40.0)] * KNOWN)
    tried = []
    for _ in range(200 * trials.length):
        rows = trials.next_rows(known, target=64, most=64)
        if rows is not None:
            tried.append(rows)
            known.add(rows, rows)
    assert {*tried} == {8, 16, 32}
    assert len(tried) <= 3 * max(KNOWN, trials.length)
    assert not trials.pending


def test_trials_of_a_size_that_no_batch_can_have_end():
    trials, known = SizeTrials(1), times(*[(2, 10.0)] * KNOWN)
    tried = [trials.next_rows(known, target=2, most=64) for _ in range(200)]
    assert sum(rows is not None for rows in tried) <= 2 * 2 * KNOWN
    assert not trials.pending


def decode(
    modes: Modes, costs: dict[str, float], steps: int, least: float | None = 0, read_ms: float = 0.0
) -> list[str]:
    """The modes of so many steps, each of which decides a token in what its mode costs; where that
    is plain, the draft later takes `read_ms` more to read it."""
    used, unread_ms = [], 0.0
    for _ in range(steps):
        used.append(modes.next_mode(least, unread_ms))
        unread_ms = unread_ms + read_ms if used[-1] == PLAIN else 0.0
        modes.add(costs[used[-1]], 1.0)
    return used


@pytest.mark.parametrize("best", [BESIDE, BETWEEN, PLAIN])
@pytest.mark.parametrize("lost", [1.05, 1.3, 4.0])
def test_the_fastest_way_is_found_and_others_are_hardly_tried_again(best: str, lost: float):
    modes = Modes(1, (BESIDE, BETWEEN))
    costs = {way: 1.0 if way == best else lost for way in (BESIDE, BETWEEN, PLAIN)}
    decode(modes, costs, 100)
    later = [costs[way] for way in decode(modes, costs, 1000)]
    assert sum(later) / len(later) < 1.03
    changed = decode(modes, {way: 2.0 if way == best else 1.0 for way in costs}, 4000)
    assert best not in changed[-100:], "the machine has changed"


@pytest.mark.parametrize("best", [BESIDE, PLAIN])
def test_what_was_the_fastest_is_how_the_next_run_begins(best: str):
    costs = {way: Cost(10.0 if way == best else 20.0, 10.0, BLOCKS) for way in (BESIDE, PLAIN)}
    assert decode(Modes(1, (BESIDE,), costs), {BESIDE: 1.0, PLAIN: 1.0}, 1) == [best]


@pytest.mark.parametrize(("read_ms", "again"), [(0.0, True), (0.01, True), (0.13, False)])
def test_a_draft_that_has_to_read_much_is_not_tried_again(read_ms: float, again: bool):
    modes, costs = Modes(1, (BESIDE,)), {BESIDE: 1.3, PLAIN: 1.0}
    used = decode(modes, costs, 4000, read_ms=read_ms)
    assert BESIDE in used[:100]
    assert (BESIDE in used[100:]) == again


def test_a_way_is_measured_to_the_end_although_its_first_pass_missed():
    known = {ONE_TREE: Cost(1700, 100, BLOCKS), PLAIN: Cost(10_000, 100, 1)}
    modes = Modes(4, (BESIDE, ONE_TREE), known)
    while modes.next_mode(None) != BESIDE:
        modes.add(17.0, 1)
    for step in range(4 + TRIAL * 4):
        assert modes.next_mode(None) == BESIDE
        modes.add(25.0, 2 * (step >= 8))


def test_a_way_that_was_measured_while_its_trees_grew_is_measured_again_soon():
    modes, small = Modes(2, (BESIDE, ONE_TREE), lengths={ONE_TREE: 1}), 5
    for _ in range(200):
        growing = modes.next_mode(0) == ONE_TREE and small > 0
        small -= growing
        ms = {BESIDE: 1.0, ONE_TREE: 4.0 if growing else 0.5, PLAIN: 2.0}[modes.mode]
        modes.add(ms, 1, counts=not growing)
    assert modes.mode == ONE_TREE


def test_plain_decoding_is_not_tried_while_speculation_takes_less_than_the_stages_alone():
    used = decode(Modes(4, (BESIDE,)), {BESIDE: 1.0, PLAIN: 9.0}, 500, least=2.0)
    assert {*used} == {BESIDE}


def test_time_of_draft_rounds_is_not_added_to_sizes_that_no_step_had():
    learnt = LearntSteps(4)
    learnt.set_stage_times(((1, 5.0), (2, 8.0), (8, 20.0)), drafting_ms=10.0)
    learnt.next_mode(8)
    for _ in range(16):
        learnt.add([2] * 4, 10.0, rounds=1)
    assert [learnt.times.times.at(rows) for rows in (2, 8)] == pytest.approx([10, 20])


@pytest.mark.parametrize(("num_stages", "plain_steps"), [(1, 0), (8, 40)])
def test_sizes_grow_step_by_step_to_those_that_no_step_has_had(num_stages: int, plain_steps: int):
    """Also where times follow the mean of batches, of which eight stages have a row or two."""
    learnt = LearntSteps(num_stages, overlap=False)
    learnt.set_stage_times(FLAT)
    for step in range(plain_steps):
        rows = 1 + step % 2
        learnt.add([1] * rows + [0] * (num_stages - rows), 5.0 * rows, rounds=0)
    stats, sizes = StepStats(num_stages, max_rows=128, learnt=learnt), list[int]()
    for _ in range(5 * num_stages):
        sizes.append(step_of(stats, offered=128))
    assert 1 < sizes[0] <= GROWTH
    assert all(after <= 2 * GROWTH * before for before, after in pairwise(sizes)), "with a trial"
    assert max(sizes) >= 100


def test_a_way_is_measured_although_drafts_offer_less_than_sizes_may_grow_to():
    learnt = LearntSteps(1, overlap=False)
    learnt.set_stage_times(FLAT)
    stats = StepStats(1, max_rows=128, learnt=learnt)
    for _ in range(100):
        step_of(stats, offered=6)
    assert learnt.modes.costs[BETWEEN].blocks >= BLOCKS


def step_of(stats: StepStats, *, offered: int) -> int:
    """A step that wants 100 rows and is offered so many; returns how many it may have."""
    stats.begin_step()
    stats.choose_mode(1)
    target = stats.choose_trial(TargetBatch(100, 0.0, 1.0))
    assert target is not None
    rows = min(target.rows, offered)
    stats.add_candidates(Selection([np.arange(rows)], np.ones(rows), np.zeros(rows), 1))
    stats.add_batch(rows)
    stats.add_step(10.0 + rows, 1, speculating=stats.mode != PLAIN)
    return target.rows


class SharedCores(SimulatedPipeline):
    """A pipeline whose ranks share two cores, draft rounds included, but whose stages were measured
    one by one; `true_ms` is what a stage then takes."""

    true_ms: TimeCurve
    drafted_ms = 0.0

    def receive_verdicts(self) -> None:
        self.drafted_ms = self.step_ms
        super().receive_verdicts()

    def batch_ms(self, rows: Sequence[int]) -> float:
        took = [self.true_ms.ms(each) for each in self.machine.computed(rows)]
        longest = max(took) if len(rows) > 1 else sum(took)
        return max(longest, (sum(took) + self.drafted_ms) / 2)


def ms_per_token(
    num_stages: int,
    draft: Accuracy,
    draft_ms: float | TimeCurve,
    *,
    num_tokens: int = 250,
    learns: bool = True,
    policy: SpeculationPolicy = BEST_FIRST,
    true_ms: Points = DEAR,
    measured_ms: Points = FLAT,
    after: int = 100,
) -> float:
    """Of some tokens after the first ones, where stages that seemed cheap are dear."""
    machine = Machine(tuple(TimeCurve(measured_ms) for _ in range(num_stages)), draft_ms=draft_ms)
    pipeline = SharedCores(policy, machine, draft, "auto", after + 300, seed=0)
    pipeline.true_ms = TimeCurve(true_ms)
    if learns:
        pipeline.scheduler.learn(LearntSteps(num_stages))
        pipeline.scheduler.update_stage_times(pipeline.times.measured())
    early = (0, 0.0) if not after else None
    while pipeline.result.tokens < after + num_tokens:
        pipeline.step()
        if pipeline.result.tokens >= after and early is None:
            early = pipeline.result.tokens, pipeline.result.ms
    assert early is not None
    return (pipeline.result.ms - early[1]) / (pipeline.result.tokens - early[0])


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [1, 4])
def test_a_useless_draft_costs_hardly_anything_where_rows_are_dear(num_stages: int):
    useless = Accuracy({1: 0.1, 16: 0.3}, 0.5)
    assert ms_per_token(num_stages, useless, 4.0) < 1.06 * num_stages * DEAR[0][1]


@pytest.mark.parametrize("num_stages", [1, 2])
def test_learning_costs_hardly_anything_where_rows_and_draft_nodes_are_dear(num_stages: int):
    """A 1.5B and a 0.5B, both Q4_K_M, on two cores."""
    target = ((1, 92), (2, 142), (4, 225), (8, 380), (16, 640), (64, 2400))
    draft = TimeCurve(((1, 31), (2, 48), (4, 75), (8, 130), (64, 800)))
    half = tuple((rows, ms / num_stages) for rows, ms in target)
    found = ms_per_token(
        num_stages,
        Accuracy({1: 0.7, 16: 0.95}, 0.5),
        draft,
        policy=BestFirst(),
        true_ms=half,
        measured_ms=half,
        after=0,
        num_tokens=64,
    )
    assert found < 1.1 * target[0][1]


@pytest.mark.slow
def test_a_good_draft_pays_where_rows_are_dear():
    good = Accuracy({1: 0.8, 16: 0.98}, 0.5)
    learnt = ms_per_token(1, good, 1.0)
    assert learnt < DEAR[0][1]
    assert learnt < 0.97 * ms_per_token(1, good, 1.0, learns=False)


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [4, pytest.param(8, marks=pytest.mark.long)])
def test_one_tree_a_pass_is_found_where_stages_share_cores(num_stages: int):
    """A batch takes nearly the same whatever its rows, and two cores compute those of all stages in
    turn: a full pipeline is slower than a tree of fixed shape."""
    good = Accuracy({1: 0.95, 16: 0.99}, 0.5)

    def of(policy: SpeculationPolicy) -> float:
        nearly_flat = ((1, 8.0), (64, 14.0))
        return ms_per_token(num_stages, good, 5.0, policy=policy, true_ms=nearly_flat, after=800)

    assert of(BEST_FIRST) < of(StaticTree())


@pytest.mark.parametrize(
    ("token_ms", "measured"),
    [
        ({BESIDE: 10, deep(8): 12, deep(16): 1, deep(32): 1}, {BESIDE, deep(8)}),
        ({BESIDE: 10, deep(8): 8, deep(16): 9, deep(32): 1}, {BESIDE, deep(8), deep(16)}),
        ({BESIDE: 10, deep(8): 8, deep(16): 7, deep(32): 6}, {BESIDE, deep(8), deep(16), deep(32)}),
    ],
)
def test_more_batches_in_flight_are_tried_as_long_as_that_pays(
    token_ms: dict[str, float], measured: set[str]
):
    learnt, tried = LearntSteps(4), set[str]()
    learnt.deepen(32, pass_ms=100)
    for _ in range(4000):
        tried.add(mode := learnt.next_mode(1))
        learnt.modes.add(token_ms.get(mode, 20.0), 1)
    assert tried - {ONE_TREE, PLAIN} == measured
    assert learnt.modes.mode == min(measured, key=token_ms.__getitem__)


def test_with_more_batches_than_stages_rows_cost_what_a_batch_takes_longer_to_its_verdict():
    """Steps are as long as the head makes them, or wait until there is a row to send."""
    slow = [100.0, 1, BLOCKS, 0, 8]
    costs = {deep(4): [1.0, 1, BLOCKS, 0, 8], **dict.fromkeys((ONE_TREE, BESIDE, PLAIN), slow)}
    learnt = LearntSteps(2, overlap=True, stored={"costs": {"1": costs}})
    learnt.deepen(4, pass_ms=40)
    stats, found = StepStats(2, max_rows=64, learnt=learnt), Counter[int | None]()
    for step in range(400):
        stats.begin_step()
        stats.choose_mode(1)
        found[stats.in_flight] += 1
        rows = 4 << step // 4 % 4
        stats.add_batch(rows)
        stats.add_pass(40 + rows, batches=4)
        stats.add_step(20.0 / rows, 1, speculating=True)
    assert found[4] > 300
    assert learnt.times.times.at(32) == pytest.approx((40 + 32) / 4, rel=0.1)
    assert learnt.times.times.at(4) == pytest.approx((40 + 4) / 4, rel=0.1)


def test_deep_pipelines_are_measured_next_where_links_are_long_and_the_draft_spares_no_stage():
    learnt = LearntSteps(4)
    learnt.deepen(4)
    assert learnt.modes.ways == (ONE_TREE, BESIDE, ONE_BESIDE, BETWEEN), "links are short"
    learnt.deepen(16)
    assert learnt.modes.ways == (deep(8), deep(16), ONE_TREE, BESIDE)
    assert [learnt.modes.length(way) for way in learnt.modes.ways] == [8, 16, 1, 4]
    for _ in range(2):  # of another number of requests too
        learnt.next_mode(8)
        assert learnt.modes.ways == (deep(8), deep(16), BESIDE)
    learnt.set_stage_times(((1, 2.0), (64, 4.0)))
    assert learnt.least_plain_ms(requests=1) == pytest.approx(8)
    learnt.deepen(16, pass_ms=100)
    assert [learnt.least_plain_ms(requests) for requests in (1, 2)] == pytest.approx([100, 50])
    either = LearntSteps(4, overlap=False)
    either.deepen(16)
    assert either.modes.ways == (BETWEEN,), "as the user wants it"
