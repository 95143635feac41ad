"""Synthetic, hybrid and draft-model proposers: what they propose, and how they learn."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pipespec.core import DRAFT, KIND, NODE, POSITION, SEQUENCE, Batch, Verdict
from pipespec.engine.slice.kv_allocator import KVSlotAllocator
from pipespec.engine.slice.memory_failures import MemoryFailures
from pipespec.errors import ConfigError
from pipespec.extras.emulation.synthetic_proposer import (
    USUAL,
    Accuracy,
    SyntheticConfig,
    SyntheticProposer,
    read_truth,
)
from pipespec.head.proposer import Context, Proposal, ProposalRequest
from pipespec.head.proposers.draft_model import DraftModelProposer
from pipespec.head.proposers.hybrid import HybridConfig, HybridProposer
from pipespec.head.proposers.suffix import SuffixConfig
from pipespec.head.tree import ROOT
from tests.helpers.drafted import Drafted


def row(candidates: Proposal, i: int = 0) -> dict[int, float]:
    present = np.isfinite(candidates.logps[i])
    tokens = candidates.tokens[i, present].tolist()
    assert len(set(tokens)) == len(tokens)
    return dict(zip(tokens, np.exp(candidates.logps[i, present]).tolist(), strict=True))


PUBLISHED = {1: 0.81, 8: 0.99}


def placed(accuracy: Accuracy, count: int, children: int, seed: int = 0):
    """Rank (0: absent) and stated distribution at each of `count` positions of an answer."""
    answer = np.random.default_rng(7).integers(1000, size=count + 2).tolist()
    drafted = Drafted.start(SyntheticProposer(accuracy, [answer], 1000, seed), answer[:1])
    ranks, stated = [], []
    for token in answer[1 : count + 1]:
        candidates = drafted.propose(children)
        tokens = candidates.tokens[0].tolist()
        assert len(set(tokens)) == len(tokens)
        ranks.append(tokens.index(token) + 1 if token in tokens else 0)
        stated.append(np.exp(candidates.logps[0]))
        drafted.decide(token)
    return np.array(ranks), np.array(stated)


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.0, 0.9])
def test_synthetic_ranks_follow_the_accuracy_curve(spread):
    count = 4000
    accuracy = Accuracy(PUBLISHED, spread)
    ranks, stated = placed(accuracy, count, children=16)
    for k in range(1, 9):
        share = np.mean((ranks > 0) & (ranks <= k))
        expected = accuracy.hit_rate(k)
        # Four standard errors of so many draws.
        assert share == pytest.approx(expected, abs=4 * np.sqrt(0.25 / count))
        assert stated[:, :k].sum(1).mean() == pytest.approx(expected, abs=0.02)
    assert accuracy.hit_rate(1) == pytest.approx(0.81)
    assert accuracy.hit_rate(8) == pytest.approx(0.99)
    assert (np.diff(stated, axis=1) <= 1e-12).all(), "the best guess is stated first"
    assert stated.shape[1] == 8, "nothing is known beyond the last stated rank"


@pytest.fixture(scope="module")
def many():
    """Ranks and stated distributions of many tokens."""
    return placed(Accuracy(PUBLISHED, 0.6), 6000, children=8)


@pytest.mark.slow
def test_synthetic_probabilities_are_calibrated(many):
    ranks, stated = many
    for low, high in ((0.2, 0.6), (0.6, 0.9), (0.9, 1.0)):
        chosen = (stated[:, 0] >= low) & (stated[:, 0] < high)
        assert chosen.sum() > 200
        hits = np.mean(ranks[chosen] == 1)
        error = 4 * np.sqrt(0.25 / chosen.sum())
        assert hits == pytest.approx(stated[chosen, 0].mean(), abs=error)


def test_synthetic_hit_says_nothing_of_the_next_confidence(many):
    ranks, stated = many
    hits, confidence = (ranks[:-1] == 1).astype(float), stated[1:, 0]
    assert abs(np.corrcoef(hits, confidence)[0, 1]) < 4 / np.sqrt(len(hits))


def test_synthetic_with_fewer_children_drops_the_last_ranks():
    ranks, stated = placed(Accuracy(PUBLISHED), 500, children=2)
    assert set(ranks.tolist()) == {0, 1, 2}
    assert stated.shape[1] == 2


def test_synthetic_proposals_depend_on_the_seed_alone():
    first, _ = placed(Accuracy(PUBLISHED), 300, children=8, seed=1)
    again, _ = placed(Accuracy(PUBLISHED), 300, children=8, seed=1)
    other, _ = placed(Accuracy(PUBLISHED), 300, children=8, seed=2)
    assert (first == again).all() and (first != other).any()


def test_synthetic_proposes_below_wrong_nodes_too():
    answer = list(range(100, 130))
    drafted = Drafted.start(SyntheticProposer(Accuracy({1: 1.0}), [answer], 1000, 0), answer[:2])
    assert row(drafted.propose(4)) == {102: pytest.approx(1.0)}
    drafted.add(Proposal.from_lists(np.array([ROOT]), [[(102, 0.9), (5, 0.1)]]))
    candidates = drafted.propose(4, [1, 2])
    assert 103 in row(candidates, 0)
    assert len(row(candidates, 1)) == 1 and 103 not in row(candidates, 1)


def test_synthetic_proposes_nothing_after_the_end_of_the_answer():
    proposer = SyntheticProposer(Accuracy(PUBLISHED), [[1, 2, 3]], 1000, 0)
    assert row(Drafted.start(proposer, [1, 2, 3]).propose(8)) == {}


def test_synthetic_refuses_a_target_with_another_answer():
    proposer = SyntheticProposer(Accuracy(PUBLISHED), [[1, 2, 3, 4]], 1000, 0)
    drafted = Drafted.start(proposer, [1, 2])
    drafted.decide(3)
    with pytest.raises(ConfigError, match="after 3 tokens it holds"):
        drafted.decide(9)
    with pytest.raises(ConfigError, match="no text that begins with"):
        Drafted.start(proposer, [5, 5], 1)


@pytest.mark.parametrize(
    ("curve", "part"),
    [
        ({}, "begin at top-1"),
        ({2: 0.5}, "begin at top-1"),
        ({1: 0.9, 4: 0.8}, "must rise"),
        ({1: 0.0, 4: 0.8}, "above 0"),
        ({1: 0.9, 4: 1.2}, "at most 1"),
        ({1: 0.3, 2: 0.9}, "makes rank 2 (0.600) likelier than rank 1"),
    ],
)
def test_impossible_accuracy_curves_are_refused(curve, part):
    with pytest.raises(ConfigError) as refused:
        Accuracy(curve)
    assert part in str(refused.value)


def test_measured_curve_may_be_rounded_and_have_ranks_without_hits():
    accuracy = Accuracy({1: 0.5, 2: 0.604167, 3: 0.708334, 4: 0.708334})
    ranks, _ = placed(accuracy, 200, children=4)
    assert set(ranks.tolist()) == {0, 1, 2, 3}


def test_synthetic_settings_are_checked(tmp_path: Path):
    truth = tmp_path / "truth.jsonl"
    truth.write_text(json.dumps([1, 2, 3]) + "\n" + json.dumps([4, 5]) + "\n")
    spec = SyntheticConfig(str(truth), curve=["8:0.99", "1:0.81"])
    assert (
        spec.accuracy == Accuracy(PUBLISHED, USUAL.spread)
        and spec.synthetic
        and not spec.needs_draft
    )
    assert read_truth(str(truth)) == [[1, 2, 3], [4, 5]]
    with pytest.raises(ConfigError, match="is not a point of an accuracy curve"):
        SyntheticConfig(str(truth), curve=["0.81"])
    with pytest.raises(ConfigError, match=r"proposer\.truth is"):
        SyntheticConfig(str(tmp_path / "missing"))
    truth.write_text("[1, 2]\n{}\n")
    with pytest.raises(ConfigError, match="Line 2"):
        read_truth(str(truth))


class Rows:
    """A runner that computes nothing and records the rows of each pass."""

    vocab_size = 9

    def __init__(self, num_slots: int = 1000) -> None:
        self.model = self
        self.slots = KVSlotAllocator(num_slots)
        self.read: dict[int, int] = {}
        self.cached: dict[int, int] = {}
        self.memory = MemoryFailures(contained=False)
        self.passes: list[list[tuple[int, int]]] = []  # sequence, position
        self.computed: set[tuple[int, int]] = set()  # sequence, node

    def holds(self, sequence: int, node: int) -> bool:
        return (sequence, node) in self.computed

    def start_sequence(self, sequence: int, parent: int, shared: int, *_: int | None) -> None:
        self.read[sequence] = shared

    def apply(self, verdicts: list[Verdict], nodes: Sequence[int] | None = None) -> None: ...

    def length(self, sequence: int) -> int:
        return self.read.get(sequence, 0)

    def compute(self, batch: Batch) -> Batch:
        rows = batch.rows[:, [SEQUENCE, POSITION, KIND]].tolist()
        self.passes.append([(sequence, position) for sequence, position, _ in rows])
        self.slots.allocate(len(rows))
        self.computed |= {*map(tuple, batch.rows[:, [SEQUENCE, NODE]].tolist())}
        for sequence, _, kind in rows:
            self.read[sequence] += kind != DRAFT
        return replace(batch, hidden=torch.zeros(len(rows), 1))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(hidden), self.vocab_size)


def test_long_prompt_in_the_draft_does_not_delay_other_sequences():
    draft = Rows()
    proposer = DraftModelProposer(draft, chunk=8, vocabulary=9)
    requests = [
        Drafted.start(proposer, [1] * length, number).asked()
        for number, length in enumerate((30, 3, 1))
    ]
    answered = [[each is not None for each in proposer.propose(requests[:1], 2)]]
    answered += [[each is not None for each in proposer.propose(requests, 2)]]
    assert answered == [[False], [False, True, True]]
    assert [len(rows) for rows in draft.passes] == [8, 8]
    assert [position for request, position in draft.passes[1] if not request] == [8, 9, 10, 11]
    while proposer.propose(requests[:1], 2) == [None]:
        pass
    assert draft.read[0] == 30 and len(draft.passes) == 5


class Fixed:
    """A proposer that proposes the same for every node: candidates as (token, probability)."""

    def __init__(self, *candidates: tuple[int, float]):
        self.candidates = candidates
        self.ready = True

    def start_sequence(self, context: Context) -> None: ...

    def accept_verdict(self, verdict: Verdict) -> None: ...

    def end_sequence(self, request: int) -> None: ...

    def propose(self, requests: Sequence[ProposalRequest], children: int) -> list[Proposal | None]:
        if not self.ready:
            return [None] * len(requests)
        stated = self.candidates[:children]
        return [Proposal.from_lists(each.nodes, [stated] * len(each.nodes)) for each in requests]


def test_hybrid_counts_a_token_of_two_proposers_once():
    proposer = HybridProposer([Fixed((1, 0.5), (2, 0.2)), Fixed((2, 0.3), (3, 0.1))])
    drafted = Drafted.start(proposer, [7])
    mixed = drafted.propose(8)
    assert mixed.tokens[0].tolist() == [1, 2, 3], "the likeliest first"
    stated = row(mixed)
    assert 0.2 < stated.pop(2) < 0.3
    assert stated == pytest.approx({1: 0.5, 3: 0.1})
    assert list(row(drafted.propose(2))) == [1, 2]


def test_hybrid_learns_how_much_agreement_of_proposers_is_worth():
    """One proposer always states .8; it is right where the other names its token too."""
    agrees, contradicts = ((1, 0.8), (2, 0.1)), ((2, 0.4),)
    other = Fixed(*agrees)
    drafted = Drafted.start(HybridProposer([Fixed((1, 0.8)), other]), [7])
    for i in range(600):
        other.candidates = agrees if i % 2 else contradicts
        drafted.add(drafted.propose(8))
        drafted.decide(1 if i % 2 else 2)
    other.candidates = agrees
    supported = row(drafted.propose(8))
    other.candidates = contradicts
    unsupported = row(drafted.propose(8))
    assert supported[1] > 0.9 and unsupported[1] < 0.1 and unsupported[2] > 0.8


def test_hybrid_proposes_nothing_until_every_proposer_is_ready():
    late = Fixed((1, 0.5))
    late.ready = False
    drafted = Drafted.start(HybridProposer([late, Fixed((2, 0.5))]), [7])
    assert drafted.propose(8) is None
    late.ready = True
    assert drafted.propose(8) is not None


def test_hybrid_weighs_a_proposer_by_its_hits():
    """Both state one half; one is right nine times of ten, the other never."""
    drafted = Drafted.start(HybridProposer([Fixed((1, 0.5)), Fixed((2, 0.5))]), [7])
    for i in range(200):
        drafted.add(drafted.propose(8))
        drafted.decide(3 if i % 10 == 0 else 1)
    mixed = row(drafted.propose(8))
    assert mixed[1] == pytest.approx(0.9, abs=0.1)
    assert mixed[2] < 0.05


def test_hybrid_settings_are_checked():
    assert HybridConfig().needs_draft
    for cls in (HybridConfig, SuffixConfig):
        with pytest.raises(ConfigError, match=r"proposer\.past is -1"):
            cls(past=-1)
        with pytest.raises(ConfigError, match=r"proposer\.corpus is '/no/such'"):
            cls(corpus="/no/such")
        with pytest.raises(ConfigError, match=r"proposer\.rounds is 0"):
            cls(rounds=0)


def test_draft_without_free_slots_expands_the_likeliest_nodes_then_none():
    draft = Rows(num_slots=6)
    proposer = DraftModelProposer(draft, chunk=8, vocabulary=9)
    drafted = Drafted.start(proposer, [1, 1])
    assert len(drafted.propose(8).parents) == 1
    drafted.add(Proposal.from_lists(np.array([ROOT]), [[(i, i / 36) for i in range(1, 9)]]))
    assert drafted.propose(2, range(1, 9)).parents.tolist() == [5, 6, 7, 8]
    late = Drafted.start(proposer, [1], 1)
    answers = proposer.propose([late.asked(), drafted.asked([1])], 2)
    assert [None if answer is None else len(answer.parents) for answer in answers] == [0, 0]
    assert len(draft.passes) == 2


def test_draft_computes_nodes_that_were_added_without_it():
    draft = Rows(num_slots=8)
    proposer = DraftModelProposer(draft, chunk=8, vocabulary=9)
    drafted = Drafted.start(proposer, [1, 1])
    tree = drafted.tree
    last = tree.index(tree.append_path(ROOT, [4, 5, 6]))
    candidates = drafted.propose(2, [last])
    assert candidates.parents.tolist() == [last]
    assert draft.passes == [[(0, position) for position in range(5)]]
    drafted.add(candidates)
    below = np.flatnonzero(~tree.expanded)
    candidates = drafted.propose(2, below)
    assert draft.passes[1] == [(0, 5), (0, 5)] and len(candidates.parents) == 2
    # One slot is left: of a path of two there is no room for the end.
    last = tree.index(tree.append_path(int(below[0]), [4, 5]))
    assert not len(drafted.propose(2, [last]).parents)


def test_draft_proposes_allowed_tokens_only():
    proposer = DraftModelProposer(Rows(), chunk=8, vocabulary=9)
    allowed = np.array([[0b101001000]], np.int32)
    candidates = Drafted.start(proposer, [1, 1]).propose(9, allowed=allowed)
    present = np.isfinite(candidates.logps[0])
    assert sorted(candidates.tokens[0, present].tolist()) == [3, 6, 8]
    np.testing.assert_allclose(candidates.logps[0, present], np.log(1 / 3), rtol=1e-6)
