"""The members of a tensor-parallel slice: what they gather, and how they end."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from pipespec.engine.graphs.graphs import capture_cuda_graph
from pipespec.engine.tensor_parallel.tensor_parallel import gather_best, sum_parts
from pipespec.engine.tensor_parallel.tp_cuts import OUT, Cut
from pipespec.errors import RankFailed
from pipespec.transport.tp_group import PIECE, TPProcessGroup, can_use_nccl
from tests.helpers.members import together

HIDDEN = 48


@settings(max_examples=10, deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_a_row_of_a_sum_of_three_does_not_depend_on_its_batch(sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    of_members = torch.randn(3, sum(sizes), HIDDEN, generator=generator)

    def sums(group: TPProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        mine = of_members[group.rank]
        batches = [sum_parts(group.gather(batch)) for batch in mine.split(sizes)]
        return sum_parts(group.gather(mine)), torch.cat(batches)

    expected = (of_members[0] + of_members[1]) + of_members[2]
    for whole, in_batches in together(3, sums):
        assert torch.equal(whole, expected)
        assert torch.equal(in_batches, expected)


@pytest.mark.parametrize(
    ("devices", "serves"),
    [
        (["cuda:0", "cuda:1"], True),
        (["cuda", "cuda:1"], True),
        (["cuda", "cuda:0"], False),
        (["cuda:1", "cuda:1"], False),
        (["cpu", "cuda:1"], False),
        (["cpu", "cpu"], False),
    ],
)
def test_nccl_serves_where_each_has_a_gpu_of_its_own(monkeypatch, devices, serves):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert can_use_nccl(devices) is serves
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert not can_use_nccl(devices)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_nccl_adds_up_and_can_be_recorded():
    store = HashStore()

    def member(rank: int) -> torch.Tensor:
        group = TPProcessGroup(store, rank, 2, f"cuda:{rank}")
        mine = torch.full((3, HIDDEN), float(rank + 1), device=f"cuda:{rank}")
        sum_parts(group.gather(mine))  # the members meet
        replay, result = capture_cuda_graph(lambda: sum_parts(group.gather(mine)))
        mine += 1
        replay()
        return result.cpu()

    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(member, range(2)):
            assert torch.equal(found, torch.full((3, HIDDEN), 5.0))


@pytest.mark.parametrize("what", ["the others", "the first"])
def test_wait_for_a_member_that_ends_fails(what: str):
    def wait(group: TPProcessGroup) -> str:
        if group.rank == 0:
            group.abort()
            return "ended"
        with pytest.raises(RankFailed, match=f"Member 1 lost {what} of its stage"):
            group.receive() if what == "the first" else group.gather(torch.zeros(2, HIDDEN))
        return "told"

    assert together(2, wait) == ["ended", "told"]


@settings(max_examples=10, deadline=None)
@given(lengths=st.lists(st.sampled_from([0, 1, 9, PIECE - 9, PIECE - 8, PIECE, 3 * PIECE])))
def test_members_hear_what_the_first_one_tells(lengths):
    told = [torch.arange(length).to(torch.uint8) for length in lengths]

    def member(group: TPProcessGroup) -> list[torch.Tensor]:
        if group.rank:
            return [group.receive() for _ in told]
        for message in told:
            group.broadcast(message)
        return told

    for heard in together(3, member):
        assert len(heard) == len(told)
        assert all(map(torch.equal, heard, told))


@settings(max_examples=10, deadline=None)
@given(
    numbers=st.lists(st.sampled_from([0.0, 1.0, 2.0, math.inf, math.nan]), min_size=5, max_size=5)
)
def test_members_find_the_largest_logit_of_all_as_one_does(numbers):
    """The first of several."""
    logits = torch.tensor([numbers, numbers[::-1]], dtype=torch.bfloat16)
    parts = [Cut(OUT, 0, 2, 5), Cut(OUT, 2, 4, 5), Cut(OUT, 4, 5, 5)]
    expected = logits.max(-1)

    def best(group: TPProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        part = parts[group.rank]
        return gather_best(group, logits[:, part.start : part.stop], parts)

    for values, tokens in together(3, best):
        assert torch.equal(values.nan_to_num(-1.0), expected.values.double().nan_to_num(-1.0))
        assert torch.equal(tokens, expected.indices)
