"""Foresight: scores with the target's noise, and the confidence in them."""

import math
from operator import eq

import numpy as np
import pytest
import torch

from pipespec.core import SamplingParams
from pipespec.head.proposers.foresight_confidence import ForesightConfidence
from pipespec.sampling.distribution import distribution
from pipespec.sampling.draw import draw, noise, noise_values
from pipespec.sampling.shared_noise import cut_off_mask, reweight, score_tokens
from tests.helpers.sampling import some_logits

PARAMS = [
    SamplingParams(1.0, seed=3),
    SamplingParams(0.6, top_p=0.9, seed=4),
    SamplingParams(1.7, top_k=5, seed=5),
    SamplingParams(0.9, min_p=0.1, logit_bias=((2, 3.0), (10**6, 1.0)), seed=6),
]


@pytest.mark.parametrize("params", PARAMS)
def test_draft_equal_to_the_target_foresees_every_draw(params):
    rows = torch.stack([some_logits(row) for row in range(40)])
    tokens, scored, _ = score_tokens(rows, range(40), [params] * 40)
    bias = torch.zeros(rows.shape[1])
    bias[2] = 3.0 if params.logit_bias else 0.0
    drawn = draw((rows + bias).double(), [params] * 40, range(40))
    best = tokens.gather(1, scored.argmax(1, keepdim=True))[:, 0].tolist()
    # Tokens that would be cut off rank lower, but are not left out.
    cuts = params.top_p < 1 or params.top_k or params.min_p
    assert sum(map(eq, best, drawn)) >= (38 if cuts else 40)


def test_rows_scored_together_get_the_scores_they_get_alone():
    rows = torch.stack([some_logits(row, 3000) for row in range(len(PARAMS))])
    positions = range(5, 5 + len(PARAMS))
    together = score_tokens(rows, positions, PARAMS)
    for row, (position, params) in enumerate(zip(positions, PARAMS, strict=True)):
        alone = score_tokens(rows[row, None], [position], [params])
        for of_all, of_one in zip(together, alone, strict=True):
            assert torch.equal(of_all[row], of_one[0])


def test_part_of_the_vocabulary_is_scored_as_a_whole_that_lacks_the_rest():
    rows = torch.stack([some_logits(row, 3000) for row in range(len(PARAMS))])
    known = torch.arange(2, 3000, 3)
    whole = torch.full_like(rows, -torch.inf).index_copy_(1, known, rows[:, known])
    expected, found = (
        score_tokens(logits, range(len(PARAMS)), PARAMS, tokens)
        for logits, tokens in ((whole, None), (rows[:, known], known))
    )
    count = found[0].shape[1]
    for of_whole, of_part in zip(expected[:2], found[:2], strict=True):
        assert torch.equal(of_whole[:, :count], of_part)
    assert torch.allclose(expected[2], found[2])


@pytest.mark.parametrize("temperature", [1e-308, 1e-9, 50.0, 1e308])
def test_scores_are_finite_at_every_temperature(temperature):
    """And the sharpness stays within its limits for later requests."""
    confidence = ForesightConfidence()
    rows = torch.stack([some_logits(row, 3000) for row in range(4)])
    rows[:, 5] = -torch.inf
    params = SamplingParams(temperature, seed=1)
    tokens, scored, share = (
        part.numpy() for part in score_tokens(rows, [7, 8, 9, 9], [params] * 4)
    )
    nodes = np.arange(4)
    proposed, logps = confidence.rank(1, nodes, tokens, scored, share, 16)
    assert not np.isnan(logps).any() and (np.exp(logps).sum(1) <= share + 1e-9).all()
    for node in nodes:
        confidence.learn(1, node, int(proposed[node, 0]))
    assert 0.2 <= confidence.sharpness <= 20


def test_flat_distribution_leaves_most_probability_to_unscored_tokens():
    rows = torch.zeros(3, 8 * 1024)
    _, _, share = score_tokens(rows, [1, 2, 3], [SamplingParams(1.0)] * 3)
    assert share.tolist() == pytest.approx([1 / 8] * 3, rel=1e-3)


@pytest.mark.parametrize("params", PARAMS)
def test_cut_off_mask_agrees_with_the_targets_cut_offs(params):
    for row in range(20):
        logits = some_logits(row).double()
        falling = (logits / params.temperature).log_softmax(0).sort(descending=True)
        kept = torch.isfinite(distribution(logits, params))[falling.indices]
        assert torch.equal(~cut_off_mask(falling.values[None], [params])[0], kept)


def test_reweighted_probabilities_match_the_draws():
    stated = [(7, 0.5), (2, 0.3), (9, 0.2)]
    for position in range(200):
        after = reweight(stated, position, 1)
        assert sum(p for _, p in after) <= 1 + 1e-9
        logprobs = torch.full((10,), -torch.inf, dtype=torch.float64)
        for token, probability in stated:
            logprobs[token] = math.log(probability)
        assert after[0][0] == draw(logprobs[None], [SamplingParams(1.0, seed=1)], [position])[0]


def test_reweighting_nothing_gives_nothing():
    assert reweight([], 3, 1) == []


def test_unstated_tokens_keep_their_share_when_reweighting():
    after = [reweight([(1, 0.2), (2, 0.1)], position, 1) for position in range(2000)]
    assert 0.28 < np.mean([sum(p for _, p in row) for row in after]) < 0.32
    assert max(row[0][1] for row in after) > 0.9


def test_noise_of_a_few_tokens_equals_the_noise_of_all():
    for seed, position in ((0, 0), (7, 3), (2**60, 10**6)):
        whole = noise([seed], [position], torch.arange(50)[None])[0]
        assert noise_values(seed, position, range(50)) == pytest.approx(whole.tolist(), rel=1e-12)


@pytest.mark.parametrize(("error", "least", "most"), [(0.1, 5, 20), (1.0, 1, 3), (6.0, 0.2, 0.6)])
def test_foresight_confidence_learns_how_near_the_draft_is(error, least, most):
    rng = np.random.default_rng(0)
    confidence = ForesightConfidence()
    num_tokens = 200
    for node in range(800):
        truth = rng.normal(0, 3, num_tokens) + rng.gumbel(size=num_tokens)
        scored = truth + rng.normal(0, error, num_tokens)
        tokens, logps = confidence.rank(
            7, np.array([node]), np.arange(num_tokens)[None], scored[None], np.ones(1), 16
        )
        assert tokens.shape == logps.shape == (1, 16)
        assert (np.diff(logps[0]) <= 0).all() and np.exp(logps).sum() <= 1 + 1e-9
        assert tokens[0, 0] == scored.argmax()
        confidence.learn(7, node, int(truth.argmax()))
    assert least <= confidence.sharpness <= most


def test_foresight_confidence_drops_pruned_nodes():
    confidence = ForesightConfidence()
    scored = np.tile([1.0, 0.0], (10, 1))
    confidence.rank(1, np.arange(10), np.tile([4, 5], (10, 1)), scored, np.ones(10), 2)

    def learns_from(node: int) -> bool:
        before = confidence.sharpness
        confidence.learn(1, node, 5)
        return confidence.sharpness != before

    confidence.drop_pruned(1, np.arange(5))  # not yet the majority
    assert learns_from(9)
    confidence.drop_pruned(1, np.arange(4))
    assert not learns_from(8) and learns_from(3)
