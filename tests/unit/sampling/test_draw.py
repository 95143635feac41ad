"""The draw is keyed: a function of distribution, seed and position."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice

import pytest
import torch

from pipespec.core import Sampling
from pipespec.sampling.draw import draw, uniforms
from tests.helpers.sampling import sample, some_logits


def splitmix(state: int):
    """Vigna's splitmix64.c, one number at a time."""
    mask = 2**64 - 1
    while True:
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        yield z ^ (z >> 31)


def test_the_stream_of_a_position_is_splitmix64():
    first = list(islice(splitmix(1234567), 3))
    assert first == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    for seed, position in ((0, 0), (42, 7), (2**63 - 1, 131071)):
        key = next(splitmix(seed))  # hashed once, then again with the position
        state = next(splitmix((key + position * 0x9E3779B97F4A7C15) % 2**64))
        expected = [((z >> 12) + 0.5) / 2**52 for z in islice(splitmix(state), 40)]
        assert uniforms(seed, [position], torch.arange(40)[None])[0].tolist() == expected


def test_a_number_depends_on_seed_position_and_token_alone():
    ids = torch.tensor([90, 3, 41])
    whole = uniforms(5, [9], torch.arange(100)[None])[0]
    state = torch.random.get_rng_state()
    assert torch.equal(uniforms(5, [4, 9], ids.expand(2, 3))[1], whole[ids])
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not torch.isin(uniforms(5, [10], torch.arange(100)[None]), whole).any()
    assert not torch.isin(uniforms(6, [9], torch.arange(100)[None]), whole).any()
    assert whole.min() > 0 and whole.max() < 1


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Pearson's statistic, as standard deviations from its mean (degrees of freedom)."""
    expected = probabilities * counts.sum()
    freedom = len(counts) - 1
    return float(((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_draws_follow_the_distribution_and_do_not_depend_on_each_other(along):
    logprobs = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03]).double().log()
    num = 12_000
    drawn = torch.tensor(
        [draw(logprobs, *((i, 3) if along == "seeds" else (3, i))) for i in range(num)]
    )
    assert abs(chi_square(drawn.bincount(minlength=5), logprobs.exp())) < 5
    pairs = drawn[:-1] * 5 + drawn[1:]
    joint = (logprobs[:, None] + logprobs[None]).exp().flatten()
    assert abs(chi_square(pairs.bincount(minlength=25), joint)) < 5


def test_what_cannot_be_drawn_never_is():
    logits = some_logits(2)
    asked = Sampling(1.0, top_k=4)
    allowed = set(logits.topk(4).indices.tolist())
    drawn = {sample(logits, replace(asked, seed=s), 0) for s in range(300)}
    assert drawn == allowed


def test_a_few_last_bits_of_the_logits_do_not_change_a_draw():
    """Logits depend in their last bits on the shape of the batch they were computed in."""
    wide = some_logits(3, 20_000)
    noise = 1e-5 * torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    asked = Sampling(1.5, top_p=0.95)
    same = [
        sample(wide, replace(asked, seed=s), s) == sample(wide + noise, replace(asked, seed=s), s)
        for s in range(100)
    ]
    assert all(same)


def test_temperature_zero_is_the_arg_max_of_the_adjusted_logits():
    logits = some_logits(4)
    best = int(logits.argmax())
    assert sample(logits, Sampling(top_k=3, seed=9), 0) == best
    banned = Sampling(logit_bias=((best, -100.0),))
    assert sample(logits, banned, 0) == int(logits.topk(2).indices[1])
