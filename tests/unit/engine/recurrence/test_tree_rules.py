"""Scores of a tree's rows and their ancestors, beside double precision."""

import numpy as np
import pytest
import torch

from pipespec.engine.recurrence.tree_rules import Paths

NODES, HEADS, SIZE = 64, 3, 5
TOLERANCE = 1e-5


def ancestors_of(parents: list[int]) -> np.ndarray:
    """Bool `[rows, columns]`: which nodes are above each node, itself included."""
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    order = np.argsort(mask.sum(1), kind="stable")  # by rising position
    return mask[order][:, order]


def paths_of(mask: np.ndarray) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The same as columns, the nearest first, filled up with their number."""
    depth = mask.sum(1)
    path = np.full((len(mask), depth.max()), len(mask))
    for row, seen in enumerate(mask):
        path[row, : depth[row]] = np.flatnonzero(seen)[::-1]
    first = [int(np.argmax(depth > place)) for place in range(path.shape[1])]
    return torch.from_numpy(path)[None], tuple(first)


@pytest.mark.parametrize("strength", [1e-6, 0.05, 1.0, 30.0])
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("channels", [1, SIZE])
def test_scores_and_decays_are_those_of_double_precision(strength, shape, channels):
    rng = np.random.default_rng(0)
    nodes = range(NODES)
    parents = [i - 1 if shape == "chain" else int(rng.integers(-1, max(i, 1))) for i in nodes]
    mask = ancestors_of(parents)
    path, first = paths_of(mask)
    decays = torch.from_numpy(-strength * rng.random((1, NODES, HEADS, channels)))
    keys, *rows = (torch.from_numpy(rng.normal(size=(1, NODES, HEADS, SIZE))) for _ in range(3))
    seen = torch.from_numpy(mask).double()
    # Both log decays from the tip; double precision has digits enough for their difference.
    total = torch.einsum("rc,bchd->brhd", seen, decays)
    between = total[:, :, None] - total[:, None]
    weights = between.masked_fill(~torch.from_numpy(mask)[None, :, :, None, None], -torch.inf).exp()
    wanted = [torch.einsum("brhk,bchk,brchk->bhrc", x, keys, weights) for x in rows]
    ancestors = seen.float()[None]
    paths = Paths(decays.float(), ancestors, path, first)
    found = paths.scores(keys.float(), *(x.float() for x in rows))
    for ours, right in zip(found, wanted, strict=True):
        assert (ours - right).abs().max() <= TOLERANCE * right.abs().max().clamp(min=1)
    assert (paths.from_tip - total.exp()).abs().max() <= TOLERANCE
