"""Grammars applied to a tree of draft tokens."""

import threading
from concurrent.futures import wait
from contextlib import closing
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipespec.head.proposer import Proposal
from pipespec.head.structured_output import GrammarGuide, add_ahead, masked_proposal
from pipespec.head.tree import ROOT, Tree
from pipespec.sampling.grammar import unpack_mask
from pipespec.system.fair_thread import FairThread
from tests.helpers.grammar import OneOf
from tests.helpers.trees import check_tree

EOS = 99
LAST = 1000  # a position that no text reaches
TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=6)


def root() -> Tree:
    return Tree(4, 3, 7, 4, fed=True)


def extend(guide: GrammarGuide, tree: Tree, nodes: np.ndarray, end: int = LAST):
    return add_ahead(tree, guide.look_ahead(tree, nodes, end))


def texts_of(tree: Tree) -> list[list[int]]:
    """What every node says, below the root."""
    return [tree.token[tree.path(node)[1:]].tolist() for node in range(len(tree))]


@given(TEXTS, st.integers(0, 99))
def test_trees_hold_only_tokens_that_the_grammar_allows(texts, seed):
    language, random = OneOf(texts, EOS), Random(seed)
    guide, tree = GrammarGuide(OneOf(texts, EOS), (EOS,)), root()
    while len(wanted := np.flatnonzero(~tree.expanded)):
        nodes, allowed = extend(guide, tree, wanted)
        check_tree(tree)
        assert (allowed is None) == (not len(nodes))
        if allowed is None:
            continue
        proposed = [random.sample(range(5), 4) for _ in nodes]  # 4 stands in no text
        logps = np.log(np.full((len(nodes), 4), 0.25))
        found = masked_proposal(Proposal(nodes, np.array(proposed), logps), nodes, allowed)
        tree.add_children(found.parents, found.tokens, found.logps)
        check_tree(tree)
    for text in texts_of(tree):
        language.text = text
        assert language.next(), f"{text} begins no text of the grammar"


@given(TEXTS)
def test_determined_tokens_are_added_without_a_proposal_and_are_certain(texts):
    language, guide, tree = OneOf(texts, EOS), GrammarGuide(OneOf(texts, EOS), (EOS,)), root()
    ends, _ = extend(guide, tree, np.array([ROOT]))
    while len(language.next()) == 1 and EOS not in language.next():
        language.text += language.next()
    assert texts_of(tree)[-1] == language.text
    assert (tree.cum == 0).all()
    choice = len(language.next()) > 1
    assert ends.tolist() == ([len(tree) - 1] if choice else [])
    assert tree.expanded.tolist() == [True] * (len(tree) - 1) + [not choice]


def test_determined_tokens_end_at_the_context_limit():
    guide, tree = GrammarGuide(OneOf([[1, 2, 3, 0], [1, 2, 3, 1]], EOS), (EOS,)), root()
    assert extend(guide, tree, np.array([ROOT]), 7)[0].tolist() == [2]
    assert texts_of(tree)[-1] == [1, 2]
    assert extend(guide, tree, np.array([2]), 7)[0].tolist() == [2]


@given(TEXTS, st.data())
def test_accept_moves_the_matcher_after_any_look_ahead(texts, data):
    language, guide, tree = OneOf(texts, EOS), GrammarGuide(OneOf(texts, EOS), (EOS,)), root()
    while tokens := sorted(language.next() - {EOS}):
        extend(guide, tree, np.flatnonzero(~tree.expanded))
        token = data.draw(st.sampled_from(tokens))
        language.consume([token])
        tree.advance([token])
        guide.accept(token)
        (allowed,) = guide.allowed(tree, np.array([ROOT]))
        assert set(np.flatnonzero(unpack_mask(allowed, 256))) == language.next()


def test_draft_token_outside_the_grammar_allows_no_children():
    guide, tree = GrammarGuide(OneOf([[1, 2], [1, 3]], EOS), (EOS,)), root()
    tree.add_children(np.array([ROOT]), np.array([[5]]), np.array([[-1.0]]))
    assert extend(guide, tree, np.array([1]))[0].tolist() == []
    assert len(tree) == 2 and tree.expanded[1]


def test_failed_matcher_leaves_proposals_unmasked():
    guide, tree = GrammarGuide(OneOf([[1, 2, 3]], EOS, fails_after=2), (EOS,)), root()
    nodes, allowed = extend(guide, tree, np.array([ROOT]))
    assert len(nodes) == 1 and allowed is None
    guide.accept(1)
    assert guide.allowed(tree, nodes) is None


def test_matcher_reads_the_answer_of_an_earlier_epoch():
    guide, tree = GrammarGuide(OneOf([[1, 2], [3, 2]], EOS), (EOS,), (1,)), root()
    extend(guide, tree, np.array([ROOT]))
    assert texts_of(tree)[-1] == [2]


def test_node_without_candidates_gets_the_determined_token():
    allowed = np.zeros((2, 8), np.int32)
    allowed[0, 1] = 1 << 3
    allowed[1, 0] = 0b11
    none = Proposal(np.array([4, 6]), np.empty((2, 0), np.int64), np.empty((2, 0)))
    found = masked_proposal(none, np.array([4, 6]), allowed)
    assert found.tokens[0, 0] == 35 and found.logps[0, 0] == 0
    assert found.logps[1, 0] == -np.inf


def test_masks_that_are_late_hold_up_no_round_and_serve_a_later_one():
    masks, may_go_on = FairThread(), threading.Event()
    with closing(masks):
        guide, tree = GrammarGuide(OneOf([[1, 2, 3]], EOS), (EOS,), (), masks, "form"), root()
        masks.submit("form", may_go_on.wait)
        masks.grant_share(0.0)
        assert guide.look_ahead(tree, np.array([ROOT]), LAST) == ()
        assert guide.allowed(tree, np.array([ROOT])) is None
        may_go_on.set()
        wait([masks.submit("form", lambda: None)])
        (found,) = guide.look_ahead(tree, np.array([ROOT]), LAST)
        assert found.tokens == [1, 2, 3] and found.ends
