"""Attention plans out of segments that are spelled out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipespec.engine.attention.plan import AttentionPlan, Segment


def joined(segments: Sequence[Segment], write: np.ndarray) -> AttentionPlan:
    """The plan of these segments; the last rows of its page table are theirs, in turn."""
    longest = max(len(segment.prefix) for segment in segments)
    pages = np.full((len(segments) + 1, longest + 1), -1)  # what is not theirs is no slot
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
    )
