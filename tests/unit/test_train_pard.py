"""The rows that a parallel draft learns from."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tools.train_pard import Places


@given(st.integers(2, 24), st.integers(1, 5), st.floats(0.1, 1.0), st.integers(0, 2**32 - 1))
def test_a_mask_is_kept_only_with_all_that_it_sees(length, tokens, retain, seed):
    places = Places.drawn(length, tokens, retain, 0.2, np.random.default_rng(seed))
    rows = [*zip(places.anchor.tolist(), places.depth.tolist(), strict=True)]
    assert len(set(rows)) == len(rows) and rows[:length] == [(i, 0) for i in range(length)]
    assert all((anchor, depth - 1) in rows for anchor, depth in rows if depth)
    assert all(anchor + depth < length for anchor, depth in rows), "what follows is known"
    most = [round(length * max(retain**depth, 0.2)) for depth in range(tokens)]
    assert all((places.depth == depth).sum() <= most[depth] for depth in range(1, tokens))
    sees = places.mask()
    for i, (anchor, depth) in enumerate(rows):
        seen = {rows[j] for j in torch.nonzero(sees[i]).flatten().tolist()}
        text = {(before, 0) for before in range(anchor + 1)}
        assert seen == text | {(anchor, above) for above in range(1, depth + 1)}
