"""Several levels from one round, against a tree that is a dictionary of texts."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipespec.core import Request, Verdict
from pipespec.head.paths import DraftPaths
from pipespec.head.policies.best_first import BestFirst
from pipespec.head.policies.static_tree import StaticTree
from pipespec.head.proposer import Proposal
from pipespec.head.scheduler import Scheduler
from pipespec.head.scheduler_types import SchedulerConfig
from pipespec.head.tree import ROOT, Tree
from tests.helpers.trees import Text, TextTree, check_tree, texts_of

VOCABULARY = 4


class Plain(TextTree):
    """What a tree is to hold, and who was expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.expanded: set[Text] = set()

    def grow(self, said: dict[Text, dict[int, float]], below: dict[Text, float]) -> None:
        """`below`: guesses of several levels, by text, those above first."""
        self.expanded |= said.keys()
        self.expand(said)
        for text, logp in below.items():
            if text[:-1] in self.logp and text[:-1] not in self.expanded:
                self.logp[text] = logp


def row_of(rng: np.random.Generator, count: int) -> dict[int, float]:
    tokens = rng.permutation(VOCABULARY)[:count].tolist()
    return dict(
        zip(tokens, np.log(rng.dirichlet(np.ones(count + 1))[:count]).tolist(), strict=True)
    )


def grow(tree: Tree, plain: Plain, rng: np.random.Generator) -> None:
    """One round: the best nodes are expanded, with guesses of several levels below some."""
    best = tree.most_probable(np.flatnonzero(~tree.expanded), int(rng.integers(1, 4)))
    by_index = {i: text for text, i in texts_of(tree).items()}
    asked = [by_index[i] for i in best.tolist()]
    children = int(rng.integers(1, VOCABULARY))
    rows = [row_of(rng, children) for _ in asked]
    ids = {
        (*above, token): i * children + j
        for i, (above, row) in enumerate(zip(asked, rows, strict=True))
        for j, token in enumerate(row)
    }
    above, tokens, logps, below = [], [], [], {}
    for _ in range(rng.integers(0, 8) if ids else 0):
        text = [*ids][rng.integers(len(ids))]
        token, logp = int(rng.integers(VOCABULARY)), -float(rng.exponential())
        if (*text, token) not in ids:
            above.append(ids[text])
            tokens.append(token)
            logps.append(logp)
            below[(*text, token)] = logp
            ids[(*text, token)] = len(ids)
    paths = DraftPaths(np.array(above, np.int64), np.array(tokens, np.int64), np.array(logps))
    shape = (len(rows), children)
    candidates = np.array([[*row] for row in rows], np.int64).reshape(shape)
    stated = np.array([[*row.values()] for row in rows]).reshape(shape)
    plain.grow(dict(zip(asked, rows, strict=True)), below)
    before = len(tree)
    assert tree.add_children(best, candidates, stated, paths=paths) == len(tree) - before


@given(st.integers(0, 2**32 - 1), st.integers(1, 10))
def test_rounds_of_several_levels_build_one_tree(seed, rounds):
    rng = np.random.default_rng(seed)
    tree, plain = Tree(7, 6, token=1, position=10, fed=True), Plain()
    for _ in range(rounds):
        grow(tree, plain, rng)
        check_tree(tree)
        here = texts_of(tree)
        assert here.keys() == plain.logp.keys()
        assert {text for text, i in here.items() if tree.expanded[i]} == plain.expanded
        for text, i in here.items():
            assert tree.logp[i] == pytest.approx(plain.logp[text])
            assert tree.cum[i] == pytest.approx(plain.cum(text))


@given(st.integers(0, 2**32 - 1), st.integers(1, 10), st.integers(1, 30))
def test_trimming_leaves_no_node_without_its_parent(seed, rounds, capacity):
    rng = np.random.default_rng(seed)
    tree, plain = Tree(7, 6, token=1, position=10, fed=True), Plain()
    for _ in range(rounds):
        grow(tree, plain, rng)
        tree.mark_fed(tree.most_probable(np.flatnonzero(~tree.fed), int(rng.integers(0, 4))))
        held = set(tree.id[tree.fed | tree.expanded].tolist())
        tree.trim(capacity)
        check_tree(tree)
        assert held <= set(tree.id.tolist())
        assert len(tree) == max(capacity, len(held)) or len(tree) < capacity
        plain.logp = {text: plain.logp[text] for text in texts_of(tree)}


def test_equal_nodes_are_trimmed_from_below():
    tree = Tree(0, -1, 0, 0, fed=True)
    paths = DraftPaths(np.array([0, 1, 2]), np.array([5, 6, 7]), np.zeros(3))
    tree.add_children(np.array([ROOT]), np.array([[4]]), np.zeros((1, 1)), paths=paths)
    tree.trim(3)
    check_tree(tree)
    assert tree.token.tolist() == [0, 4, 5]


def test_draft_token_below_padding_is_padding():
    tree = Tree(0, -1, 0, 0, fed=True)
    logps = np.array([-0.5, -0.5, -np.inf, -0.5])
    paths = DraftPaths(np.array([1, 0, 3, 4]), np.array([5, 6, 7, 8]), logps)
    tree.add_children(
        np.array([ROOT]), np.array([[1, 2]]), np.array([[-1.0, -np.inf]]), paths=paths
    )
    check_tree(tree)
    assert [*texts_of(tree)] == [(), (1,), (1, 6)]


@pytest.mark.parametrize(
    ("policy", "deep"), [(BestFirst(width=4, children=2), True), (StaticTree(shape=[1, 1]), False)]
)
def test_only_policies_that_keep_unfed_nodes_request_paths(policy, deep):
    config = SchedulerConfig(policy, num_stages=2, rounds=1, prefill_chunk=4, context_limit=64)
    scheduler = Scheduler(config)
    scheduler.admission.add(Request(1, (1, 2), 16), lambda _: False, 0)
    (sequence,) = scheduler.admit()
    scheduler.begin_step()
    scheduler.next_batch(scheduler.plan_batch(0.0))
    scheduler.apply(Verdict(sequence.number, 2, (9,)), 1)
    scheduler.begin_step()
    work = scheduler.next_expansion(0.0)
    assert work is not None
    (asked,) = work.requests
    assert asked.max_path_tokens == (2 if deep else 0)
    found = Proposal(asked.nodes, np.array([[3, 4]]), np.log([[0.5, 0.25]]))
    paths = DraftPaths(np.array([0, 2]), np.array([5, 6]), np.log([0.5, 0.5]))
    scheduler.add_proposals(work, [replace(found, paths=paths)], 1.0)
    tree = sequence.tree
    check_tree(tree)
    fed = [(3,), (4,), *([(3, 5), (3, 5, 6)] if deep else [])]
    assert [*texts_of(tree)][1:] == fed
    assert not tree.expanded[1:].any()
    scheduler.apply(Verdict(sequence.number, 3, (3,)), 2)
    assert [*texts_of(tree)][1:] == ([(5,), (5, 6)] if deep else [])
