"""The likeliest paths of products of marginals, against all of them."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipespec.core import NO_PARENT_NODE, NODE, PARENT, POSITION, TOKEN
from pipespec.head.proposers.parallel import ParallelDraft, best_paths
from pipespec.head.tree import ROOT, Tree


def logs(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Coarse log-probabilities, so that some are equal; some are none."""
    found = np.log(rng.integers(1, 5, shape) / 8)
    return np.where(rng.random(shape) < 0.1, -np.inf, found)


@given(st.integers(0, 2**32 - 1), st.integers(0, 12))
def test_best_paths_equal_the_best_of_all_products(seed, count):
    rng = np.random.default_rng(seed)
    k, children, masks, n = rng.integers(1, 4, 4).tolist()
    cum, candidates = np.log(rng.integers(1, 5, k) / 4), logs(rng, k, children)
    tokens = np.array([[rng.permutation(9)[:n] for _ in range(masks)] for _ in range(k)])
    logps = logs(rng, k, masks, n)
    every = []
    for node, child in product(range(k), range(children)):
        for depth in range(1, masks + 1):
            for columns in product(range(n), repeat=depth):
                marginals = [logps[node, level, column] for level, column in enumerate(columns)]
                every.append(cum[node] + candidates[node, child] + sum(marginals))
    every = sorted((value for value in every if np.isfinite(value)), reverse=True)
    paths = best_paths(cum, candidates, tokens, logps, count)
    value = [*(cum[:, None] + candidates).ravel()]
    owner = [*np.repeat(np.arange(k), children)]
    depth = [0] * len(value)
    seen = set()
    for above, token, logp in zip(paths.parents, paths.tokens, paths.logps, strict=True):
        assert above < len(value) and (above, token) not in seen
        seen.add((above, token))
        node, level = owner[above], depth[above]
        column = np.flatnonzero(tokens[node, level] == token)
        assert logps[node, level, column] == [logp]
        value.append(value[above] + logp)
        owner.append(node)
        depth.append(level + 1)
    got = sorted(value[candidates.size :], reverse=True)
    assert got == pytest.approx(every[:count])


def test_no_mask_rows_give_no_paths():
    none = best_paths(np.zeros(1), np.zeros((1, 2)), np.zeros((1, 0, 0)), np.zeros((1, 0, 0)), 5)
    assert not len(none.parents) and not len(none.logps)


def test_mask_rows_form_chains_below_the_likeliest_nodes():
    tree = Tree(4, 3, 9, position=4, fed=True)
    tree.add_children(np.array([ROOT]), np.array([[1, 2, 3]]), np.log([[0.2, 0.5, 0.3]]))
    parallel = ParallelDraft(mask_token=77, tokens=3, end_position=8)
    nodes = parallel.select_nodes(tree, np.arange(1, 4), room=5)
    assert tree.token[nodes].tolist() == [2, 3]
    rows = parallel.mask_rows(tree, 0, nodes)
    assert rows[:, NODE].tolist() == [-2, -3, -4, -5] and (rows[:, NODE] < NO_PARENT_NODE).all()
    assert rows[:, PARENT].tolist() == [tree.id[nodes[0]], -2, tree.id[nodes[1]], -4]
    assert rows[:, POSITION].tolist() == [6, 7, 6, 7]
    assert (rows[:, TOKEN] == 77).all()
    assert not len(
        ParallelDraft(77, 3, end_position=7).select_nodes(tree, np.arange(1, 4), room=50)
    )
    assert not len(parallel.select_nodes(tree, np.arange(1, 4), room=1))
