"""Attention plans made of explicit segments."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from pipespec.engine.attention.attention_plan import AttentionPlan, Reach, Segment


def joined(segments: Sequence[Segment], write: np.ndarray) -> AttentionPlan:
    """The plan of these segments, whose pages are the last rows of its page table, in order."""
    longest = max(len(segment.prefix) for segment in segments)
    pages = np.full((len(segments) + 1, longest + 1), -1)  # -1: no slot
    for row, segment in enumerate(segments, start=1):
        pages[row, : len(segment.prefix)] = segment.prefix
    return AttentionPlan(
        write=write,
        positions=np.concatenate([s.positions for s in segments]),
        row_start=np.array([0, *(s.rows.stop for s in segments)]),
        pages=pages,
        page_row=np.arange(1, len(segments) + 1),
        prefix_length=np.array([len(s.prefix) for s in segments]),
        tree=np.concatenate([s.tree for s in segments]),
        tree_positions=np.concatenate([s.tree_positions for s in segments]),
        tree_start=np.cumsum([0, *(len(s.tree) for s in segments)]),
        mask=np.concatenate([s.mask.ravel() for s in segments]),
        num_committed=np.zeros(len(segments), np.int64),
        keeps_state=np.zeros(len(segments), np.int64),
        state_number=np.zeros(len(segments), np.int64),
    )


@st.composite
def plans(draw: st.DrawFn, num_slots: int) -> AttentionPlan:
    """Plans of some requests, whose keys are any slots in any order."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    free = rng.permutation(num_slots)
    parts, writes = [], []
    row = 0
    for _ in range(draw(st.integers(1, 4))):
        prefix = draw(st.sampled_from([0, 1, 5, 31, 64, 150]))
        alone = prefix > 0 and draw(st.booleans())  # one row, which is part of the text
        rows = 1 if alone else draw(st.integers(1, 7))
        tree = 0 if alone else rows + draw(st.integers(0, 40))
        if prefix + tree > len(free):
            break
        mine, free = np.split(free, [prefix + tree])
        positions = prefix + rng.integers(0, 9, tree) if tree else np.zeros(0, np.int64)
        mask = rng.random((rows, tree)) < draw(st.sampled_from([0.0, 0.3, 1.0]))
        if tree:
            mask[:, tree - rows :] |= np.eye(rows, dtype=bool)
        writes.append(mine[-rows:])
        parts.append(
            Segment(
                slice(row, row + rows),
                positions[tree - rows :] if tree else np.array([prefix - 1]),
                mine[:prefix],
                mine[prefix:],
                positions,
                mask,
            )
        )
        row += rows
    return joined(parts, np.concatenate(writes))


def seen_by(plan: AttentionPlan, reach: Reach) -> list[dict[int, int]]:
    """For each row the slots that it sees, with their positions."""
    found = []
    for part in plan.segments():
        for at, mask in zip(part.positions.tolist(), part.mask, strict=True):
            keys = dict(zip(part.prefix.tolist(), range(len(part.prefix)), strict=True))
            tree = zip(part.tree[mask].tolist(), part.tree_positions[mask].tolist(), strict=True)
            keys |= dict(tree)
            if reach.chunk is not None:
                own = at // reach.chunk
                keys = {slot: place for slot, place in keys.items() if place // reach.chunk >= own}
            elif reach.window is not None:
                keys = {slot: place for slot, place in keys.items() if at - place < reach.window}
            found.append(keys)
    return found
