"""One budget over the trees of many requests."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipespec.head.policies.policy import OfferedRows, PipelineState
from pipespec.head.row_budget import (
    RequestCandidates,
    select_rows,
    split_expansion,
    target_batch,
    total_certain,
)
from pipespec.head.tree import ROOT, Tree

STATE = PipelineState(num_stages=4, step=0)


def tree_of(rng: np.random.Generator, size: int, *, fed: bool) -> Tree:
    """A random tree, of which a random part that holds all ancestors has been fed."""
    tree = Tree(0, -1, 0, 0, fed=fed)
    while len(tree) < size:
        (parent,) = rng.choice(np.flatnonzero(~tree.expanded), 1)
        logps = np.log(rng.dirichlet(np.ones(3)))[None]
        tree.add_children(np.array([parent]), np.arange(3)[None], logps)
    for node in range(1, len(tree)):
        if tree.fed[tree.parent[node]] and rng.random() < 0.5:
            tree.mark_fed(np.array([node]))
    return tree


def offers_of(
    rng: np.random.Generator, count: int, *, whole: bool = False
) -> list[RequestCandidates]:
    found = []
    for _ in range(count):
        tree = tree_of(rng, int(rng.integers(1, 30)), fed=bool(rng.random() < 0.5))
        found.append(RequestCandidates(tree, np.flatnonzero(~tree.fed), whole))
    return found


def waiting(num_roots: int, step_ms: tuple[tuple[int, float], ...]) -> PipelineState:
    """32 requests on 8 stages, of whose roots so many wait as batches have 2 rows."""
    certain = np.ones(num_roots)
    offered = OfferedRows(certain, certain, np.zeros(num_roots), fed=2.0)
    return replace(STATE, num_stages=8, requests=32, offered=offered, step_ms=step_ms)


@pytest.mark.parametrize(("ms_of_64", "rows", "ms"), [(1280.0, 4, 20.0), (20.0, 20, 5.0)])
def test_waiting_roots_make_no_batch_larger_than_all_can_be_unless_they_take_no_time(
    ms_of_64: float, rows: int, ms: float
) -> None:
    """One that held them all would be followed by empty ones, and delay each of eight steps."""
    target = target_batch(waiting(20, ((1, 20.0), (64, ms_of_64))))
    assert target is not None
    assert (target.rows, target.ms_per_token) == (rows, pytest.approx(ms))


@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 6),
    budget=st.integers(1, 40),
    row_cost=st.sampled_from([0.0, 0.05, None]),
)
def test_roots_are_selected_before_the_most_probable_draft_tokens(seed, count, budget, row_cost):
    rng = np.random.default_rng(seed)
    offers = offers_of(rng, count)
    chosen = select_rows(offers, budget, row_cost, STATE).nodes
    assert sum(map(len, chosen)) <= budget
    roots = [i for i, offer in enumerate(offers) if offer.num_certain]
    for place, i in enumerate(roots):
        assert (ROOT in chosen[i]) == (place < budget), "those who have waited longest"
    taken, left = [], []
    for offer, nodes in zip(offers, chosen, strict=True):
        tree = offer.tree
        assert set(nodes.tolist()) <= set(offer.nodes.tolist())
        for node in nodes.tolist():  # closed under ancestors, parents first
            parent = int(tree.parent[node])
            assert node == ROOT or tree.fed[parent] or parent in nodes[: nodes.tolist().index(node)]
        if tree.fed[ROOT] or ROOT in nodes:
            chances = np.exp(tree.cum)
            taken += [chances[node] for node in nodes.tolist() if node != ROOT]
            left += [chances[node] for node in set(offer.nodes.tolist()) - {ROOT, *nodes.tolist()}]
    assert not taken or not left or min(taken) >= max(left) - 1e-12
    if row_cost == 0.0:
        assert sum(map(len, chosen)) == budget or not left


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 60))
def test_whole_candidates_are_selected_completely_or_not_at_all(seed, count, budget):
    offers = offers_of(np.random.default_rng(seed), count, whole=True)
    chosen = select_rows(offers, budget, 0.0, STATE).nodes
    for offer, nodes in zip(offers, chosen, strict=True):
        assert len(nodes) in (0, len(offer.nodes))
    if total_certain(offers) <= budget:
        assert sum(map(len, chosen)) == total_certain(offers)
    assert len(offers[0].nodes) > budget or len(chosen[0]) == len(offers[0].nodes)


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 60))
def test_draft_round_expands_the_most_probable_nodes_of_all_requests(seed, count, budget):
    offers = offers_of(np.random.default_rng(seed), count)
    shares = split_expansion([(each.tree, each.nodes) for each in offers], budget)
    wanted = sum(len(offer.nodes) for offer in offers)
    assert sum(map(len, shares)) == min(budget, wanted)
    cum = [offer.tree.cum[nodes] for offer, nodes in zip(offers, shares, strict=True)]
    left = [
        offer.tree.cum[np.setdiff1d(offer.nodes, nodes)]
        for offer, nodes in zip(offers, shares, strict=True)
    ]
    least, most = np.concatenate(cum), np.concatenate(left)
    assert not len(least) or not len(most) or least.min() >= most.max()


def test_draft_round_expands_the_trees_that_requests_wait_for_first():
    offers = offers_of(np.random.default_rng(0), 2)
    first, second = (each.tree for each in offers)
    nodes = np.arange(1, 6)
    second.cum[nodes] = first.cum[nodes] - 1
    few, all_of = split_expansion([(first, nodes), (second, nodes)], 7, [False, True])
    assert all_of.tolist() == nodes.tolist()
    assert len(few) == 2
