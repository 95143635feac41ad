"""Speculation policies over a simulated pipeline."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipespec.errors import ConfigError
from pipespec.head.policies.best_first import BestFirst
from pipespec.head.policies.level import AFTER, BEFORE, Level
from pipespec.head.policies.policy import (
    AUTO,
    OfferedRows,
    PipelineState,
    SpeculationPolicy,
    TargetBatch,
    has_time_for_round,
)
from pipespec.head.policies.root import Root
from pipespec.head.policies.static_tree import StaticTree
from pipespec.head.row_budget import RequestCandidates, select_rows, target_batch, tokens_by_rows
from pipespec.head.step_stats import StepStats
from pipespec.head.tree import ROOT, Tree
from pipespec.timing.batch_times import BatchTimes
from tests.helpers.trees import check_tree

VOCABULARY = 6
STATE = PipelineState(num_stages=4, step=0)


def chosen(policy: SpeculationPolicy, tree: Tree, state: PipelineState) -> np.ndarray:
    """The nodes that enter the batch of a single request."""
    offer = RequestCandidates(tree, policy.select_to_schedule(tree, state), policy.whole)
    (nodes,) = selected([offer], policy.max_rows, state, policy.row_cost)
    return nodes


def selected(
    offers: list[RequestCandidates],
    budget: int,
    state: PipelineState,
    row_cost: float | None = None,
    prompt_rows: int = 0,
) -> list[np.ndarray]:
    """The nodes that enter the batch of several requests."""
    state = replace(state, target=target_batch(state))
    return select_rows(offers, budget, row_cost, state, prompt_rows).nodes


@dataclass
class Pipeline:
    """A head without models: random candidates, and a verdict `num_stages` steps after a feed.

    `luck` is the share of decided tokens that are children of the root, if it has any.
    """

    policy: SpeculationPolicy
    num_stages: int
    rounds: int
    luck: float
    seed: int
    tree: Tree = field(default_factory=lambda: Tree(0, -1, 0, 0, fed=False))
    entered: dict[int, int] = field(default_factory=dict)  # step by node id, fed nodes only
    decided: int = 0

    def run(self, num_steps: int) -> Iterator[tuple[PipelineState, np.ndarray]]:
        """Steps; after each feed, the state and the chosen nodes, which are then entered."""
        self.rng = np.random.default_rng(self.seed)
        for step in range(num_steps):
            state = PipelineState(self.num_stages, step)
            for _ in range(self.rounds):
                if not self.grow(state, urgent_only=False):
                    break
            self.hear(step)
            while self.grow(state, urgent_only=True):
                pass
            nodes = chosen(self.policy, self.tree, state)
            yield state, nodes
            self.tree.mark_fed(nodes)
            for node in self.tree.id[nodes].tolist():
                assert node not in self.entered, "fed twice"
                self.entered[node] = step
            if len(nodes) and not self.policy.keeps_unfed:
                self.tree.drop_unfed()

    def grow(self, state: PipelineState, *, urgent_only: bool) -> bool:
        growth = self.policy.select_to_expand(self.tree, state)
        if not len(growth.nodes) or (urgent_only and not growth.urgent):
            return False
        assert not self.tree.expanded[growth.nodes].any(), "expanded twice"
        shape = (len(growth.nodes), min(self.policy.children, VOCABULARY))
        tokens = np.array([self.rng.permutation(VOCABULARY)[: shape[1]] for _ in range(shape[0])])
        shares = self.rng.dirichlet(np.full(VOCABULARY, 0.5), shape[0])[:, : shape[1]]
        logps = np.log(np.maximum(shares, 1e-9))
        self.tree.add_children(growth.nodes, tokens, logps, growth.limit)
        self.tree.trim(self.policy.max_nodes)
        return True

    def hear(self, step: int) -> None:
        while self.entered.get(int(self.tree.id[ROOT])) == step - self.num_stages:
            children = np.flatnonzero(self.tree.parent[1:] == ROOT) + 1
            token = int(self.rng.integers(VOCABULARY))
            if len(children) and self.rng.random() < self.luck:
                token = int(self.tree.token[self.rng.choice(children)])
            self.tree.advance([token])
            self.decided += 1


widths = st.integers(1, 9)
policies = st.one_of(
    st.just(Root()),
    st.builds(
        Level, width=widths, children=st.integers(1, 5), cut=st.sampled_from([AFTER, BEFORE])
    ),
    st.builds(
        BestFirst,
        width=widths,
        children=st.integers(1, 5),
        capacity=st.just(60),
        row_cost=st.sampled_from([0.0, 0.01, None]),
    ),
    st.builds(StaticTree, shape=st.lists(st.integers(1, 3), min_size=1, max_size=3)),
)
pipelines = st.builds(
    Pipeline,
    policy=policies,
    num_stages=st.integers(1, 5),
    rounds=st.integers(1, 4),
    luck=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)


@given(pipelines)
def test_batch_has_new_nodes_parents_first_within_the_row_limit(pipeline):
    tree = pipeline.tree
    for _, nodes in pipeline.run(30):
        assert len(nodes) <= pipeline.policy.max_rows
        assert not tree.fed[nodes].any()
        here: set[int] = set()
        for node in nodes.tolist():
            parent = int(tree.parent[node])
            assert node == ROOT or tree.fed[parent] or parent in here
            assert node not in here
            here.add(node)
        check_tree(tree)


@given(pipelines)
def test_stages_never_hold_more_nodes_than_their_kv_allocators_are_sized_for(pipeline):
    tree, policy = pipeline.tree, pipeline.policy
    for _, nodes in pipeline.run(30):
        live = int(np.count_nonzero(tree.fed)) + len(nodes)
        assert live <= pipeline.num_stages * policy.max_rows
        held = int(np.count_nonzero(tree.fed | tree.expanded))
        assert held <= policy.max_nodes + policy.max_rows


@given(pipelines)
def test_no_policy_decodes_slower_than_without_speculation(pipeline):
    for _ in pipeline.run(30):
        pass
    assert pipeline.decided >= 29 // pipeline.num_stages


@given(pipelines)
def test_policy_is_a_pure_function_of_tree_and_state(pipeline):
    tree = pipeline.tree
    columns = ("id", "fed", "expanded", "cum")
    for state, nodes in pipeline.run(12):
        before = [getattr(tree, name).copy() for name in columns]
        assert np.array_equal(chosen(pipeline.policy, tree, state), nodes)
        pipeline.policy.select_to_expand(tree, state)
        for name, values in zip(columns, before, strict=True):
            assert np.array_equal(getattr(tree, name), values)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_level_schedules_as_many_levels_a_step_as_draft_rounds_allow(rounds, levels, seed):
    policy = Level(width=4, children=3, levels=levels)
    pipeline = Pipeline(policy, num_stages=5, rounds=rounds, luck=1.0, seed=seed)
    for step, (_, nodes) in enumerate(pipeline.run(5)):
        sizes = Counter(pipeline.tree.position[nodes].tolist())
        assert len(sizes) == min(levels, rounds + (not step)), "the root is a level too"
        assert max(sizes.values()) <= 4


@pytest.mark.parametrize(("cut", "fed"), [(BEFORE, []), (AFTER, [5, 6])])
def test_level_is_cut_before_or_after_the_verdict(cut, fed):
    """Of the children of 1 and 2, those of 1 are the more probable, but the target decides 2."""
    policy = Level(width=2, children=2, cut=cut)
    tree = Tree(0, -1, 0, 0, fed=True)
    tree.add_children(np.array([ROOT]), np.array([[1, 2]]), np.log([[0.6, 0.4]]))
    tree.mark_fed(np.arange(len(tree)))
    growth = policy.select_to_expand(tree, STATE)
    assert growth.nodes.tolist() == [1, 2]
    tree.add_children(
        growth.nodes, np.array([[3, 4], [5, 6]]), np.log([[0.5, 0.4], [0.5, 0.4]]), growth.limit
    )
    assert not len(policy.select_to_expand(tree, STATE).nodes), "one level ahead"
    tree.advance([2])
    assert tree.token[chosen(policy, tree, STATE)].tolist() == fed


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(0, 2**32 - 1))
def test_static_tree_is_scheduled_whole_and_alone(shape, seed):
    policy = StaticTree(shape)
    pipeline = Pipeline(policy, num_stages=3, rounds=2, luck=0.5, seed=seed)
    tree = pipeline.tree
    for state, nodes in pipeline.run(20):
        if state.step % 3:
            assert not len(nodes), "one tree at a time"
            continue
        assert len(nodes) == policy.max_rows
        for node in nodes.tolist():
            children = np.flatnonzero(tree.parent[1:] == node) + 1
            chosen = np.isin(children, nodes)
            depth = int(tree.depth[node])
            assert np.count_nonzero(chosen) == ([*shape, 0])[depth]
            if chosen.any() and not chosen.all():
                assert tree.logp[children[chosen]].min() >= tree.logp[children[~chosen]].max()


def test_next_static_tree_is_drafted_while_the_last_one_is_computed():
    policy = StaticTree([1, 1])
    pipeline = Pipeline(policy, num_stages=6, rounds=3, luck=1.0, seed=0)
    growths = 0
    for state, _ in pipeline.run(13):
        growths += state.step % 6 == 0 and bool(
            policy.select_to_expand(pipeline.tree, state).urgent
        )
        if state.step == 6:
            assert pipeline.tree.fed[1:].sum() == 0 and len(pipeline.tree) > 3


def test_static_tree_is_cut_at_the_end_of_the_text():
    policy = StaticTree([1, 1, 1])
    pipeline = Pipeline(policy, num_stages=2, rounds=1, luck=1.0, seed=0)
    state = replace(STATE, end=2)
    pipeline.rng = np.random.default_rng(0)
    while pipeline.grow(state, urgent_only=True):
        pass
    assert pipeline.tree.position[chosen(policy, pipeline.tree, state)].tolist() == [0, 1]


def test_static_tree_is_scheduled_when_the_proposer_has_no_candidates():
    tree = Tree(0, -1, 0, 0, fed=False)
    tree.expanded[ROOT] = True
    assert StaticTree([2, 2]).select_to_schedule(tree, STATE).tolist() == [ROOT]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [({"shape": []}, "[]"), ({"shape": [1, 0]}, "[1, 0]"), ({"shape": [16, 16, 16]}, "4369 nodes")],
)
def test_impossible_static_tree_is_refused(arguments, named):
    with pytest.raises(ConfigError) as refusal:
        StaticTree(**arguments)
    assert named in str(refusal.value)


def one_level(probabilities: list[float], *, fed: bool = True) -> Tree:
    tree = Tree(0, -1, 0, 0, fed=fed)
    tokens = np.arange(len(probabilities))[None]
    tree.add_children(np.array([ROOT]), tokens, np.log(probabilities)[None])
    return tree


@pytest.mark.parametrize(
    ("row_cost", "tokens_per_step", "requests", "expected"),
    [
        (0.0, None, 1, [0.5, 0.2, 0.1, 0.02]),
        (0.1, None, 1, [0.5, 0.2, 0.1]),  # four stages: a token is worth four steps at most
        (0.1, 0.1, 1, [0.5, 0.2, 0.1]),  # slower than plain decoding does not make it worth more
        (0.1, 0.5, 1, [0.5, 0.2, 0.1]),
        (0.1, 1.2, 1, [0.5, 0.2]),  # the faster the text, the less a row can save
        (0.1, None, 8, [0.5, 0.2]),  # so it is with more requests
    ],
)
def test_row_is_scheduled_if_its_expected_saving_exceeds_its_cost(
    row_cost, tokens_per_step, requests, expected
):
    tree = one_level([0.5, 0.2, 0.1, 0.02])
    state = replace(STATE, tokens_per_step=tokens_per_step, requests=requests)
    fed = tree.cum[chosen(BestFirst(row_cost=row_cost), tree, state)]
    assert np.exp(fed).round(6).tolist() == expected


def test_measured_step_times_limit_the_width_where_rows_get_expensive():
    tree = one_level([0.09] * 10)
    policy = BestFirst(row_cost=None)
    flat = replace(STATE, step_ms=((1, 10.0), (16, 10.0)))
    assert len(chosen(policy, tree, STATE)) == len(chosen(policy, tree, flat)) == 10
    # Four rows cost what one does; each further one 2 ms.
    steep = replace(flat, step_ms=((1, 10.0), (4, 10.0), (16, 34.0)))
    assert len(chosen(policy, tree, steep)) == 4
    # While the draft takes as long as eight of them, they are free.
    assert len(chosen(policy, tree, replace(steep, drafting_ms=18.0))) == 8
    # A tile of rows that are dear together is entered if they pay together.
    tiled = replace(flat, step_ms=((1, 10.0), (4, 10.0), (5, 10.2), (16, 10.2)))
    assert len(chosen(policy, tree, tiled)) == 10


def four_roots(rows: int, context_len: int = 0) -> OfferedRows:
    """What was offered if every step so far had four roots, and nothing else."""
    certain = (np.arange(rows) < 4).astype(float)
    return OfferedRows(certain, certain, context_len * certain, fed=4.0)


@pytest.mark.parametrize(
    ("context_len", "nodes", "dear"),
    [
        (0, 2, {"step_ms": ((1, 10.0), (36, 90.0))}),
        # Reading the contexts of four roots takes four times as long as the rest.
        (1000, 3, {"step_ms": ((1, 10.0), (36, 10.0)), "slot_ms": 0.01}),
    ],
)
def test_roots_are_spread_over_steps_where_rows_or_long_contexts_are_expensive(
    context_len: int, nodes: int, dear: dict
):
    tree = one_level([0.5, 0.2][: nodes - 1], fed=False)
    offers = [RequestCandidates(tree, np.arange(nodes), context_len=context_len)] * 12
    waiting = four_roots(12 * nodes, context_len)
    state = replace(STATE, requests=4 * STATE.num_stages, offered=waiting, **dear)
    # What is read for a root is read for its draft tokens too.
    fed = nodes if context_len else 1
    taken = selected(offers, 12 * nodes, state)
    assert [len(nodes) for nodes in taken] == [fed] * 4 + [0] * 8
    free = replace(state, step_ms=((1, 10.0), (36, 10.0)), slot_ms=0.0)
    assert sum(map(len, selected(offers, 12 * nodes, free))) == 12 * nodes
    if context_len:  # The one that has waited longest is fed however long its context is.
        longest = [replace(offers[0], context_len=9000), *offers[1:]]
        taken = selected(longest, 12 * nodes, state)
        assert [len(nodes) for nodes in taken] == [fed] + [0] * 11
        # They have grown a little since the size of batches was chosen, which holds none back.
        grown = [replace(offers[0], context_len=context_len + 10)] * 12
        assert sum(map(len, selected(grown, 12 * nodes, state))) == 4 * fed


def test_slots_are_counted_while_they_cost_nothing():
    """They may cost something later, and the size of batches is then of what was offered before."""
    offers = [RequestCandidates(one_level([0.5], fed=False), np.array([ROOT, 1]), context_len=1000)]
    free = replace(STATE, step_ms=((1, 10.0), (36, 10.0)))
    assert select_rows(offers, 36, None, free).kv_slots.tolist() == [1000, 0]


def test_draft_tokens_beside_prompts_are_fed_as_far_as_they_save_more_than_their_rows_cost():
    tree = one_level([0.6, 0.3, 0.05])
    offers = [RequestCandidates(tree, np.arange(1, 4), context_len=9)]
    four = offered([0.6, 0.3, 0.05, 0.0], [0, 0, 0, 0], fed=3)
    # Within a batch of the chosen size rows are free; each beyond it adds 4 ms. A token takes 10.
    state = replace(STATE, offered=four, step_ms=((1, 10.0), (3, 10.0), (13, 50.0)))
    assert [len(nodes) for nodes in selected(offers, 16, state)] == [3]
    assert [len(nodes) for nodes in selected(offers, 16, state, prompt_rows=8)] == [1]


def offered(probabilities: list[float], certain: list[float], fed: float) -> OfferedRows:
    return OfferedRows(
        np.array(probabilities), np.array(certain), np.zeros(len(certain)), float(fed)
    )


@pytest.mark.parametrize(
    ("stages", "rows", "tokens"),
    [
        # Batches of the present size yield the probabilities of their rows.
        (8, offered([0.9, 0.5], [0.4, 0], fed=2), [None, 1.4]),
        # A certain row is worth one token.
        (8, offered([1, 1, 1, 1], [1, 1, 1, 1], fed=2), [1, 2, 3, 4]),
        # With one stage batches of any size yield the sum of their rows.
        (1, offered([1, 0.8, 0.5, 0.1], [1, 0, 0, 0], fed=1), [1, 1.8, 2.3, 2.4]),
    ],
)
def test_tokens_of_a_batch_follow_from_what_was_offered(stages, rows, tokens):
    for found, wanted in zip(tokens_by_rows(rows, PipelineState(stages, 0)), tokens, strict=True):
        assert wanted is None or found == pytest.approx(wanted)


def test_a_draft_token_left_out_costs_less_than_its_probability_and_less_in_a_longer_pipeline():
    rows = offered([0.9, 0.5, 0.3, 0.1], [0, 0, 0, 0], fed=2)
    two, eight = (tokens_by_rows(rows, PipelineState(stages, 0)) for stages in (2, 8))
    assert 0.5 > two[1] - two[0] > eight[1] - eight[0] == pytest.approx(0.5 / 8**0.5)
    assert eight[2] - eight[1] == pytest.approx(0.3 * (2 / (8 * 3)) ** 0.5)


@pytest.mark.parametrize("fed", [2, 4, 6.5, 16])
def test_row_of_another_request_yields_what_its_place_in_a_pass_does(fed: float):
    """Rows of one request are in the pipeline n w / R at a time, and a miss costs all of these."""
    stages, requests, hits = 8, 16, 0.8
    rows = np.arange(1, 17)
    in_flight = stages * rows / requests
    tokens = rows / (hits + (1 - hits) * in_flight)
    known = np.interp(fed, rows, tokens)
    probabilities = np.full(16, hits)
    probabilities[0] = hits + known - hits * fed  # so that the present size yields as many
    found = tokens_by_rows(
        offered(probabilities, [0] * 16, fed=fed), PipelineState(stages, 0, requests=requests)
    )
    assert found[3:] == pytest.approx(tokens[3:], rel=0.02)


def test_batches_of_many_requests_with_sure_draft_tokens_yield_as_many_tokens_as_rows():
    state = PipelineState(12, 0, requests=64)
    rows = offered([1] * 16, [1] * 5 + [0] * 11, fed=5)
    assert tokens_by_rows(rows, state) == pytest.approx(range(1, 17))


def test_draft_tokens_are_scheduled_only_if_they_save_more_than_reading_their_context():
    far, near = (
        RequestCandidates(one_level([0.3, 0.2], fed=fed), np.arange(fed, 3), context_len=1000)
        for fed in (True, False)
    )
    # A token takes 10 ms, so the draft tokens of either request save half of that times sqrt(1/n).
    one = np.array([1.0, *[0.0] * 7])
    state = replace(
        STATE, offered=OfferedRows(one, one, 0 * one, 1.0), step_ms=((1, 10.0), (16, 10.0))
    )
    limit = 5.0 / STATE.num_stages**0.5 / 1000
    for slot_ms, fed in ((0.0, [2, 3]), (0.95 * limit, [2, 3]), (1.05 * limit, [0, 3])):
        taken = selected([far, near], 16, replace(state, slot_ms=slot_ms))
        assert [len(nodes) for nodes in taken] == fed, "the root reads that of the second anyway"


def test_no_draft_token_is_scheduled_before_a_root_that_waits():
    """The target may be of a moment at which reading a context still took time."""
    offers = [
        RequestCandidates(one_level([0.9, 0.8]), np.arange(3), context_len=1000) for _ in range(2)
    ]
    for slot_ms in (0.0, 0.001):
        target = TargetBatch(rows=8, kv_slots=1500.0, ms_per_token=10.0)
        state = replace(STATE, target=target, slot_ms=slot_ms, offered=offered([1], [1], 1))
        first, second = select_rows(offers, 16, None, state).nodes
        assert first[0] == ROOT and len(second) == 0


def rounds_per_step(meter: StepStats, draft_ms: float, stage_ms: float, steps: int) -> list[int]:
    """The rounds that `auto` makes when a step of the stages and a round last so long."""
    out = []
    for step in range(steps):
        meter.add_batch(1)
        meter.begin_step()
        elapsed = 0.0
        while has_time_for_round(AUTO, meter.state(step, end=9, elapsed_ms=elapsed)):
            elapsed += draft_ms
            meter.add_round(draft_ms)
        meter.add_verdict(elapsed, max(0.0, stage_ms - elapsed), tokens=1)
        out.append(meter.rounds)
    return out


def test_auto_rounds_end_before_the_verdict():
    meter = StepStats(num_stages=4)
    rounds = rounds_per_step(meter, draft_ms=3.0, stage_ms=10.0, steps=300)
    assert rounds[0] == 1 and set(rounds[1:]) == {3}
    # The stages became faster, the head is late and does not know by how much.
    rounds = rounds_per_step(meter, draft_ms=3.0, stage_ms=4.0, steps=300)
    assert set(rounds[-50:]) == {1}
    rounds = rounds_per_step(meter, draft_ms=3.0, stage_ms=19.0, steps=600)
    assert set(rounds[-50:]) == {6}


def test_verdicts_that_are_late_because_of_the_rounds_leave_no_time_for_as_many():
    """The stages fall in step with a head that is late, and verdicts come just after its rounds."""
    meter = StepStats(num_stages=4)
    meter.set_stage_times(BatchTimes(((1, 54.0),)))
    meter.add_round(22.0)
    meter.add_verdict(70.0, 6.0, tokens=1)  # while the pipeline filled
    made, elapsed = [], 70.0
    for step in range(60):
        meter.add_batch(1)
        meter.begin_step()
        behind_ms, elapsed = elapsed, 0.0
        while has_time_for_round(AUTO, meter.state(step, end=9, elapsed_ms=elapsed)):
            elapsed += 22.0
            meter.add_round(22.0)
        verdict_ms = max(57.0, behind_ms + 1.0, elapsed + 1.0)
        meter.add_verdict(elapsed, verdict_ms - elapsed, tokens=1)
        made.append(meter.rounds)
    assert set(made[20:]) == {2}


@pytest.mark.parametrize(("hop_ms", "rounds"), [(1.0, 1), (20.0, 2), (40.0, 4)])
def test_time_on_links_is_used_for_draft_rounds_although_stages_are_faster(
    hop_ms: float, rounds: int
):
    meter = StepStats(num_stages=4)
    meter.set_stage_times(BatchTimes(((1, 10.0),)))
    made = rounds_per_step(meter, draft_ms=12.0, stage_ms=10.0 + hop_ms, steps=100)
    assert set(made[20:]) == {rounds}


def test_costs_with_and_without_speculation_are_measured_apart_once_the_pipeline_is_full():
    meter = StepStats(num_stages=2)

    def state() -> PipelineState:
        return meter.state(0, end=9, elapsed_ms=0.0)

    for _ in range(4):
        meter.add_step(10.0, 0, speculating=False)
    assert state().token_ms == 20.0 and state().tokens_per_step is None
    for tokens in (0, 0, 1, 2, 1, 2):
        meter.add_step(15.0, tokens, speculating=True)
    assert state().token_ms == 10.0 and state().tokens_per_step == 1.5
    meter.add_step(30.0, 1, speculating=False)
    assert state().token_ms == 60.0, "measured anew"


def test_plain_token_costs_less_with_more_requests():
    meter = StepStats(num_stages=4)
    for _ in range(8):
        meter.add_step(10.0, 1, speculating=False, requests=4)
    assert meter.state(0, end=9, elapsed_ms=0.0, requests=4).token_ms == 10.0  # 40 for one request


@pytest.mark.parametrize(
    ("stage_times", "batches", "step_ms"),
    [
        # The steps of 20 and 22 ms, after the one that fed it, computed the batch of 16 rows.
        (
            (),
            ((1, 5.0), (16, 9.5), (1, 20.0), (1, 22.0), (1, 12.0), (4, 10.0), (1, 9.0)),
            ((1, 10.125), (4, 10.125), (16, 21.0)),
        ),
        # 3 and 2 ms beside the 20 of the batch of 16 rows, and 2.5 beside those of one row.
        (
            ((1, 5.0), (16, 20.0)),
            ((16, 1.0), (1, 23.0), (1, 22.0), (1, 7.5), (1, 7.5)),
            ((1, 7.5), (16, 22.5)),
        ),
    ],
)
def test_step_time_is_that_of_the_largest_batch_in_the_pipeline(stage_times, batches, step_ms):
    """Where stages have measured theirs, it is that and what steps take beside it."""
    meter = StepStats(num_stages=2)
    meter.set_stage_times(BatchTimes(stage_times))
    for rows, ms in batches:
        meter.begin_step()
        meter.add_batch(rows)
        meter.add_step(ms, 0, speculating=True)
    assert meter.state(0, end=9, elapsed_ms=0.0).step_ms == step_ms


def test_step_that_lasts_as_long_as_its_draft_round_says_nothing_about_larger_batches():
    meter = StepStats(num_stages=2)
    meter.set_stage_times(BatchTimes(((1, 5.0), (2, 8.0), (4, 12.0))))
    for _ in range(8):
        meter.begin_step()
        meter.add_round(10.0)
        meter.add_batch(2)
        meter.add_step(10.5, 1, speculating=True)
    assert meter.state(0, end=9, elapsed_ms=0.0).step_ms == ((1, 5.5), (2, 8.5), (4, 12.5))


def four_stages() -> StepStats:
    """Stages that have measured 10 ms for a row."""
    stats = StepStats(4)
    stats.set_stage_times(BatchTimes(((1, 10.0), (64, 10.0))))
    return stats


@dataclass
class Text:
    """A text of which speculation decides `tokens` per step of `speculating_ms`; four stages."""

    meter: StepStats = field(default_factory=four_stages)
    owed: float = 0.0

    def decode(
        self, steps: int, *, tokens: float, speculating_ms: float, plain_ms: float = 10.0
    ) -> list[bool]:
        """In which steps it speculated."""
        out = []
        for step in range(steps):
            speculates = self.meter.state(step, end=9, elapsed_ms=0.0).speculates
            self.owed += tokens if speculates else 1 / 4
            self.meter.add_step(
                speculating_ms if speculates else plain_ms, int(self.owed), speculating=speculates
            )
            self.owed %= 1
            out.append(speculates)
        return out


@pytest.mark.parametrize(
    ("times", "least", "most"),
    [
        # A token takes less than the stages need without speculation.
        ({"tokens": 0.8, "speculating_ms": 12.0}, 1, 1),
        # Every step takes longer than the stages.
        ({"tokens": 0.3, "speculating_ms": 13.0, "plain_ms": 15.0}, 0.97, 1),
        # As many tokens per step as without speculation, in longer steps.
        ({"tokens": 0.25, "speculating_ms": 13.0}, 0, 0.08),
        # The draft is slow.
        ({"tokens": 0.9, "speculating_ms": 60.0}, 0, 0.08),
    ],
)
def test_it_speculates_unless_at_a_loss_and_then_tries_again_now_and_then(times, least, most):
    speculated = Text().decode(4000, **times)
    assert speculated[0] and least <= np.mean(speculated) <= most
    assert any(speculated[-300:])


def test_whether_it_speculates_follows_changes_of_the_text():
    text = Text()
    text.decode(800, tokens=0.9, speculating_ms=12.0)
    assert np.mean(text.decode(800, tokens=0.1, speculating_ms=12.0)[-400:]) < 0.3
    assert np.mean(text.decode(1200, tokens=0.9, speculating_ms=12.0)[-600:]) > 0.9


@pytest.mark.parametrize(("node_ms", "nodes"), [(0.0, 4), (0.1, 4), (1.0, 2), (2.0, 1)])
def test_a_draft_round_expands_what_is_likeliest_for_its_time(node_ms: float, nodes: int):
    measured = replace(STATE, draft_ms=2.0, draft_nodes=1, draft_node_ms=node_ms)
    tree = one_level([0.1, 0.5, 0.05, 0.3])
    likeliest = np.sort(1 + np.array([1, 3, 0, 2])[:nodes])
    assert (BestFirst().select_to_expand(tree, measured).nodes == likeliest).all()


def test_without_speculation_it_schedules_what_root_does():
    losing = replace(STATE, speculates=False)
    for fed in (True, False):
        tree = one_level([0.5, 0.3], fed=fed)
        assert chosen(BestFirst(), tree, losing).tolist() == chosen(Root(), tree, losing).tolist()
        assert not len(BestFirst().select_to_expand(tree, losing).nodes)
    stated = BestFirst(row_cost=0.0)
    assert chosen(stated, one_level([0.5, 0.3]), losing).tolist() == [1, 2], "it is not measured"
