"""Probabilities that sources state come true, as far as they have been observed."""

from __future__ import annotations

import numpy as np
import pytest

from pipespec.core import Verdict
from pipespec.head.paths import Paths
from pipespec.head.source.calibration import Calibrated, Calibration
from pipespec.head.source.protocol import Asked, Candidates, Context
from pipespec.head.tree import ROOT, Tree

TEXT = 0


@pytest.mark.parametrize("sureness", [0.6, 1.0, 2.0])
def test_what_is_stated_comes_true_by_deciles(sureness):
    """A source that is too sure of itself, or not sure enough."""
    rng = np.random.default_rng(0)
    calibration = Calibration()
    calibration.begin(TEXT)
    said, came = [], []
    for i in range(12000):
        true = rng.dirichlet(np.full(4, 0.5))
        true[::-1].sort()
        stated = true**sureness / (true**sureness).sum()
        depth = int(rng.integers(1, 20))
        hit = int(rng.choice(4, p=true))
        if i > 2000:
            said += calibration.correct(TEXT, stated[None], np.array([depth]))[0].tolist()
            came += [j == hit for j in range(4)]
        calibration.observe(TEXT, stated, depth, hit)
    places = np.minimum((np.array(said) * 10).astype(int), 9)
    for decile in range(10):
        mine = places == decile
        assert mine.sum() > 100
        assert np.mean(np.array(came)[mine]) == pytest.approx(np.array(said)[mine].mean(), abs=0.05)


def test_a_depth_that_comes_true_less_often_is_believed_less():
    calibration = Calibration()
    calibration.begin(TEXT)
    for i in range(400):
        calibration.observe(TEXT, np.array([0.5]), 1, 0 if i % 4 else None)
        calibration.observe(TEXT, np.array([0.5]), 9, None if i % 4 else 0)
    near, far = calibration.correct(TEXT, np.full((2, 1), 0.5), np.array([1, 9]))[:, 0]
    assert near > 0.6 > 0.4 > far


def test_a_text_is_believed_for_itself():
    """Two texts by turns, one of which follows the source more often than it states."""
    calibration = Calibration()
    calibration.begin(0)
    calibration.begin(1)
    stated = np.array([0.5, 0.3])
    for i in range(60):
        calibration.observe(0, stated, 1, 0)
        calibration.observe(1, stated, 1, i % 3 or None)
    sure, unsure = (calibration.correct(text, stated[None], np.array([1]))[0] for text in (0, 1))
    assert sure[0] > 0.8 and unsure[0] < 0.4
    calibration.end(0)
    calibration.begin(0)
    assert unsure[0] < calibration.correct(0, stated[None], np.array([1]))[0, 0] < sure[0]


class Ahead:
    """Says that 1, 2, 3, 4 follow each node, in one path, each with one half."""

    def begin(self, context: Context) -> None: ...

    def accept(self, verdict: Verdict) -> None: ...

    def end(self, sequence: int) -> None: ...

    def expand(self, asked, children):
        paths = Paths(np.arange(3), np.array([2, 3, 4]), np.full(3, np.log(0.5)))
        (one,) = asked
        return [Candidates(one.nodes, np.array([[1]]), np.log([[0.5]]), paths)]


def test_guesses_further_below_are_observed_too():
    source = Calibrated(Ahead())
    for number in range(40):
        context = Context(number, [0], [0])
        source.begin(context)
        tree = Tree(0, -1, 0, 0, fed=True)
        (found,) = source.expand([Asked(context, tree, np.array([ROOT]), deeper=4)], 1)
        tree.append(found.parents, found.tokens, found.logps, None, found.paths)
        for token in (1, 2, 3, 9):  # the last guess never comes
            tree.advance(token)
            context.tokens.append(token)
            context.nodes.append(int(tree.id[ROOT]))
        source.accept(Verdict(number, 1, (1, 2, 3, 9)))
        source.end(number)
    assert not source._told and not source._contexts
    stated = np.exp([*found.logps[0], *found.paths.logps])
    assert stated[0] > 0.7 and stated[1] > 0.7
    source.calibration.begin(TEXT)
    hits = source.calibration.correct(TEXT, np.full((1, 1), 0.5), np.array([1]))[0, 0]
    assert hits == pytest.approx(0.85, abs=0.12)
