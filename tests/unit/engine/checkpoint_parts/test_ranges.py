"""Sets of byte ranges, and the pieces in which what is absent is fetched."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pipespec.engine.checkpoint_parts.ranges import RangeSet, pieces

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda r: (r[0], sum(r))))


def members(ranges: object) -> set[int]:
    return {n for start, stop in ranges for n in range(start, stop)}  # type: ignore[attr-defined]


@given(RANGES, RANGES)
def test_a_set_holds_the_bytes_of_its_ranges(added, asked):
    found = RangeSet(added)
    assert members(found) == members(added)
    assert found.num_bytes == len(members(added))
    ordered = list(found)
    assert all(a[1] < b[0] for a, b in pairwise(ordered))
    for each in asked:
        assert members(found.gaps(each)) == members([each]) - members(added)
        assert (each in found) == (members([each]) <= members(added))


@given(RANGES, RANGES, st.integers(1, 30), st.integers(0, 5))
def test_pieces_cover_what_is_absent_and_little_else(wanted, here, size, gap):
    found = pieces(wanted, RangeSet(here), piece_bytes=size, max_gap=gap)
    absent = members(wanted) - members(here)
    assert absent <= members(found)
    assert all(0 < stop - start <= size for start, stop in found)
    assert sum(stop - start for start, stop in found) == len(members(found))
    # Beyond it only gaps between two absent ranges.
    extra = members(found) - absent
    assert all(any(n + d in absent for d in range(gap + 1)) for n in extra)
