"""The draw is keyed: a function of distribution, seed and position."""

import math
from dataclasses import replace
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipespec.core import SamplingParams
from pipespec.sampling.distribution import distribution
from pipespec.sampling.draw import SORTED_FIRST, draw, uniforms
from tests.helpers.sampling import VOCAB, allowed, sample, some_logits


def splitmix(state: int):
    """Vigna's splitmix64.c, one number at a time."""
    mask = 2**64 - 1
    while True:
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        yield z ^ (z >> 31)


def test_random_stream_of_a_position_is_splitmix64():
    first = list(islice(splitmix(1234567), 3))
    assert first == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    for seed, position in ((0, 0), (42, 7), (2**63 - 1, 131071), (-1, 3), (-(2**63), 9)):
        key = next(splitmix(seed))  # hashed once, then again with the position
        state = next(splitmix((key + position * 0x9E3779B97F4A7C15) % 2**64))
        expected = [((z >> 12) + 0.5) / 2**52 for z in islice(splitmix(state), 40)]
        assert uniforms([seed], [position], torch.arange(40)[None])[0].tolist() == expected


def test_noise_depends_on_seed_position_and_token_alone():
    ids = torch.tensor([90, 3, 41])
    whole = uniforms([5], [9], torch.arange(100)[None])[0]
    state = torch.random.get_rng_state()
    assert torch.equal(uniforms([5, 5], [4, 9], ids.expand(2, 3))[1], whole[ids])
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not torch.isin(uniforms([5], [10], torch.arange(100)[None]), whole).any()
    assert not torch.isin(uniforms([6], [9], torch.arange(100)[None]), whole).any()
    assert whole.min() > 0 and whole.max() < 1


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Pearson's statistic, as standard deviations from its mean (degrees of freedom)."""
    expected = probabilities * counts.sum()
    freedom = len(counts) - 1
    return float(((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_draws_follow_the_distribution_and_are_independent(along):
    logprobs = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03]).double().log()
    num = 12_000
    seeds = [i if along == "seeds" else 3 for i in range(num)]
    positions = [3 if along == "seeds" else i for i in range(num)]
    params = [SamplingParams(1.0, seed=seed) for seed in seeds]
    drawn = torch.tensor(draw(logprobs.expand(num, -1), params, positions))
    assert abs(chi_square(drawn.bincount(minlength=5), logprobs.exp())) < 5
    pairs = drawn[:-1] * 5 + drawn[1:]
    joint = (logprobs[:, None] + logprobs[None]).exp().flatten()
    assert abs(chi_square(pairs.bincount(minlength=25), joint)) < 5


SETTINGS = st.builds(
    SamplingParams,
    st.sampled_from([0.05, 0.7, 1.0, 30.0]),
    st.sampled_from([0, 1, 3, 50, 10**6]),
    st.sampled_from([1.0, 0.999, 0.9, 0.3, 1e-6]),
    st.sampled_from([0.0, 0.02, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
)


@given(st.lists(SETTINGS, min_size=1, max_size=5), st.data())
def test_rows_drawn_together_get_the_tokens_they_get_alone(params, data):
    """Whatever the parameters of the others; with many equal logits, and more tokens than are
    sorted first."""
    size = data.draw(st.sampled_from([7, VOCAB, 3 * SORTED_FIRST]))
    levels = data.draw(st.sampled_from([1, 3, 40, 10**6]))
    seed = data.draw(st.integers(0, 1000))
    rows = torch.stack([some_logits(seed + i, size) for i in range(len(params))])
    rows = ((rows * levels).round() / levels).double()
    rows[0, : size // 2] = -torch.inf  # which a bias can do
    positions = [10 * i + seed for i in range(len(params))]
    expected = [sample(*each) for each in zip(rows, params, positions, strict=True)]
    assert draw(rows, params, positions) == expected
    for row, one in zip(rows, params, strict=True):
        assert torch.equal(distribution(row, one).isfinite(), allowed(row, one))


def test_cut_offs_of_a_flat_row_beyond_the_sorted_tokens_are_exact():
    """Also beside a row for which the most probable tokens suffice."""
    size = 4 * SORTED_FIRST
    flat, steep = torch.zeros(size).double(), torch.linspace(0, -9000, size).double()
    params = [SamplingParams(1.0, top_p=0.5, seed=seed) for seed in range(40)]
    drawn = draw(torch.stack([flat, steep] * 20), params, [3] * 40)
    assert drawn[:6] == [
        sample(*each, 3) for each in zip([flat, steep] * 3, params[:6], strict=True)
    ]
    assert set(drawn[1::2]) == {0}
    assert SORTED_FIRST < max(drawn[::2]) < size // 2


@pytest.mark.slow
def test_rounding_of_logits_does_not_change_a_draw():
    """Logits depend in their last bits on the shape of the batch they were computed in."""
    wide = some_logits(3, 20_000)
    noise = 1e-5 * torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(1.5, top_p=0.95)
    seeds = range(100)
    wanted = [replace(params, seed=seed) for seed in seeds]
    drawn = [
        draw(row.double().expand(len(wanted), -1), wanted, seeds) for row in (wide, wide + noise)
    ]
    assert drawn[0] == drawn[1]


@pytest.mark.gpu
def test_gpu_draws_what_a_cpu_draws():
    """The uniforms bit for bit; the last bit of a logarithm may differ, which changes no token."""
    ids = torch.randint(0, 2**20, (3, 5000), generator=torch.Generator().manual_seed(1))
    seeds, positions = [0, 7, 2**63 - 1], [0, 131071, 9]
    assert torch.equal(
        uniforms(seeds, positions, ids.cuda()).cpu(), uniforms(seeds, positions, ids)
    )
    kinds = [
        SamplingParams(1.0),
        SamplingParams(0.7, 50, 0.9),
        SamplingParams(1.3, min_p=0.02),
        SamplingParams(2, top_p=0.99),
    ]
    params = [replace(kind, seed=seed) for kind in kinds for seed in range(50)]
    rows = torch.stack([some_logits(i, 4 * SORTED_FIRST) for i in range(len(params))]).double()
    assert draw(rows.cuda(), params, range(200)) == draw(rows, params, range(200))
