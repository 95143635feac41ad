"""The invariants of a tree of draft tokens."""

from __future__ import annotations

import numpy as np

from pipespec.head.tree import ROOT, Tree


def check_tree(tree: Tree) -> None:
    """Assert what the rest of the code relies on."""
    index = np.arange(len(tree))
    assert tree.parent[ROOT] == ROOT and tree.cum[ROOT] == 0
    assert tree.num_fed == np.count_nonzero(tree.fed)
    assert (tree.parent[1:] < index[1:]).all(), "a parent comes before its children"
    assert (np.diff(tree.position) >= 0).all(), "breadth-first order"
    assert (tree.position[1:] == tree.position[tree.parent[1:]] + 1).all()
    assert (tree.parent_id[1:] == tree.id[tree.parent[1:]]).all()
    assert len(set(tree.id.tolist())) == len(tree)
    assert np.allclose(tree.cum[1:], tree.cum[tree.parent[1:]] + tree.logp[1:])
    siblings = list(zip(tree.parent[1:].tolist(), tree.token[1:].tolist(), strict=True))
    assert len(set(siblings)) == len(siblings), "siblings differ in their token"
