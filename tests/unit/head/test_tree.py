"""The tree against brute force over a plain dictionary of parents."""

from copy import deepcopy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipespec.head.tree import ROOT, Tree
from tests.helpers.trees import check_tree

VOCABULARY = 5


def grown(seed: int, rounds: int) -> Tree:
    """A tree that random rounds of expansion have grown, at any depth."""
    rng = np.random.default_rng(seed)
    tree = Tree(7, 6, token=1, position=10, fed=True)
    for _ in range(rounds):
        unexpanded = np.flatnonzero(~tree.expanded)
        if not len(unexpanded):
            break
        count = rng.integers(1, min(3, len(unexpanded)) + 1)
        parents = np.sort(rng.choice(unexpanded, count, replace=False))
        children = rng.integers(1, VOCABULARY)
        tokens = np.array([rng.permutation(VOCABULARY)[:children] for _ in parents])
        tree.add_children(parents, tokens, -rng.exponential(size=tokens.shape))
        check_tree(tree)
    return tree


def brute_ancestors(tree: Tree) -> dict[int, set[int]]:
    """Ids of each node's ancestors and itself, by walking up the ids."""
    parent = dict(zip(tree.id.tolist(), tree.parent_id.tolist(), strict=True))
    out = {}
    for node in parent:
        chain, at = set(), node
        while at in parent:
            chain.add(at)
            at = parent[at]
        out[node] = chain
    return out


trees = st.builds(grown, st.integers(0, 2**32 - 1), st.integers(0, 12))


@given(trees)
def test_a_path_is_the_walk_to_the_root(tree):
    ancestors = brute_ancestors(tree)
    for i, node in enumerate(tree.id.tolist()):
        assert [int(tree.id[j]) for j in tree.path(i)] == sorted(
            ancestors[node], key=lambda a: len(ancestors[a])
        )


@given(trees, st.data())
def test_pruning_keeps_exactly_the_subtree(tree, data):
    ancestors = brute_ancestors(tree)
    root = data.draw(st.integers(0, len(tree) - 1))
    root_id, probability = int(tree.id[root]), float(tree.cum[root])
    before = {int(i): float(c) for i, c in zip(tree.id, tree.cum, strict=True)}
    tree.prune(tree.path(root))
    check_tree(tree)
    assert set(tree.id.tolist()) == {n for n, chain in ancestors.items() if root_id in chain}
    for node, cum in zip(tree.id.tolist(), tree.cum.tolist(), strict=True):
        assert cum == pytest.approx(before[node] - probability)


@given(trees, st.integers(0, VOCABULARY))
def test_advance_moves_to_the_child_or_starts_anew(tree, token):
    child = tree.child(ROOT, token)
    old_root, old_ids = int(tree.id[ROOT]), set(tree.id.tolist())
    expected = None if child is None else int(tree.id[child])
    assert tree.advance([token]) == ([tree.id[ROOT]], [0])
    check_tree(tree)
    assert tree.token[ROOT] == token and tree.position[ROOT] == 11
    assert tree.parent_id[ROOT] == old_root
    if expected is None:
        assert len(tree) == 1 and tree.id[ROOT] not in old_ids and not tree.fed[ROOT]
    else:
        assert tree.id[ROOT] == expected


@given(trees, st.lists(st.integers(0, VOCABULARY), max_size=4), st.randoms(use_true_random=False))
def test_advancing_by_several_tokens_is_advancing_by_each(tree, tokens, random):
    for i in range(1, len(tree)):
        if tree.fed[tree.parent[i]] and random.random() < 0.5:
            tree.mark_fed(np.array([i]))
    one_by_one = deepcopy(tree)
    found = [one_by_one.advance([token]) for token in tokens]
    assert tree.advance(tokens) == ([i for (i,), _ in found], [depth for _, (depth,) in found])
    check_tree(tree)
    for name in ("id", "parent", "token", "fed", "cum"):
        assert getattr(tree, name).tolist() == getattr(one_by_one, name).tolist()


@given(trees, st.integers(1, 40), st.randoms(use_true_random=False))
def test_trimming_spares_what_others_hold_and_drops_the_least_probable(tree, capacity, random):
    for i in range(1, len(tree)):  # feed some, ancestors first
        if tree.fed[tree.parent[i]] and random.random() < 0.3:
            tree.mark_fed(np.array([i]))
    held = set(tree.id[tree.fed | tree.expanded].tolist())
    loose = sorted(tree.cum[~(tree.fed | tree.expanded)].tolist())
    excess = max(0, len(tree) - capacity)
    tree.trim(capacity)
    check_tree(tree)
    assert held <= set(tree.id.tolist())
    left = sorted(tree.cum[~(tree.fed | tree.expanded)].tolist())
    assert left == loose[min(excess, len(loose)) :]


@given(st.integers(0, 2**32 - 1), st.integers(0, 12))
def test_a_limit_keeps_the_most_probable_candidates(seed, limit):
    rng = np.random.default_rng(seed)
    tree = Tree(0, -1, 0, 0, fed=True)
    tree.add_children(np.array([ROOT]), np.array([[1, 2, 3]]), -rng.exponential(size=(1, 3)))
    parents = np.array([1, 2, 3])
    tokens = np.tile(np.arange(4), (3, 1))
    logps = -rng.exponential(size=(3, 4))
    best = np.sort((tree.cum[parents][:, None] + logps).ravel())[::-1][:limit]
    assert tree.add_children(parents, tokens, logps, limit) == min(limit, 12)
    check_tree(tree)
    assert np.allclose(np.sort(tree.cum[4:])[::-1], best)


@given(trees, st.integers(1, 20))
def test_the_best_of_all_nodes_is_closed_under_ancestors(tree, count):
    chosen = tree.most_probable(np.arange(len(tree)), count)
    assert len(chosen) == min(count, len(tree))
    assert set(tree.parent[chosen].tolist()) <= set(chosen.tolist())
    assert tree.cum[chosen].min() >= np.delete(tree.cum, chosen).max(initial=-np.inf)


def test_a_candidate_of_no_probability_is_none():
    tree = Tree(0, -1, 0, 0, fed=True)
    added = tree.add_children(np.array([ROOT]), np.array([[1, 2]]), np.array([[-1.0, -np.inf]]))
    assert added == 1 and tree.token.tolist() == [0, 1]


@given(trees, st.integers(8, 30), st.integers(0, 2**32 - 1))
def test_nodes_before_an_end_are_chosen_by_position(tree, end, seed):
    chosen = np.random.default_rng(seed).random(len(tree)) < 0.5
    expected = [i for i in range(len(tree)) if chosen[i] and tree.position[i] < end]
    assert tree.nodes_before(end, chosen).tolist() == expected
