"""Feed policies over a simulated pipeline: what they may choose, and what each is about."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipespec.errors import ConfigError
from pipespec.head.choice import Offer, choose
from pipespec.head.feed.adaptive import Adaptive
from pipespec.head.feed.best_first import BestFirst
from pipespec.head.feed.level import AFTER, BEFORE, Level
from pipespec.head.feed.policy import FeedPolicy, PipelineState, Rate
from pipespec.head.feed.root import Root
from pipespec.head.feed.rounds import AUTO, fits
from pipespec.head.feed.static_tree import StaticTree
from pipespec.head.meter import Meter
from pipespec.head.tree import ROOT, Tree
from pipespec.row_times import Measured

VOCABULARY = 6
STATE = PipelineState(num_stages=4, step=0)


def chosen(policy: FeedPolicy, tree: Tree, state: PipelineState) -> np.ndarray:
    """What is fed of one request that is alone."""
    offer = Offer(tree, policy.feed(tree, state), policy.whole)
    (nodes,) = choose([offer], policy.max_rows, policy.row_cost, state).taken
    return nodes


@dataclass
class Pipeline:
    """A head without models: random candidates, and a verdict `num_stages` steps after a feed.

    `luck` is the share of decided tokens that are children of the root, if it has any.
    """

    policy: FeedPolicy
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
            self.tree.feed(nodes)
            for node in self.tree.id[nodes].tolist():
                assert node not in self.entered, "fed twice"
                self.entered[node] = step
            if len(nodes) and not self.policy.keeps_unfed:
                self.tree.drop_unfed()

    def grow(self, state: PipelineState, *, urgent_only: bool) -> bool:
        growth = self.policy.grow(self.tree, state)
        if not len(growth.nodes) or (urgent_only and not growth.urgent):
            return False
        assert not self.tree.expanded[growth.nodes].any(), "expanded twice"
        shape = (len(growth.nodes), min(self.policy.children, VOCABULARY))
        tokens = np.array([self.rng.permutation(VOCABULARY)[: shape[1]] for _ in range(shape[0])])
        shares = self.rng.dirichlet(np.full(VOCABULARY, 0.5), shape[0])[:, : shape[1]]
        logps = np.log(np.maximum(shares, 1e-9))
        self.tree.append(growth.nodes, tokens, logps, growth.limit)
        self.tree.trim(self.policy.capacity)
        return True

    def hear(self, step: int) -> None:
        while self.entered.get(int(self.tree.id[ROOT])) == step - self.num_stages:
            children = np.flatnonzero(self.tree.parent[1:] == ROOT) + 1
            token = int(self.rng.integers(VOCABULARY))
            if len(children) and self.rng.random() < self.luck:
                token = int(self.tree.token[self.rng.choice(children)])
            self.tree.advance(token)
            self.decided += 1


widths = st.integers(1, 9)
policies = st.one_of(
    st.just(Root()),
    st.builds(
        Level,
        width=widths,
        children=st.integers(1, 5),
        levels_per_step=st.integers(1, 3),
        cut=st.sampled_from([AFTER, BEFORE]),
    ),
    st.builds(
        BestFirst,
        width=widths,
        children=st.integers(1, 5),
        capacity=st.just(60),
        row_cost=st.sampled_from([0.0, 0.01, None]),
    ),
    st.builds(Adaptive, width=widths, children=st.integers(1, 5), capacity=st.just(60)),
    st.builds(
        StaticTree,
        shape=st.lists(st.integers(1, 3), min_size=1, max_size=3),
        children=st.integers(3, 5),
        capacity=st.just(400),
    ),
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
def test_a_feed_is_unfed_nodes_parents_first_and_no_more_than_a_batch_holds(pipeline):
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
        tree.check()


@given(pipelines)
def test_stages_hold_no_more_nodes_than_their_pools_are_made_for(pipeline):
    tree, policy = pipeline.tree, pipeline.policy
    for _, nodes in pipeline.run(30):
        live = int(np.count_nonzero(tree.fed)) + len(nodes)
        assert live <= pipeline.num_stages * policy.max_rows
        held = int(np.count_nonzero(tree.fed | tree.expanded))
        assert held <= policy.capacity + policy.max_rows


@given(pipelines)
def test_the_text_goes_on_at_least_as_fast_as_without_guesses(pipeline):
    for _ in pipeline.run(30):
        pass
    assert pipeline.decided >= 29 // pipeline.num_stages


@given(pipelines)
@settings(max_examples=30)
def test_a_policy_is_a_pure_function_of_tree_and_state(pipeline):
    tree = pipeline.tree
    columns = ("id", "fed", "expanded", "cum")
    for state, nodes in pipeline.run(12):
        before = [getattr(tree, name).copy() for name in columns]
        assert np.array_equal(chosen(pipeline.policy, tree, state), nodes)
        pipeline.policy.grow(tree, state)
        for name, values in zip(columns, before, strict=True):
            assert np.array_equal(getattr(tree, name), values)


# --- level ------------------------------------------------------------------------------------


@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_level_feeds_so_many_levels_as_the_draft_had_rounds_for(levels, rounds, seed):
    policy = Level(width=4, children=3, levels_per_step=levels)
    pipeline = Pipeline(policy, num_stages=5, rounds=rounds, luck=1.0, seed=seed)
    for state, nodes in pipeline.run(5):
        depths = set(pipeline.tree.position[nodes].tolist())
        assert len(depths) == min(levels, rounds + (not state.step))
        assert len(nodes) <= 4 * len(depths)


@pytest.mark.parametrize(("cut", "fed"), [(BEFORE, []), (AFTER, [5, 6])])
def test_level_is_cut_before_the_verdict_or_after_it(cut, fed):
    """Of the children of 1 and 2, those of 1 are the more probable, but the target says 2."""
    policy = Level(width=2, children=2, cut=cut)
    tree = Tree(0, -1, 0, 0, fed=True)
    tree.append(np.array([ROOT]), np.array([[1, 2]]), np.log([[0.6, 0.4]]))
    tree.feed(np.arange(len(tree)))
    growth = policy.grow(tree, STATE)
    assert growth.nodes.tolist() == [1, 2]
    tree.append(
        growth.nodes, np.array([[3, 4], [5, 6]]), np.log([[0.5, 0.4], [0.5, 0.4]]), growth.limit
    )
    assert not len(policy.grow(tree, STATE).nodes), "one level ahead"
    tree.advance(2)
    assert tree.token[chosen(policy, tree, STATE)].tolist() == fed


# --- static_tree ------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(0, 2**32 - 1))
def test_a_static_tree_goes_in_as_a_whole_and_alone(shape, seed):
    policy = StaticTree(shape, children=4, width=200)
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


def test_the_next_static_tree_is_drafted_while_the_pipeline_works():
    policy = StaticTree([1, 1], children=3)
    pipeline = Pipeline(policy, num_stages=6, rounds=3, luck=1.0, seed=0)
    growths = 0
    for state, _ in pipeline.run(13):
        growths += state.step % 6 == 0 and bool(policy.grow(pipeline.tree, state).urgent)
        if state.step == 6:
            assert pipeline.tree.fed[1:].sum() == 0 and len(pipeline.tree) > 3


def test_a_static_tree_at_the_end_of_the_text_is_cut():
    policy = StaticTree([1, 1, 1])
    pipeline = Pipeline(policy, num_stages=2, rounds=1, luck=1.0, seed=0)
    state = replace(STATE, end=2)
    pipeline.rng = np.random.default_rng(0)
    while pipeline.grow(state, urgent_only=True):
        pass
    assert pipeline.tree.position[chosen(policy, pipeline.tree, state)].tolist() == [0, 1]


def test_a_source_that_proposes_nothing_holds_no_static_tree_up():
    tree = Tree(0, -1, 0, 0, fed=False)
    tree.expanded[ROOT] = True
    assert StaticTree([2, 2]).feed(tree, STATE).tolist() == [ROOT]


def test_the_default_static_tree_is_that_of_specinfer():
    assert StaticTree().shape == [1, 1, 3, 1, 1, 1, 1, 1]
    assert StaticTree().max_rows == 21


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"shape": []}, "[]"),
        ({"shape": [1, 0]}, "[1, 0]"),
        ({"shape": [2, 2], "children": 1}, "feed.children is 1"),
        ({"shape": [4, 4, 4]}, "85 nodes"),
        ({"shape": [4, 4], "capacity": 30}, "feed.capacity is 30"),
    ],
)
def test_a_static_tree_that_cannot_be_is_refused(arguments, named):
    with pytest.raises(ConfigError) as refusal:
        StaticTree(**arguments)
    assert named in str(refusal.value)


# --- best_first -------------------------------------------------------------------------------


def one_level(probabilities: list[float], *, fed: bool = True) -> Tree:
    tree = Tree(0, -1, 0, 0, fed=fed)
    tokens = np.arange(len(probabilities))[None]
    tree.append(np.array([ROOT]), tokens, np.log(probabilities)[None])
    return tree


def fed_probabilities(policy: BestFirst, tree: Tree, state: PipelineState) -> list[float]:
    return np.exp(tree.cum[chosen(policy, tree, state)]).round(6).tolist()


@pytest.mark.parametrize(
    ("row_cost", "tokens_per_step", "expected"),
    [
        (0.0, None, [0.5, 0.2, 0.1, 0.02]),
        (0.1, None, [0.5, 0.2, 0.1]),  # four stages: a token is worth four steps at most
        (0.1, 0.1, [0.5, 0.2, 0.1]),  # slower than plain decoding does not make it worth more
        (0.1, 0.5, [0.5, 0.2, 0.1]),
        (0.1, 1.2, [0.5, 0.2]),  # the faster the text, the less a row can save
    ],
)
def test_a_row_is_fed_if_what_it_may_save_is_worth_its_cost(row_cost, tokens_per_step, expected):
    tree = one_level([0.5, 0.2, 0.1, 0.02])
    state = replace(STATE, tokens_per_step=tokens_per_step)
    assert fed_probabilities(BestFirst(row_cost=row_cost), tree, state) == expected


def test_the_root_is_fed_whatever_a_row_costs():
    tree = one_level([0.01], fed=False)
    assert chosen(BestFirst(row_cost=0.9), tree, replace(STATE, tokens_per_step=2.0)).tolist() == [
        0
    ]


def test_a_measured_curve_bounds_the_width_where_rows_become_dear():
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
    tiled = replace(flat, step_ms=((1, 10.0), (4, 10.0), (5, 12.0), (16, 12.0)))
    assert len(chosen(policy, tree, tiled)) == 10


def test_where_rows_are_dear_roots_that_come_in_one_step_are_spread_over_several():
    offers = [Offer(one_level([0.5], fed=False), np.array([ROOT, 1])) for _ in range(12)]
    usually = np.minimum(np.arange(1, 17), 4.0)  # steps have had four roots each
    nothing = np.zeros(16)
    dear = replace(STATE, offered=usually, offered_slots=nothing, step_ms=((1, 10.0), (16, 40.0)))
    taken = choose(offers, 16, None, dear).taken
    assert [len(nodes) for nodes in taken] == [1] * 4 + [0] * 8
    free = replace(dear, step_ms=((1, 10.0), (16, 10.0)))
    assert sum(map(len, choose(offers, 16, None, free).taken)) == 16


def test_where_contexts_are_dear_roots_that_come_in_one_step_are_spread_over_several():
    offers = [
        Offer(one_level([0.5, 0.2], fed=False), np.arange(3), context=1000) for _ in range(12)
    ]
    # Steps have had four roots each; reading their contexts takes four times as long as the rest.
    usually = np.minimum(np.arange(1, 37), 4.0)
    dear = replace(
        STATE,
        offered=usually,
        offered_slots=1000 * usually,
        step_ms=((1, 10.0), (36, 10.0)),
        slot_ms=0.01,
    )
    taken = choose(offers, 36, None, dear).taken
    # What is read for a root is read for its guesses too.
    assert [len(nodes) for nodes in taken] == [3] * 4 + [0] * 8
    # The one that has waited longest is fed however long its context is.
    longest = [replace(offers[0], context=9000), *offers[1:]]
    assert [len(nodes) for nodes in choose(longest, 36, None, dear).taken] == [3] + [0] * 11
    free = replace(dear, slot_ms=0.0)
    assert sum(map(len, choose(offers, 36, None, free).taken)) == 36


def test_a_context_is_read_for_guesses_only_if_they_save_more_than_that():
    far, near = (
        Offer(one_level([0.3, 0.2], fed=fed), np.arange(fed, 3), context=1000)
        for fed in (True, False)
    )
    # A token takes 10 ms: the guesses of either save 5, and a cost counts 1.5 times.
    state = replace(
        STATE, offered=np.ones(8), offered_slots=np.zeros(8), step_ms=((1, 10.0), (16, 10.0))
    )
    for slot_ms, fed in ((0.0, [2, 3]), (0.003, [2, 3]), (0.004, [0, 3])):
        taken = choose([far, near], 16, None, replace(state, slot_ms=slot_ms)).taken
        assert [len(nodes) for nodes in taken] == fed, "the root reads that of the second anyway"


# --- rounds and measurements ------------------------------------------------------------------


def rounds_per_step(meter: Meter, draft_ms: float, stage_ms: float, steps: int) -> list[int]:
    """The rounds that `auto` makes when a step of the stages and a round last so long."""
    out = []
    for step in range(steps):
        meter.fed(1)
        meter.begin()
        elapsed = 0.0
        while fits(AUTO, meter.state(step, end=9, elapsed_ms=elapsed)):
            elapsed += draft_ms
            meter.round(draft_ms)
        meter.verdict(elapsed, max(0.0, stage_ms - elapsed), tokens=1)
        out.append(meter.rounds)
    return out


def test_auto_makes_the_rounds_that_end_before_the_verdict():
    meter = Meter(num_stages=4)
    rounds = rounds_per_step(meter, draft_ms=3.0, stage_ms=10.0, steps=300)
    assert rounds[0] == 1 and set(rounds[1:]) == {3}
    # The stages became faster, the head is late and does not know by how much.
    rounds = rounds_per_step(meter, draft_ms=3.0, stage_ms=4.0, steps=300)
    assert set(rounds[-50:]) == {1}
    rounds = rounds_per_step(meter, draft_ms=3.0, stage_ms=19.0, steps=600)
    assert set(rounds[-50:]) == {6}


def test_a_draft_slower_than_a_stage_makes_one_round():
    assert set(rounds_per_step(Meter(4), draft_ms=12.0, stage_ms=10.0, steps=50)) == {1}


def test_a_number_of_rounds_needs_no_measurement():
    state = replace(STATE, elapsed_ms=1e9, draft_ms=1.0, verdict_ms=1.0)
    assert [fits(3, replace(state, rounds=done)) for done in range(5)] == [True] * 3 + [False] * 2


def test_the_two_ways_are_measured_apart_and_a_filling_pipeline_not_at_all():
    meter = Meter(num_stages=2)

    def state() -> PipelineState:
        return meter.state(0, end=9, elapsed_ms=0.0)

    for _ in range(4):
        meter.step(10.0, 0, guesses=False)
    assert state().plain == Rate(20.0, 4) and state().guessing is None
    for tokens in (0, 0, 1, 2, 1, 2):
        meter.step(15.0, tokens, guesses=True)
    assert state().guessing == Rate(10.0, 4) and state().tokens_per_step == 1.5
    assert (state().made_guesses, state().streak) == (True, 6)
    meter.step(30.0, 1, guesses=False)
    assert state().plain == Rate(60.0, 1), "measured anew"
    assert state().guessing == Rate(10.0, 4), "remembered"


def test_a_token_without_guesses_costs_less_the_more_requests_decode_one():
    meter = Meter(num_stages=4)
    for _ in range(8):
        meter.step(10.0, 1, guesses=False, requests=4)
    plain = meter.state(0, end=9, elapsed_ms=0.0).plain
    assert plain is not None and plain.ms_per_token == 10.0  # 40 for one request


def test_a_row_is_worth_less_the_more_requests_share_the_step():
    tree = one_level([0.5, 0.2, 0.1, 0.02])
    alone, crowd = (replace(STATE, requests=requests) for requests in (1, 8))
    fed = [len(chosen(BestFirst(row_cost=0.1), tree, state)) for state in (alone, crowd)]
    assert fed == [3, 2]


def test_the_time_curve_of_a_step_rises_with_the_largest_batch_in_the_pipeline():
    meter = Meter(num_stages=2)
    for rows, ms in ((1, 5.0), (16, 9.5), (1, 20.0), (1, 22.0), (1, 12.0), (4, 10.0), (1, 9.0)):
        meter.begin()
        meter.fed(rows)
        meter.step(ms, 0, guesses=True)
    # The steps of 20 and 22 ms, after the one that fed it, computed the batch of 16 rows.
    assert meter.state(0, end=9, elapsed_ms=0.0).step_ms == ((1, 10.5), (4, 10.5), (16, 21.0))


def test_what_the_stages_have_measured_stands_for_the_steps_and_what_these_last_beside():
    meter = Meter(num_stages=2)
    meter.stages(Measured(((1, 5.0), (16, 20.0))))
    for rows, ms in ((16, 1.0), (1, 23.0), (1, 22.0), (1, 7.5), (1, 7.5)):
        meter.begin()
        meter.fed(rows)
        meter.step(ms, 0, guesses=True)
    # 3 and 2 ms beside the 20 of the batch of 16 rows, and 2.5 beside those of one row.
    assert meter.state(0, end=9, elapsed_ms=0.0).step_ms == ((1, 7.5), (16, 22.5))


# --- adaptive ---------------------------------------------------------------------------------


@dataclass
class Text:
    """A text of which guessing decides `tokens` per step of `guessing_ms`; four stages."""

    policy: Adaptive
    meter: Meter = field(default_factory=lambda: Meter(4))
    owed: float = 0.0

    def decode(
        self, steps: int, *, tokens: float, guessing_ms: float, plain_ms: float = 10.0
    ) -> list[bool]:
        """In which steps it guessed."""
        out = []
        for step in range(steps):
            guesses = self.policy.guesses(self.meter.state(step, end=9, elapsed_ms=0.0))
            self.owed += tokens if guesses else 1 / 4
            self.meter.step(guessing_ms if guesses else plain_ms, int(self.owed), guesses=guesses)
            self.owed %= 1
            out.append(guesses)
        return out


ADAPTIVE = Adaptive(trial=4, patience=64)


def test_guessing_that_pays_goes_on():
    guessed = Text(ADAPTIVE).decode(2000, tokens=0.8, guessing_ms=12.0)
    assert guessed[0] and np.mean(guessed) > 0.97


def test_guessing_at_a_loss_gives_way_to_plain_decoding():
    # As many tokens per step as without guesses, in longer steps.
    guessed = Text(ADAPTIVE).decode(4000, tokens=0.25, guessing_ms=13.0)
    assert np.mean(guessed) < 0.08
    assert any(guessed[-300:]), "it is tried again now and then"


def test_a_slow_draft_can_make_many_tokens_per_step_a_loss():
    assert np.mean(Text(ADAPTIVE).decode(4000, tokens=0.9, guessing_ms=60.0)) < 0.08


def test_it_follows_the_text():
    text = Text(ADAPTIVE)
    text.decode(800, tokens=0.9, guessing_ms=12.0)
    assert np.mean(text.decode(800, tokens=0.1, guessing_ms=12.0)[-400:]) < 0.3
    assert np.mean(text.decode(1200, tokens=0.9, guessing_ms=12.0)[-600:]) > 0.9


def test_without_guesses_it_feeds_what_root_feeds():
    losing = replace(STATE, plain=Rate(40.0, 9), guessing=Rate(50.0, 9), streak=9)
    assert not ADAPTIVE.guesses(losing)
    for fed in (True, False):
        tree = one_level([0.5, 0.3], fed=fed)
        assert chosen(ADAPTIVE, tree, losing).tolist() == chosen(Root(), tree, losing).tolist()
        assert not len(ADAPTIVE.grow(tree, losing).nodes)
    winning = replace(losing, guessing=Rate(30.0, 9))
    assert chosen(ADAPTIVE, one_level([0.5, 0.3]), winning).tolist() == [1, 2]
