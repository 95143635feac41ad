"""The suffix proposer: its automaton against every run of a text, its proposals, its memory."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipespec.core import SamplingParams
from pipespec.head.proposer import Proposal
from pipespec.head.proposers.history import AnswerHistory, read_corpus
from pipespec.head.proposers.suffix import CHUNK, SuffixProposer
from pipespec.head.proposers.suffix_automaton import SuffixAutomaton
from pipespec.head.tree import ROOT, Tree
from tests.helpers.drafted import Drafted
from tests.helpers.trees import check_tree

TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=4)


def read(texts: list[list[int]]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for text in texts:
        automaton.start_text()
        for token in text:
            automaton.extend([token])
    return automaton


def after(texts: list[list[int]], run: list[int]) -> set[int] | None:
    """The tokens that followed a run; None: it does not occur."""
    found = None
    for text in texts:
        for start in range(len(text) - len(run) + 1):
            if text[start : start + len(run)] == run:
                found = (found or set()) | {*text[start + len(run) : start + len(run) + 1]}
    return found


def check_suffixes(
    automaton: SuffixAutomaton, texts: list[list[int]], match, ending: list[int]
) -> None:
    """The suffixes of a match are the endings that more tokens followed than the longer ones."""
    followers = {}
    for state, length in automaton.suffixes(match, 100):
        seen = automaton.follow_counts(state)
        tokens = {token for token, _ in seen.likeliest}
        followers[length] = tokens
        assert tokens == after(texts, ending[len(ending) - length :])
        assert seen.distinct == len(tokens) and seen.total >= seen.distinct
        assert all(automaton.has_followed(state, token) == (token in tokens) for token in range(4))
    for length in range(1, len(ending) + 1):
        if wanted := after(texts, ending[len(ending) - length :]):
            assert any(
                longer >= length and tokens == wanted for longer, tokens in followers.items()
            )


@given(TEXTS, st.lists(st.integers(0, 3), max_size=8))
def test_automaton_matches_the_longest_suffix_with_all_followers(texts, ending):
    automaton = read(texts)
    place = automaton.match(ending)
    known = [n for n in range(1, len(ending) + 1) if after(texts, ending[-n:]) is not None]
    assert place[1] == max(known, default=0)
    check_suffixes(automaton, texts, place, ending)


@given(TEXTS)
def test_automaton_knows_the_followers_of_the_newest_texts_suffixes(texts):
    automaton = read(texts)
    check_suffixes(automaton, texts, automaton.longest_suffix, texts[-1])
    lengths = [length for _, length in automaton.suffixes(automaton.longest_suffix, 100)]
    assert max(lengths, default=0) == max(
        [n for n in range(1, len(texts[-1]) + 1) if after(texts, texts[-1][-n:])], default=0
    )


@given(TEXTS)
def test_automaton_has_at_most_two_states_per_token(texts):
    automaton = read(texts)
    assert len(automaton) <= 2 * sum(map(len, texts)) + 1


def ask(drafted: Drafted, deeper: int = 0) -> Proposal:
    """What follows all nodes that have not been expanded."""
    nodes = np.flatnonzero(~drafted.tree.expanded)
    found = drafted.propose(4, nodes, max_path_tokens=deeper)
    assert found is not None
    return found


def test_suffix_proposes_repeated_text_as_a_path():
    text = [*range(40)]
    drafted = Drafted.start(SuffixProposer(), [*text, *text[:12]])
    drafted.add(ask(drafted, deeper=16))
    tree = drafted.tree
    check_tree(tree)
    node = ROOT
    for token in range(12, 24):
        (child,) = [i for i in np.flatnonzero(tree.parent == node) if i and tree.token[i] == token]
        node = int(child)
    assert tree.cum[node] > np.log(0.1)


def test_suffix_matches_nodes_that_others_added():
    drafted = Drafted.start(SuffixProposer(), [1, 2, 3, 4, 5, 6, 1, 2])
    last = drafted.tree.index(drafted.tree.append_path(ROOT, [3, 4]))
    found = ask(drafted)
    assert found.tokens[found.parents == last][0, 0] == 5


def test_suffix_knows_the_same_of_a_prompt_and_of_an_answer_with_its_tokens():
    tokens = np.random.default_rng(0).integers(0, 5, 80).tolist()
    whole = Drafted.start(SuffixProposer(), tokens)
    pieces = Drafted.start(SuffixProposer(), tokens[:30])
    pieces.context.prompt_len = len(tokens)
    for token in tokens[30:]:
        pieces.decide(token)
        alone = Tree(0, -1, token, len(pieces.context.tokens) - 1, fed=True)
        ask(replace(pieces, tree=alone))
    found, same = ask(whole), ask(pieces)
    assert (found.tokens == same.tokens).all() and np.allclose(found.logps, same.logps)


def test_suffix_reads_a_long_prompt_in_chunks():
    drafted = Drafted.start(SuffixProposer(), [1, 2, 3] * CHUNK)
    answers = [drafted.propose(4) is not None for _ in range(3)]
    assert answers == [False, False, True]


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 3), min_size=1, max_size=9))))
def test_suffix_memory_stays_bounded_while_sequences_start_and_end(life):
    proposer = SuffixProposer(past=24)
    open_ones: dict[int, Drafted] = {}
    for number, (ends, tokens) in enumerate(life):
        open_ones[number] = Drafted.start(proposer, tokens, number)
        for drafted in open_ones.values():
            found = ask(drafted, deeper=8)
            drafted.add(found)
            check_tree(drafted.tree)
            assert (np.exp(found.logps).sum(1) <= 1 + 1e-9).all()
            drafted.decide(*tokens)
        if ends:
            proposer.end_sequence(number)
            with pytest.raises(KeyError):
                proposer.end_sequence(number)
            del open_ones[number]
        assert proposer.past.length <= 24


def test_history_drops_the_oldest_answers():
    past = AnswerHistory(20)
    for first in (100, 200, 300):
        past.add([*range(first, first + 8)])
        past.read(100)
    assert past.newer.match([300, 301])[1] == 2
    assert past.older.match([200, 201])[1] == 2
    assert past.older.match([100])[1] == past.newer.match([100])[1] == 0


@pytest.mark.parametrize(("past", "salted"), [(0, False), (1000, False), (1000, True)])
def test_suffix_uses_past_answers_that_it_may_hold_but_never_those_of_salted_requests(past, salted):
    proposer = SuffixProposer(past)
    drafted = Drafted.start(proposer, [1, 2], salted=salted)
    ask(drafted)
    drafted.decide(50, 51, 52, 53, 54)
    proposer.end_sequence(0)
    proposer.propose([], 4)
    found = ask(Drafted.start(proposer, [9, 50, 51], 1))
    assert (52 in found.tokens) == (proposer.past.length > 0) == (past > 0 and not salted)
    assert 2 not in found.tokens, "prompts of other requests are not held"


def test_suffix_knows_the_corpus_from_the_start(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.txt").write_text("xyz")
    (tmp_path / "a.txt").write_text("abcde")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe\x00")
    corpus = read_corpus(str(tmp_path), 7, lambda text: [ord(letter) for letter in text])
    assert corpus is not None and corpus.length == 7
    assert ask(Drafted.start(SuffixProposer(0, corpus), [ord("x")])).tokens[0, 0] == ord("y")


def test_suffix_ranks_with_the_targets_noise():
    ranked = []
    for seed in range(40):
        drawn = SamplingParams(temperature=1.0, seed=seed)
        tokens = [1, 2, 1, 3, 1, 2, 1, 3, 1]
        found = ask(Drafted.start(SuffixProposer(), tokens, sampling=drawn))
        assert (np.diff(found.logps[0]) <= 0).all()
        ranked.append(int(found.tokens[0, 0]))
    assert {2, 3} <= set(ranked)
