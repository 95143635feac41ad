"""What the demo target learns beside the next token."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from tools.train_demo_pair import said_again, target_loss

ROWS, LENGTH, VOCABULARY = 8, 128, 50


class Says:
    """In the place of a model: how sure it is of the tokens that come, by how often its text has
    said its beginning before; of the other rows it is sure by half."""

    def __init__(self, ids: torch.Tensor, sure: Callable[[torch.Tensor], torch.Tensor]):
        again, tokens = said_again(ids[: ROWS // 4])
        self.text = torch.cat((again, ids[ROWS // 4 :]))
        times = torch.arange(LENGTH) // tokens[:, None]
        self.chance = torch.cat((sure(times.float()), torch.full((ROWS - len(times), LENGTH), 0.5)))

    def __call__(self, input_ids: torch.Tensor, *, use_cache: bool) -> SimpleNamespace:
        assert torch.equal(input_ids, self.text[:, :-1])
        others = ((1 - self.chance) / (VOCABULARY - 1)).log()
        logits = others[..., None].expand(-1, -1, VOCABULARY).clone()
        return SimpleNamespace(
            logits=logits.scatter(2, self.text[:, 1:, None], self.chance.log()[..., None])
        )


def test_a_text_that_is_said_again_and_again_may_not_grow_surer():
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=torch.manual_seed(3))
    again, tokens = said_again(ids)
    for row, period in zip(again, tokens.tolist(), strict=True):
        assert 4 <= period < 40
        assert torch.equal(row[period:], row[:-period])

    def loss(sure: Callable[[torch.Tensor], torch.Tensor], progress: float = 0.9) -> float:
        return float(target_loss(Says(ids, sure), ids, progress))

    plain = -math.log(0.5) * (1 - 1 / 4)  # of the rows that are left as they were
    fading, steady = (
        loss(lambda times: 0.9 * 0.5**times),
        loss(lambda times: torch.full_like(times, 0.9)),
    )
    growing = loss(lambda times: 1 - 0.5 ** (times + 1))
    assert fading == pytest.approx(plain, rel=1e-3)
    assert growing > steady > fading + 0.05
