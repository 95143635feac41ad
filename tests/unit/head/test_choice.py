"""One budget over the trees of many requests."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipespec.head.choice import Offer, certain, choose, share
from pipespec.head.feed.policy import PipelineState
from pipespec.head.tree import ROOT, Tree

STATE = PipelineState(num_stages=4, step=0)


def tree_of(rng: np.random.Generator, size: int, *, fed: bool) -> Tree:
    """A random tree, of which a random part that holds all ancestors has been fed."""
    tree = Tree(0, -1, 0, 0, fed=fed)
    while len(tree) < size:
        (parent,) = rng.choice(np.flatnonzero(~tree.expanded), 1)
        logps = np.log(rng.dirichlet(np.ones(3)))[None]
        tree.append(np.array([parent]), np.arange(3)[None], logps)
    for node in range(1, len(tree)):
        if tree.fed[tree.parent[node]] and rng.random() < 0.5:
            tree.feed(np.array([node]))
    return tree


def offers_of(rng: np.random.Generator, count: int, *, whole: bool = False) -> list[Offer]:
    found = []
    for _ in range(count):
        tree = tree_of(rng, int(rng.integers(1, 30)), fed=bool(rng.random() < 0.5))
        found.append(Offer(tree, np.flatnonzero(~tree.fed), whole))
    return found


@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 6),
    budget=st.integers(1, 40),
    row_cost=st.sampled_from([0.0, 0.05, None]),
)
def test_roots_come_first_then_the_likeliest_of_all(seed, count, budget, row_cost):
    rng = np.random.default_rng(seed)
    offers = offers_of(rng, count)
    chosen = choose(offers, budget, row_cost, STATE).taken
    assert sum(map(len, chosen)) <= budget
    roots = [i for i, offer in enumerate(offers) if offer.certain]
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
def test_what_is_fed_whole_goes_in_whole_in_its_turn(seed, count, budget):
    offers = offers_of(np.random.default_rng(seed), count, whole=True)
    chosen = choose(offers, budget, 0.0, STATE).taken
    for offer, nodes in zip(offers, chosen, strict=True):
        assert len(nodes) in (0, len(offer.nodes))
    if certain(offers) <= budget:
        assert sum(map(len, chosen)) == certain(offers)
    assert len(offers[0].nodes) > budget or len(chosen[0]) == len(offers[0].nodes)


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 60))
def test_a_draft_round_expands_the_likeliest_of_all(seed, count, budget):
    offers = offers_of(np.random.default_rng(seed), count)
    shares = share(offers, budget)
    wanted = sum(len(offer.nodes) for offer in offers)
    assert sum(map(len, shares)) == min(budget, wanted)
    cum = [offer.tree.cum[nodes] for offer, nodes in zip(offers, shares, strict=True)]
    left = [
        offer.tree.cum[np.setdiff1d(offer.nodes, nodes)]
        for offer, nodes in zip(offers, shares, strict=True)
    ]
    least, most = np.concatenate(cum), np.concatenate(left)
    assert not len(least) or not len(most) or least.min() >= most.max()
