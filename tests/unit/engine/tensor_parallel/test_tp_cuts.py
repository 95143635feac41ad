import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipespec.engine.tensor_parallel.tp_cuts import IN, OUT, Cut, equal_parts, share

NUMBERS = st.integers(1, 8)


@given(total=st.integers(1, 100), unit=NUMBERS, members=NUMBERS)
def test_parts_are_whole_units_and_differ_by_one(total, unit, members):
    if -(-total // unit) < members:
        with pytest.raises(ValueError, match="have none"):
            share(total, unit, members)
        return
    parts = share(total, unit, members)
    assert [number for part in parts for number in part] == [*range(total)]
    assert all(part.start % unit == 0 for part in parts)
    units = [-(-len(part) // unit) for part in parts]
    assert max(units) - min(units) <= 1
    assert units == sorted(units, reverse=True)


def test_heads_are_divided_equally_or_held_by_members_that_follow_one_another():
    assert equal_parts(64, 16, 2, 2) == [range(32), range(32, 64)]
    assert equal_parts(32, 16, 4, 2) == [range(16), range(16), range(16, 32), range(16, 32)]
    for total, unit, members, parts in ((64, 16, 3, 3), (64, 16, 8, 8), (32, 16, 3, 2)):
        with pytest.raises(ValueError, match="not divided equally"):
            equal_parts(total, unit, members, parts)


@given(first=NUMBERS, size=st.integers(0, 8), rest=NUMBERS, matrices=st.integers(1, 3))
def test_a_part_of_several_matrices_is_that_of_each(first, size, rest, matrices):
    total = first + size + rest
    for side, shape in ((OUT, (2, total, 3)), (IN, (2, 3, total)), (OUT, (total,))):
        cut = Cut(side, first, first + size, total)
        dim = cut.dimension(shape)
        one = torch.arange(torch.Size(shape).numel()).view(shape)
        whole = torch.cat([one + 1000 * number for number in range(matrices)], dim)
        mine = one.narrow(dim, first, size)
        expected = torch.cat([mine + 1000 * number for number in range(matrices)], dim)
        found = torch.cat([whole[index] for index in cut.indices(whole.shape)], dim)
        assert torch.equal(found, expected)
        assert found.shape == cut.shape(whole.shape)
