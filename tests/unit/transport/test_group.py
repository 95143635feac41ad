"""The members of a tensor-parallel slice: what they gather, and how they end."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipespec.engine.tensor_parallel import total
from pipespec.errors import RankFailed
from pipespec.transport.group import PIECE, MemberGroup
from tests.helpers.members import together

HIDDEN = 48


@settings(max_examples=10, deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_a_row_of_a_sum_of_three_does_not_depend_on_its_batch(sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    of_members = torch.randn(3, sum(sizes), HIDDEN, generator=generator)

    def sums(group: MemberGroup) -> tuple[torch.Tensor, torch.Tensor]:
        mine = of_members[group.rank]
        batches = [total(group.gather(batch)) for batch in mine.split(sizes)]
        return total(group.gather(mine)), torch.cat(batches)

    expected = (of_members[0] + of_members[1]) + of_members[2]
    for whole, in_batches in together(3, sums):
        assert torch.equal(whole, expected)
        assert torch.equal(in_batches, expected)


def test_who_waits_for_a_member_that_ends_is_told():
    def gather(group: MemberGroup) -> str:
        if group.rank == 0:
            group.abort()
            return "ended"
        with pytest.raises(RankFailed, match="Member 1 lost the others of its stage"):
            group.gather(torch.zeros(2, HIDDEN))
        return "told"

    assert together(2, gather) == ["ended", "told"]


@settings(max_examples=10, deadline=None)
@given(lengths=st.lists(st.sampled_from([0, 1, 9, PIECE - 9, PIECE - 8, PIECE, 3 * PIECE])))
def test_members_hear_what_the_first_one_tells(lengths):
    told = [torch.arange(length).to(torch.uint8) for length in lengths]

    def member(group: MemberGroup) -> list[torch.Tensor]:
        if group.rank:
            return [group.hear() for _ in told]
        for message in told:
            group.tell(message)
        return told

    for heard in together(3, member):
        assert len(heard) == len(told)
        assert all(map(torch.equal, heard, told))


def test_who_waits_for_the_first_member_is_told_that_it_ended():
    def member(group: MemberGroup) -> str:
        if group.rank == 0:
            group.abort()
            return "ended"
        with pytest.raises(RankFailed, match="Member 1 lost the first of its stage"):
            group.hear()
        return "told"

    assert together(2, member) == ["ended", "told"]
