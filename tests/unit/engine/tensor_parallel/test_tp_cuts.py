"""Which part of each tensor a tensor-parallel member has."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from pipespec.engine.tensor_parallel.tp_cuts import IN, OUT, Cut, head_unit, share, share_heads

NUMBERS = st.integers(1, 8)


@given(total=st.integers(1, 100), unit=NUMBERS, members=NUMBERS)
def test_parts_are_whole_units_and_differ_by_one(total, unit, members):
    parts = share(total, unit, members)
    assert [number for part in parts for number in part] == [*range(total)]
    assert all(part.start % unit == 0 or not part for part in parts)
    units = [-(-len(part) // unit) for part in parts]
    assert max(units) - min(units) <= 1
    assert units == sorted(units, reverse=True)


@given(kv_heads=NUMBERS, group=NUMBERS, members=NUMBERS, unit=NUMBERS, kv_unit=NUMBERS)
def test_every_query_head_finds_its_kv_head_on_its_member(kv_heads, group, members, unit, kv_unit):
    heads = kv_heads * group
    shared = share_heads(heads, kv_heads, members, unit, kv_unit)
    assert [head for each in shared for head in each.heads] == [*range(heads)]
    for each in shared:
        assert each.kv_heads.start % kv_unit == 0
        stored = [*each.kv_heads]
        if each.selected is not None:
            stored = [stored[place] for place in each.selected]
        assert len(stored) == each.num_stored
        run = len(each.heads) // max(len(stored), 1)
        found = [stored[place // run] for place in range(len(each.heads))]
        assert found == [head // group for head in each.heads]


def test_query_heads_of_a_kv_head_are_together_if_all_members_have_some():
    assert [len(each.heads) for each in share_heads(64, 8, 6)] == [16, 16, 8, 8, 8, 8]
    assert [each.selected for each in share_heads(64, 8, 6)] == [None] * 6
    assert [len(each.heads) for each in share_heads(64, 4, 6)] == [11, 11, 11, 11, 10, 10]
    assert [len(each.heads) for each in share_heads(4, 2, 6)] == [1, 1, 1, 1, 0, 0]


def test_heads_are_in_whole_groups_of_the_weights():
    assert head_unit(8, [(8 * 64, 128), (8 * 96, 32)]) == 2
    assert head_unit(8, [(8 * 128, 128)]) == 1
    assert head_unit(8, [(8 * 80, 256)]) == 16, "more than there are: one member has all"


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
