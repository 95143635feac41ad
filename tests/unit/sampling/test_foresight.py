"""What a draft knows of a draw, and how sure it may be of it."""

from __future__ import annotations

import math
from operator import eq

import numpy as np
import pytest
import torch

from pipespec.core import Sampling
from pipespec.head.source.confidence import Confidence
from pipespec.sampling.distribution import distribution
from pipespec.sampling.draw import draw, few_noises, noise
from pipespec.sampling.foresight import cut_off, reweigh, scores
from tests.helpers.sampling import some_logits

ASKED = [
    Sampling(1.0, seed=3),
    Sampling(0.6, top_p=0.9, seed=4),
    Sampling(1.7, top_k=5, seed=5),
    Sampling(0.9, min_p=0.1, logit_bias=((2, 3.0), (10**6, 1.0)), seed=6),
]


@pytest.mark.parametrize("asked", ASKED)
def test_a_draft_that_is_the_target_foresees_every_draw(asked):
    rows = torch.stack([some_logits(row) for row in range(40)])
    tokens, scored, _ = scores(rows, range(40), [asked] * 40)
    bias = torch.zeros(rows.shape[1])
    bias[2] = 3.0 if asked.logit_bias else 0.0
    drawn = draw((rows + bias).double(), [asked] * 40, range(40))
    best = tokens.gather(1, scored.argmax(1, keepdim=True))[:, 0].tolist()
    # What would be cut off is ranked behind, but not left out.
    cuts = asked.top_p < 1 or asked.top_k or asked.min_p
    assert sum(map(eq, best, drawn)) >= (38 if cuts else 40)


def test_rows_are_ranked_together_as_each_by_itself():
    rows = torch.stack([some_logits(row, 3000) for row in range(len(ASKED))])
    positions = range(5, 5 + len(ASKED))
    together = scores(rows, positions, ASKED)
    for row, (position, asked) in enumerate(zip(positions, ASKED, strict=True)):
        alone = scores(rows[row, None], [position], [asked])
        for of_all, of_one in zip(together, alone, strict=True):
            assert torch.equal(of_all[row], of_one[0])


@pytest.mark.parametrize("temperature", [1e-308, 1e-9, 50.0, 1e308])
def test_no_temperature_is_too_much_for_a_draft(temperature):
    """Nor does it spoil the requests that follow."""
    confidence = Confidence()
    rows = torch.stack([some_logits(row, 3000) for row in range(4)])
    rows[:, 5] = -torch.inf
    asked = Sampling(temperature, seed=1)
    tokens, scored, share = (part.numpy() for part in scores(rows, [7, 8, 9, 9], [asked] * 4))
    nodes = np.arange(4)
    proposed, logps = confidence.propose(1, nodes, tokens, scored, share, 16)
    assert not np.isnan(logps).any() and (np.exp(logps).sum(1) <= share + 1e-9).all()
    for node in nodes:
        confidence.learn(1, node, int(proposed[node, 0]))
    assert 0.2 <= confidence.sharpness <= 20


def test_of_a_flat_distribution_most_is_beyond_what_is_looked_at():
    rows = torch.zeros(3, 8 * 1024)
    _, _, share = scores(rows, [1, 2, 3], [Sampling(1.0)] * 3)
    assert share.tolist() == pytest.approx([1 / 8] * 3, rel=1e-3)


@pytest.mark.parametrize("asked", ASKED)
def test_the_cut_offs_are_those_of_the_target(asked):
    for row in range(20):
        logits = some_logits(row).double()
        falling = (logits / asked.temperature).log_softmax(0).sort(descending=True)
        kept = torch.isfinite(distribution(logits, asked))[falling.indices]
        assert torch.equal(~cut_off(falling.values[None], [asked])[0], kept)


def test_the_likelier_of_stated_tokens_is_known_once_the_noise_is():
    stated = [(7, 0.5), (2, 0.3), (9, 0.2)]
    for position in range(200):
        after = reweigh(stated, position, 1)
        assert sum(p for _, p in after) <= 1 + 1e-9
        logprobs = torch.full((10,), -torch.inf, dtype=torch.float64)
        for token, probability in stated:
            logprobs[token] = math.log(probability)
        assert after[0][0] == draw(logprobs[None], [Sampling(1.0, seed=1)], [position])[0]


def test_where_nothing_is_stated_nothing_is_proposed():
    assert reweigh([], 3, 1) == []


def test_tokens_that_are_not_stated_keep_their_share():
    after = [reweigh([(1, 0.2), (2, 0.1)], position, 1) for position in range(2000)]
    assert 0.28 < np.mean([sum(p for _, p in row) for row in after]) < 0.32
    assert max(row[0][1] for row in after) > 0.9


def test_the_noise_of_a_few_tokens_is_that_of_all():
    for seed, position in ((0, 0), (7, 3), (2**60, 10**6)):
        whole = noise([seed], [position], torch.arange(50)[None])[0]
        assert few_noises(seed, position, range(50)) == pytest.approx(whole.tolist(), rel=1e-12)


@pytest.mark.parametrize(("error", "least", "most"), [(0.1, 5, 20), (1.0, 1, 3), (6.0, 0.2, 0.6)])
def test_confidence_finds_how_near_the_draft_is(error, least, most):
    rng = np.random.default_rng(0)
    confidence = Confidence()
    num_tokens = 200
    for node in range(800):
        truth = rng.normal(0, 3, num_tokens) + rng.gumbel(size=num_tokens)
        guessed = truth + rng.normal(0, error, num_tokens)
        tokens, logps = confidence.propose(
            7, np.array([node]), np.arange(num_tokens)[None], guessed[None], np.ones(1), 16
        )
        assert tokens.shape == logps.shape == (1, 16)
        assert (np.diff(logps[0]) <= 0).all() and np.exp(logps).sum() <= 1 + 1e-9
        assert tokens[0, 0] == guessed.argmax()
        confidence.learn(7, node, int(truth.argmax()))
    assert least <= confidence.sharpness <= most


def test_what_was_proposed_below_nodes_that_are_gone_is_forgotten():
    confidence = Confidence()
    scored = np.zeros((10, 2))
    confidence.propose(1, np.arange(10), np.tile([4, 5], (10, 1)), scored, np.ones(10), 2)
    confidence.keep(1, np.arange(5))
    assert len(confidence._scored[1]) == 10
    confidence.keep(1, np.arange(4))
    assert sorted(confidence._scored[1]) == [0, 1, 2, 3]
    before = confidence.sharpness
    confidence.learn(1, 9, 4)
    confidence.end(1)
    confidence.learn(1, 2, 4)
    assert confidence.sharpness == before
