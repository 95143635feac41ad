"""Calibrated probabilities match observed hit rates."""

import json
import logging

import numpy as np
import pytest

from pipespec.core import Verdict
from pipespec.head.paths import DraftPaths
from pipespec.head.proposer import Context, Proposal
from pipespec.head.proposers.calibration import (
    CalibratedProposer,
    Calibration,
    calibrations_of,
    restore_calibrations,
)
from pipespec.head.proposers.hybrid import HybridProposer
from tests.helpers.drafted import Drafted

TEXT = 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "sureness", [0.6, *(pytest.param(each, marks=pytest.mark.long) for each in (1.0, 2.0))]
)
def test_calibrated_probabilities_match_hit_rates_by_decile(sureness):
    """A proposer that states too high or too low probabilities."""
    rng = np.random.default_rng(0)
    calibration = Calibration()
    calibration.start_text(TEXT)
    corrected, hits = [], []
    for i in range(12000):
        true = rng.dirichlet(np.full(4, 0.5))
        true[::-1].sort()
        stated = true**sureness / (true**sureness).sum()
        depth = int(rng.integers(1, 20))
        hit = int(rng.choice(4, p=true))
        if i > 2000:
            corrected += calibration.correct(TEXT, stated[None], np.array([depth]))[0].tolist()
            hits += [j == hit for j in range(4)]
        calibration.observe(TEXT, stated, depth, hit)
    places = np.minimum((np.array(corrected) * 10).astype(int), 9)
    for decile in range(10):
        mine = places == decile
        assert mine.sum() > 100
        assert np.mean(np.array(hits)[mine]) == pytest.approx(
            np.array(corrected)[mine].mean(), abs=0.05
        )


def test_depth_with_fewer_hits_gets_lower_probabilities():
    calibration = Calibration()
    calibration.start_text(TEXT)
    for i in range(400):
        calibration.observe(TEXT, np.array([0.5]), 1, 0 if i % 4 else None)
        calibration.observe(TEXT, np.array([0.5]), 9, None if i % 4 else 0)
    near, far = calibration.correct(TEXT, np.full((2, 1), 0.5), np.array([1, 9]))[:, 0]
    assert near > 0.6 > 0.4 > far


def test_each_text_is_calibrated_by_its_own_hits_too():
    """Two texts in turns; in one of them tokens hit more often than stated."""
    calibration = Calibration()
    calibration.start_text(0)
    calibration.start_text(1)
    stated = np.array([0.5, 0.3])
    for i in range(60):
        calibration.observe(0, stated, 1, 0)
        calibration.observe(1, stated, 1, i % 3 or None)
    sure, unsure = (calibration.correct(text, stated[None], np.array([1]))[0] for text in (0, 1))
    assert sure[0] > 0.8 and unsure[0] < 0.4
    calibration.end_text(0)
    calibration.start_text(0)
    assert unsure[0] < calibration.correct(0, stated[None], np.array([1]))[0, 0] < sure[0]


class Ahead:
    """Proposes 1, 2, 3, 4 below each node in one path, each with probability .5."""

    def start_sequence(self, context: Context) -> None: ...

    def accept_verdict(self, verdict: Verdict) -> None: ...

    def end_sequence(self, sequence: int) -> None: ...

    def propose(self, requests, children):
        paths = DraftPaths(np.arange(3), np.array([2, 3, 4]), np.full(3, np.log(0.5)))
        (one,) = requests
        return [Proposal(one.nodes, np.array([[1]]), np.log([[0.5]]), paths)]


def test_tokens_of_paths_are_calibrated_too():
    proposer = CalibratedProposer(Ahead())
    for number in range(40):
        drafted = Drafted.start(proposer, [0], number)
        found = drafted.propose(1, max_path_tokens=4)
        drafted.add(found)
        drafted.decide(1, 2, 3, 9)  # the last token of the path never hits
        proposer.end_sequence(number)
    assert not len(proposer.stated)
    stated = np.exp([*found.logps[0], *found.paths.logps])
    assert stated[0] > 0.7 and stated[1] > 0.7
    proposer.calibration.start_text(TEXT)
    hits = proposer.calibration.correct(TEXT, np.full((1, 1), 0.5), np.array([1]))[0, 0]
    assert hits == pytest.approx(0.85, abs=0.12)


def learnt(hits: int) -> Calibration:
    """Of tokens of a stated probability of .5, of which so many of four hit."""
    calibration = Calibration()
    calibration.start_text(TEXT)
    for i in range(200):
        calibration.observe(TEXT, np.array([0.5, 0.2]), 1, 0 if i % 4 < hits else 1)
    return calibration


def corrected(calibration: Calibration) -> np.ndarray:
    """Of a text that begins."""
    calibration.start_text(TEXT + 1)
    return calibration.correct(TEXT + 1, np.array([[0.5, 0.2]]), np.array([1]))


def test_a_second_start_begins_with_what_the_first_has_learnt():
    first, second = learnt(4), Calibration()
    restore_calibrations([second], json.loads(json.dumps([first.stored()])))
    np.testing.assert_allclose(corrected(second), corrected(first), atol=1e-4)
    assert corrected(second)[0, 0] > 0.8 > corrected(Calibration())[0, 0]
    second.start_text(TEXT)
    second.observe(TEXT, np.array([0.5, 0.2]), 1, 0)  # it goes on learning


@pytest.mark.parametrize(
    "stored",
    [
        {},
        ["text"],
        [None],
        [[[1.0], [1.0], [1.0]]],
        [[[[1.0, 2.0], [1.0]], [], []]],
        [[(each * np.nan).tolist() for each in map(np.array, learnt(4).stored())]],
    ],
    ids=["object", "text", "null", "shapes", "ragged", "numbers"],
)
def test_what_is_kept_and_cannot_be_read_is_ignored_with_one_sentence(stored, caplog):
    calibration = Calibration()
    with caplog.at_level(logging.WARNING):
        restore_calibrations([calibration], stored)
    (said,) = caplog.messages
    assert said.startswith("What was learnt of how often draft tokens hit is ignored: ")
    assert calibration.stored() == Calibration().stored()


def test_every_proposer_of_a_hybrid_keeps_what_it_has_learnt():
    hybrid = CalibratedProposer(HybridProposer([Ahead(), Ahead()]))
    assert len({*map(id, calibrations_of(hybrid))}) == 3
