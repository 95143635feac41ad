"""What the demo models' cards count."""

from __future__ import annotations

import pytest

from tools.demo_cards import LOOP_PERIOD, LOOP_TOKENS, loops


@pytest.mark.parametrize("period", [1, 7, LOOP_PERIOD])
def test_a_text_loops_if_its_end_repeats_with_a_short_period(period):
    looped = [*range(period)] * LOOP_TOKENS
    assert loops([-1, -2, *looped[:LOOP_TOKENS]])
    assert not loops(looped[: LOOP_TOKENS - 1]), "too short to tell"
    assert not loops([*looped[: LOOP_TOKENS - 1], -1]), "it went out of its loop"


def test_a_longer_period_is_no_loop():
    assert not loops([*range(LOOP_PERIOD + 1)] * 10)
