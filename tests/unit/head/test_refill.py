"""Draft rounds that delay a batch: where they are worth it, and what they bring."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from pipespec.config.compose import compose
from pipespec.core import Batch, Request
from pipespec.errors import ConfigError
from pipespec.extras.emulation.machine import TimeCurve
from pipespec.extras.emulation.synthetic_proposer import Accuracy
from pipespec.extras.plan import simulation
from pipespec.extras.plan.pipeline_times import Machine
from pipespec.extras.plan.simulation import SimulatedPipeline
from pipespec.head.policies.best_first import BestFirst
from pipespec.head.policies.policy import PipelineState, TargetBatch
from pipespec.head.refill import NextBatch
from pipespec.head.row_budget import lone_batch
from pipespec.head.scheduler import Scheduler
from pipespec.head.tree import ROOT, Tree
from pipespec.timing.batch_times import BatchTimes

STEP_MS, STEPS = 10.0, 50
FLAT = TimeCurve(((1, STEP_MS), (64, 1.1 * STEP_MS)))
ACCURACY = Accuracy({1: 0.74, 32: 0.99}, 0.8)
ROOT_ALONE = np.ones(1)


def state(num_stages: int = 1, target_rows: int = 8, **more: object) -> PipelineState:
    """One in which a step of 1 to 64 rows takes 10 to 11 ms and decides two tokens."""
    target = TargetBatch(target_rows, np.inf, STEP_MS / 2)
    return PipelineState(
        num_stages=num_stages,
        step=1,
        step_ms=((1, STEP_MS), (64, 1.1 * STEP_MS)),
        target=target,
        token_ms=STEP_MS / 2,
        **{"child_probabilities": np.array([0.7, 0.2]), **more},
    )


def worth_ms(rows: np.ndarray, limit: int, at: PipelineState, parents: np.ndarray) -> float:
    """What a round that expands `parents` may take at most, to a thousandth of a millisecond."""
    low, high = 0.0, 10 * STEP_MS
    while high - low > 1e-3:
        middle = (low + high) / 2
        batch = NextBatch(rows, limit, replace(at, draft_ms=middle))
        low, high = (middle, high) if batch.is_round_worth(parents) else (low, middle)
    return low


def test_children_of_a_root_alone_save_what_their_tokens_take():
    rows_ms = 2 * 0.1 * STEP_MS / 63
    found = worth_ms(ROOT_ALONE, 8, state(), ROOT_ALONE)
    assert found == pytest.approx(0.9 * STEP_MS / 2 - rows_ms, abs=0.01)


def test_the_longer_the_pipeline_the_less_a_round_saves():
    found = [worth_ms(ROOT_ALONE, 8, state(stages), ROOT_ALONE) for stages in (1, 2, 4, 8)]
    assert sorted(found, reverse=True) == found and len(set(found)) == 4


def test_the_first_round_of_all_is_tried():
    unknown = state(child_probabilities=np.empty(0), draft_ms=100 * STEP_MS)
    assert NextBatch(ROOT_ALONE, 8, unknown).is_round_worth(ROOT_ALONE)


def test_in_a_full_batch_only_better_candidates_count():
    full = np.array([1.0, 0.5])
    at = state(target_rows=2)
    assert worth_ms(full, 2, at, np.array([0.6])) == 0, ".6 × .7 is less than .5"
    expected = (0.63 - 0.5) * STEP_MS / 2
    assert worth_ms(full, 2, at, np.array([0.9])) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("rows", [[1.0], [1.0, 0.5, 0.3], [0.4, 0.2]])
def test_nodes_below_the_least_bring_nothing_to_a_full_batch(rows: list[float]):
    at = state(target_rows=len(rows))
    least = NextBatch(np.array(rows), len(rows), at).least
    assert worth_ms(np.array(rows), len(rows), at, np.exp([least - 0.01])) == 0


def test_a_batch_chosen_for_itself_has_the_rows_that_save_more_than_they_take():
    """Each row takes 4 ms and a token 10, so rows of .4 and more are worth it."""
    dear = replace(state(), step_ms=((1, STEP_MS), (64, 4 * 64 + 6)), token_ms=10.0)
    probabilities = np.array([1.0, 0.9, 0.5, 0.45, 0.3, 0.2])
    found = lone_batch(probabilities, np.zeros(6), dear)
    assert found is not None and found.rows == 4
    free = replace(dear, step_ms=FLAT.points)
    assert lone_batch(probabilities, np.zeros(6), free).rows == 6


def test_many_rows_may_be_worth_their_time_where_few_are_not():
    """The second row takes 8 ms and all others nothing: a single round, which adds one token of
    6 ms, is not worth it, several are."""
    steep = replace(
        state(),
        step_ms=((1, STEP_MS), (2, 18.0), (64, 18.0)),
        token_ms=6.0,
        child_probabilities=np.array([0.95]),
        draft_ms=1.0,
    )
    rows = np.array([0.99])
    assert not NextBatch(rows, 64, steep, rows).is_round_worth(rows)
    later = replace(steep, overlap=False, rounds=1)
    assert NextBatch(rows, 64, later, rows).is_round_worth(rows)


def test_a_lone_batch_without_draft_tokens_is_delayed_by_few_rounds_for_nothing():
    dear = replace(state(), draft_ms=100 * STEP_MS, overlap=False)
    assert NextBatch(ROOT_ALONE, 64, dear, ROOT_ALONE).is_round_worth(ROOT_ALONE)
    again = replace(dear, rounds=1)
    assert not NextBatch(ROOT_ALONE, 64, again, ROOT_ALONE).is_round_worth(ROOT_ALONE)


def test_nodes_that_take_the_draft_longer_than_they_save_are_not_expanded():
    """A token takes 5 ms, and its best child is right with .7: 1.75 ms of a node pay from .5 on."""
    free = NextBatch(ROOT_ALONE, 8, state(draft_ms=1.0))
    dear = NextBatch(ROOT_ALONE, 8, state(draft_ms=1.0, draft_nodes=1, draft_node_ms=1.75))
    assert np.exp(free.least) < 0.01
    assert np.exp(dear.least) == pytest.approx(0.5, abs=0.01)
    assert dear.is_round_worth(np.array([0.9]))
    assert not dear.is_round_worth(np.full(64, 0.2))


def test_no_batch_is_delayed_while_a_tree_waits_for_its_verdict():
    tree = Tree(2, 1, 7, 8, fed=False)
    assert len(BestFirst().select_to_refill(tree, state(one_tree=True)))
    tree.mark_fed(np.array([ROOT]))
    assert not len(BestFirst().select_to_refill(tree, state(one_tree=True)))
    assert len(BestFirst().select_to_refill(tree, state()))


def test_nothing_is_drafted_on_trial_for_a_batch_with_rows_of_prompts():
    dear = replace(state(), draft_ms=100 * STEP_MS, overlap=False)
    batch = NextBatch(ROOT_ALONE, 64, dear, ROOT_ALONE, prompt_rows=8)
    assert not batch.is_round_worth(ROOT_ALONE)


def test_rows_cost_what_they_add_to_those_of_prompts():
    """The first rows of a step take nothing here, later ones 4 ms each; a token takes 5."""
    steep = replace(state(), step_ms=((1, STEP_MS), (8, STEP_MS), (64, STEP_MS + 4 * 56)))
    found = [
        NextBatch(ROOT_ALONE, 64, steep, ROOT_ALONE, prompt_rows).saved_ms(np.array([1.0, 0.7]))
        for prompt_rows in (0, 40)
    ]
    assert found == pytest.approx([0.7 * STEP_MS / 2, 0.0])


class WithPrompts(SimulatedPipeline):
    """A lone stage, for which rows of prompts take time too."""

    sent = 0

    def send(self, batch: Batch) -> None:
        super().send(batch)
        self.sent = len(batch)

    def in_flight(self) -> tuple[list[int], list[int]]:
        return [self.sent], [0]


@pytest.mark.slow
def test_no_more_is_drafted_beside_a_prompt_than_its_step_has_rows_for(
    monkeypatch: pytest.MonkeyPatch,
):
    """A long prompt is read beside an answer: it takes most rows, and drafting for more of them
    than are left would only delay it."""
    monkeypatch.setattr(simulation, "LEARNED_EVERY", 1 << 62)  # the times are known
    curve = TimeCurve(((1, 10.0), (4, 10.5), (16, 11.0), (64, 14.0), (256, 30.0)))
    machine = Machine((curve,), draft_ms=2.0, overlap=False)
    pipeline = WithPrompts(BestFirst(), machine, ACCURACY, "auto", 40 * STEPS, 1, 2)
    scheduler = Scheduler(replace(pipeline.scheduler.config, prefill_chunk=256))
    pipeline.scheduler = scheduler
    scheduler.admission.add(
        Request(0, tuple(pipeline.texts[0][:1]), STEPS * 40), lambda token: False, 0
    )
    pipeline.step()
    scheduler.update_stage_times(BatchTimes(curve.points))
    alone = mean_rounds(pipeline, lambda: scheduler.step < STEPS)
    scheduler.admission.add(
        Request(1, tuple(pipeline.texts[1][: 80 * STEPS]), 1), lambda token: False, 0
    )
    pipeline.step()
    beside = mean_rounds(pipeline, lambda: bool(scheduler.admission.sequences[1].prompt_left))
    assert 0 < beside <= 1.5 * alone


def mean_rounds(pipeline: SimulatedPipeline, condition: Callable[[], bool]) -> float:
    """Draft rounds per step while a condition holds."""
    rounds = []
    while condition():
        pipeline.step()
        rounds.append(pipeline.rounds)
    return sum(rounds) / len(rounds)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_draft_without_a_device_of_its_own_works_while_the_stages_wait(overlap: bool):
    machine = Machine((FLAT,), draft_ms=1.0, overlap=overlap)
    pipeline = SimulatedPipeline(BestFirst(), machine, ACCURACY, "auto", 40 * STEPS, seed=1)
    scheduler = pipeline.scheduler
    pipeline.step()
    scheduler.begin_step()
    assert scheduler.next_expansion(0.0) is not None, "the draft reads the prompt in any case"
    for _ in range(STEPS):
        pipeline.step()
    scheduler.begin_step()
    assert (scheduler.next_expansion(0.0) is not None) == overlap
    tokens, steps = sum(scheduler.totals.hits), scheduler.totals.steps
    assert tokens > 2 * steps, "batches hold draft tokens either way"


DEAR = TimeCurve(((1, STEP_MS), (4, 2 * STEP_MS), (16, 2.2 * STEP_MS), (64, 4 * STEP_MS)))


def test_a_draft_that_waits_for_verdicts_is_used_where_the_first_rows_are_dear():
    """Before its first round the tree has nothing to offer, so nothing seems to be worth a row."""
    machine = Machine((DEAR,), draft_ms=STEP_MS / 4, overlap=False)
    pipeline = SimulatedPipeline(BestFirst(), machine, ACCURACY, "auto", 40 * STEPS, seed=1)
    while pipeline.result.tokens < 10 * STEPS:
        pipeline.step()
    assert pipeline.result.ms < 0.85 * STEP_MS * pipeline.result.tokens


def test_no_batch_waits_until_the_draft_has_read_a_prompt():
    machine = Machine((FLAT,), draft_ms=0.1, overlap=False)
    pipeline = SimulatedPipeline(BestFirst(), machine, ACCURACY, "auto", 40 * STEPS, seed=1)
    for _ in range(STEPS):
        pipeline.step()
    pipeline.proposer.propose = lambda requests, children: [None] * len(requests)
    delayed = []
    for _ in range(STEPS):
        assert len(pipeline.step())
        delayed.append(pipeline.rounds)
    assert max(delayed) == 1, "another part of the prompt is read in each step"


def test_overlap_is_refused_where_the_policy_cannot_do_without() -> None:
    for settings in (["policy=level"], ["policy.row_cost=0.001"]):
        with pytest.raises(ConfigError, match=r"leave proposer\.overlap out"):
            compose([*settings, "proposer.overlap=no"])
    assert compose(["proposer.overlap=no"]).proposer.overlap == "no"


def test_a_number_of_rounds_counts_those_that_delay():
    machine = Machine((FLAT,), draft_ms=0.1)
    pipeline = SimulatedPipeline(BestFirst(), machine, ACCURACY, 2, 40 * STEPS, seed=1)
    rounds = []
    for _ in range(STEPS):
        before = pipeline.scheduler.totals.rounds
        pipeline.step()
        rounds.append(pipeline.scheduler.totals.rounds - before)
    assert max(rounds) == 2


def test_a_stage_that_seems_to_take_no_time_for_a_row_is_no_fault():
    free = replace(state(), step_ms=((1, 0.0), (64, 11.0)), token_ms=None)
    assert NextBatch(ROOT_ALONE, 8, free, ROOT_ALONE).least >= 0, "no draft node is worth its time"
