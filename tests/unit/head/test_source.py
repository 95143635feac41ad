"""Sources without a model: what they propose, and how they learn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pipespec.core import GUESS, KIND, NODE, POSITION, SEQUENCE, Batch, Verdict
from pipespec.engine.kv import SlotPool
from pipespec.errors import ConfigError
from pipespec.head.source.calibration import Calibrated
from pipespec.head.source.draft_model import DraftModelSource
from pipespec.head.source.hybrid import Hybrid, HybridSource
from pipespec.head.source.protocol import Asked, Candidates, Context
from pipespec.head.source.suffix import Suffix
from pipespec.head.source.synthetic import Accuracy, Synthetic, SyntheticSource, read_truth
from pipespec.head.tree import ROOT, Tree


def started(source, tokens: Sequence[int]) -> tuple[Context, Tree]:
    """A request whose text is `tokens`, and its tree: the last token alone."""
    context = Context(0, list(tokens), list(range(len(tokens))))
    source.begin(context)
    last = len(tokens) - 1
    return context, Tree(last, last - 1, tokens[-1], last, fed=True)


def decide(source, context: Context, tree: Tree, token: int) -> None:
    """What the head does with a verdict of one token."""
    base = len(context.tokens)
    tree.advance(token)
    context.tokens.append(token)
    context.nodes.append(int(tree.id[ROOT]))
    source.accept(Verdict(0, base, (token,)))


def expand(
    source, context: Context, tree: Tree, nodes: np.ndarray, children: int
) -> Candidates | None:
    """A draft round for one request that is alone."""
    (found,) = source.expand([Asked(context, tree, nodes)], children)
    return found


def row(candidates: Candidates, i: int = 0) -> dict[int, float]:
    present = np.isfinite(candidates.logps[i])
    tokens = candidates.tokens[i, present].tolist()
    assert len(set(tokens)) == len(tokens)
    return dict(zip(tokens, np.exp(candidates.logps[i, present]).tolist(), strict=True))


# --- candidates -------------------------------------------------------------------------------


def test_a_tree_takes_rows_of_different_lengths():
    tree = Tree(0, -1, 5, 0, fed=True)
    tree.append(*_columns(Candidates.of(np.array([0]), [[(1, 0.5), (2, 0.25)]])))
    tree.append(*_columns(Candidates.of(np.array([1, 2]), [[(3, 0.5)], [(3, 0.5), (4, 0.1)]])))
    tree.check()
    assert sorted(tree.token.tolist()) == [1, 2, 3, 3, 4, 5]
    assert tree.append(*_columns(Candidates.of(np.array([3, 4]), [[], []]))) == 0
    assert tree.expanded[[3, 4]].all()


def _columns(candidates: Candidates) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return candidates.parents, candidates.tokens, candidates.logps


# --- synthetic --------------------------------------------------------------------------------

PUBLISHED = {1: 0.81, 8: 0.99}


def placed(accuracy: Accuracy, count: int, children: int, seed: int = 0):
    """Rank (0: absent) and stated distribution at each of `count` positions of an answer."""
    answer = np.random.default_rng(7).integers(1000, size=count + 2).tolist()
    source = SyntheticSource(accuracy, [answer], 1000, seed)
    context, tree = started(source, answer[:1])
    ranks, stated = [], []
    for token in answer[1 : count + 1]:
        candidates = expand(source, context, tree, np.array([ROOT]), children)
        tokens = candidates.tokens[0].tolist()
        assert len(set(tokens)) == len(tokens)
        ranks.append(tokens.index(token) + 1 if token in tokens else 0)
        stated.append(np.exp(candidates.logps[0]))
        decide(source, context, tree, token)
    return np.array(ranks), np.array(stated)


@pytest.mark.parametrize("spread", [0.0, 0.5, 0.9])
def test_the_answer_is_placed_as_the_curve_says(spread):
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


def test_what_is_stated_is_right():
    ranks, stated = placed(Accuracy(PUBLISHED, 0.6), 6000, children=8)
    for low, high in ((0.2, 0.6), (0.6, 0.9), (0.9, 1.0)):
        chosen = (stated[:, 0] >= low) & (stated[:, 0] < high)
        assert chosen.sum() > 200
        hits = np.mean(ranks[chosen] == 1)
        error = 4 * np.sqrt(0.25 / chosen.sum())
        assert hits == pytest.approx(stated[chosen, 0].mean(), abs=error)


def test_fewer_children_cut_the_ranks():
    ranks, stated = placed(Accuracy(PUBLISHED), 500, children=2)
    assert set(ranks.tolist()) == {0, 1, 2}
    assert stated.shape[1] == 2


def test_the_seed_decides_alone():
    first, _ = placed(Accuracy(PUBLISHED), 300, children=8, seed=1)
    again, _ = placed(Accuracy(PUBLISHED), 300, children=8, seed=1)
    other, _ = placed(Accuracy(PUBLISHED), 300, children=8, seed=2)
    assert (first == again).all() and (first != other).any()


def test_wrong_branches_have_children_and_the_right_one_goes_on():
    answer = list(range(100, 130))
    source = SyntheticSource(Accuracy({1: 1.0}), [answer], 1000, 0)
    context, tree = started(source, answer[:2])
    sure = expand(source, context, tree, np.array([ROOT]), 4)
    assert row(sure) == {102: pytest.approx(1.0)}
    tree.append(np.array([ROOT]), np.array([[102, 5]]), np.log([[0.9, 0.1]]))
    candidates = expand(source, context, tree, np.array([1, 2]), 4)
    assert 103 in row(candidates, 0)
    assert len(row(candidates, 1)) == 1 and 103 not in row(candidates, 1)


def test_nothing_is_proposed_behind_the_end_of_the_answer():
    source = SyntheticSource(Accuracy(PUBLISHED), [[1, 2, 3]], 1000, 0)
    context, tree = started(source, [1, 2, 3])
    assert row(expand(source, context, tree, np.array([ROOT]), 8)) == {}


def test_a_target_that_says_something_else_is_refused():
    source = SyntheticSource(Accuracy(PUBLISHED), [[1, 2, 3, 4]], 1000, 0)
    context, tree = started(source, [1, 2])
    decide(source, context, tree, 3)
    with pytest.raises(ConfigError, match="after 3 tokens it holds"):
        decide(source, context, tree, 9)
    with pytest.raises(ConfigError, match="no text that begins with"):
        source.begin(Context(1, [5, 5], [0, 1]))


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
def test_curves_that_no_draft_has_are_refused(curve, part):
    with pytest.raises(ConfigError) as refused:
        Accuracy(curve)
    assert part in str(refused.value)


def test_a_measured_curve_may_be_rounded_and_have_ranks_that_never_hit():
    accuracy = Accuracy({1: 0.5, 2: 0.604167, 3: 0.708334, 4: 0.708334})
    ranks, _ = placed(accuracy, 200, children=4)
    assert set(ranks.tolist()) == {0, 1, 2, 3}


def test_settings_of_a_synthetic_source(tmp_path: Path):
    truth = tmp_path / "truth.jsonl"
    truth.write_text(json.dumps([1, 2, 3]) + "\n" + json.dumps([4, 5]) + "\n")
    spec = Synthetic(str(truth), curve=["8:0.99", "1:0.81"])
    assert spec.accuracy == Accuracy(PUBLISHED) and spec.synthetic and not spec.needs_draft
    assert read_truth(str(truth)) == [[1, 2, 3], [4, 5]]
    with pytest.raises(ConfigError, match="is no point of an accuracy curve"):
        Synthetic(str(truth), curve=["0.81"])
    with pytest.raises(ConfigError, match=r"source\.truth is"):
        Synthetic(str(tmp_path / "missing"))
    truth.write_text("[1, 2]\n{}\n")
    with pytest.raises(ConfigError, match="Line 2"):
        read_truth(str(truth))


# --- draft model ------------------------------------------------------------------------------


class Rows:
    """A draft that computes nothing and keeps which rows it was asked for."""

    vocab_size = 9

    def __init__(self, num_slots: int = 1000) -> None:
        self.model = self
        self.slots = SlotPool(num_slots)
        self.read: dict[int, int] = {}
        self.retained: dict[int, int] = {}
        self.passes: list[list[tuple[int, int]]] = []  # sequence, position
        self.computed: set[tuple[int, int]] = set()  # sequence, node

    def holds(self, sequence: int, node: int) -> bool:
        return (sequence, node) in self.computed

    def open(self, sequence: int, parent: int, shared: int) -> None:
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
            self.read[sequence] += kind != GUESS
        return replace(batch, hidden=torch.zeros(len(rows), 1))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(hidden), self.vocab_size)


def test_a_pass_of_the_draft_reads_a_chunk_and_a_long_prompt_keeps_nobody_waiting():
    draft = Rows()
    source = DraftModelSource(draft, chunk=8, vocabulary=9)
    asked = []
    for request, length in enumerate((30, 3, 1)):
        context = Context(request, [1] * length, list(range(length)))
        source.begin(context)
        last = length - 1
        asked.append(Asked(context, Tree(last, last - 1, 1, last, fed=True), np.array([ROOT])))
    answered = [[each is not None for each in source.expand(asked[:1], 2)]]
    answered += [[each is not None for each in source.expand(asked, 2)]]
    assert answered == [[False], [False, True, True]]
    assert [len(rows) for rows in draft.passes] == [8, 8]
    assert [position for request, position in draft.passes[1] if not request] == [8, 9, 10, 11]
    while source.expand(asked[:1], 2) == [None]:
        pass
    assert draft.read[0] == 30 and len(draft.passes) == 5


# --- hybrid -----------------------------------------------------------------------------------


class Told:
    """A source that proposes the same for every node: candidates as (token, probability)."""

    def __init__(self, *candidates: tuple[int, float]):
        self.candidates = candidates
        self.ready = True

    def begin(self, context: Context) -> None: ...

    def accept(self, verdict: Verdict) -> None: ...

    def end(self, request: int) -> None: ...

    def expand(self, asked: Sequence[Asked], children: int) -> list[Candidates | None]:
        if not self.ready:
            return [None] * len(asked)
        told = self.candidates[:children]
        return [Candidates.of(each.nodes, [told] * len(each.nodes)) for each in asked]


def test_a_token_that_two_sources_propose_counts_once():
    source = HybridSource({"a": Told((1, 0.5), (2, 0.2)), "b": Told((2, 0.3), (3, 0.1))})
    context, tree = started(source, [7])
    mixed = expand(source, context, tree, np.array([ROOT]), 8)
    assert mixed.tokens[0].tolist() == [1, 2, 3], "the likeliest first"
    told = row(mixed)
    assert 0.2 < told.pop(2) < 0.3
    assert told == pytest.approx({1: 0.5, 3: 0.1})
    best = expand(source, context, tree, np.array([ROOT]), 2)
    assert list(row(best)) == [1, 2]


def test_what_is_stated_of_guesses_with_and_without_support_comes_true():
    """One source is always sure; it is right where the other names its token too."""
    agrees, contradicts = ((1, 0.8), (2, 0.1)), ((2, 0.4),)
    other = Told(*agrees)
    source = HybridSource({"sure": Told((1, 0.8)), "other": other})
    context, tree = started(source, [7])
    for i in range(600):
        other.candidates = agrees if i % 2 else contradicts
        candidates = expand(source, context, tree, np.array([ROOT]), 8)
        tree.append(*_columns(candidates))
        decide(source, context, tree, 1 if i % 2 else 2)
    other.candidates = agrees
    supported = row(expand(source, context, tree, np.array([ROOT]), 8))
    other.candidates = contradicts
    unsupported = row(expand(source, context, tree, np.array([ROOT]), 8))
    assert supported[1] > 0.9 and unsupported[1] < 0.1 and unsupported[2] > 0.8


def test_nothing_is_proposed_until_every_source_is_ready():
    late = Told((1, 0.5))
    late.ready = False
    source = HybridSource({"a": late, "b": Told((2, 0.5))})
    context, tree = started(source, [7])
    assert expand(source, context, tree, np.array([ROOT]), 8) is None
    late.ready = True
    assert expand(source, context, tree, np.array([ROOT]), 8) is not None


def test_a_source_is_believed_as_far_as_it_has_been_right():
    """Both state one half; one is right nine times of ten, the other never."""
    source = HybridSource({"right": Told((1, 0.5)), "wrong": Told((2, 0.5))})
    context, tree = started(source, [7])
    for i in range(200):
        candidates = expand(source, context, tree, np.array([ROOT]), 8)
        tree.append(*_columns(candidates))
        decide(source, context, tree, 3 if i % 10 == 0 else 1)
    mixed = row(expand(source, context, tree, np.array([ROOT]), 8))
    assert mixed[1] == pytest.approx(0.9, abs=0.1)
    assert mixed[2] < 0.05


def test_settings_of_a_hybrid():
    assert Hybrid().needs_draft
    for name in ("suffix", "ngram"):
        alone = Hybrid(sources=[name])
        assert not alone.needs_draft
        made = alone.make(None, 100, lambda _: [])
        assert isinstance(made, Calibrated) and isinstance(made.source, HybridSource)
    for sources, part in (
        ([], "one or more"),
        (["suffix", "ngram"], "each once"),
        (["synthetic"], "'synthetic'"),
    ):
        with pytest.raises(ConfigError, match=part):
            Hybrid(sources=sources)
    for cls in (Hybrid, Suffix):
        with pytest.raises(ConfigError, match=r"source\.past is -1"):
            cls(past=-1)
        with pytest.raises(ConfigError, match=r"source\.corpus is '/no/such'"):
            cls(corpus="/no/such")
        with pytest.raises(ConfigError, match=r"source\.rounds is 0"):
            cls(rounds=0)


def test_a_draft_without_room_expands_the_likeliest_and_then_nothing():
    draft = Rows(num_slots=6)
    source = DraftModelSource(draft, chunk=8, vocabulary=9)
    context = Context(0, [1, 1], [0, 1])
    source.begin(context)
    tree = Tree(1, 0, 1, 1, fed=True)
    (candidates,) = source.expand([Asked(context, tree, np.array([ROOT]))], 8)
    assert candidates is not None and len(candidates.parents) == 1
    tree.append(np.array([ROOT]), np.arange(1, 9)[None], np.log(np.arange(1, 9) / 36)[None])
    (candidates,) = source.expand([Asked(context, tree, np.arange(1, 9))], 2)
    assert candidates is not None and candidates.parents.tolist() == [5, 6, 7, 8]
    late = Context(1, [1], [0])
    source.begin(late)
    asked = [Asked(late, Tree(0, -1, 1, 0, fed=True), np.array([ROOT]))]
    asked.append(Asked(context, tree, np.array([1])))
    answers = source.expand(asked, 2)
    assert [None if answer is None else len(answer.parents) for answer in answers] == [0, 0]
    assert len(draft.passes) == 2


def test_the_draft_reads_what_was_hung_into_the_tree_without_it():
    draft = Rows(num_slots=8)
    source = DraftModelSource(draft, chunk=8, vocabulary=9)
    context = Context(0, [1, 1], [0, 1])
    source.begin(context)
    tree = Tree(1, 0, 1, 1, fed=True)
    last = tree.index(tree.hang(ROOT, [4, 5, 6]))
    (candidates,) = source.expand([Asked(context, tree, np.array([last]))], 2)
    assert candidates.parents.tolist() == [last]
    assert draft.passes == [[(0, position) for position in range(5)]]
    tree.append(candidates.parents, candidates.tokens, candidates.logps)
    below = np.flatnonzero(~tree.expanded)
    (candidates,) = source.expand([Asked(context, tree, below)], 2)
    assert draft.passes[1] == [(0, 5), (0, 5)] and len(candidates.parents) == 2
    # One slot is left: of a path of two there is no room for the end.
    last = tree.index(tree.hang(int(below[0]), [4, 5]))
    (candidates,) = source.expand([Asked(context, tree, np.array([last]))], 2)
    assert not len(candidates.parents)


def test_the_draft_proposes_what_may_follow():
    draft = Rows()
    source = DraftModelSource(draft, chunk=8, vocabulary=9)
    context = Context(0, [1, 1], [0, 1])
    source.begin(context)
    tree = Tree(1, 0, 1, 1, fed=True)
    allowed = np.array([[0b101001000]], np.int32)
    asked = Asked(context, tree, np.array([ROOT]), allowed)
    (candidates,) = source.expand([asked], 9)
    present = np.isfinite(candidates.logps[0])
    assert sorted(candidates.tokens[0, present].tolist()) == [3, 6, 8]
    np.testing.assert_allclose(candidates.logps[0, present], np.log(1 / 3), rtol=1e-6)
