"""The suffix source: the automaton against every run of a text, what is proposed, what is held."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipespec.core import Sampling, Verdict
from pipespec.head.source.automaton import SuffixAutomaton
from pipespec.head.source.known import Past, read_corpus
from pipespec.head.source.protocol import Asked, Candidates, Context
from pipespec.head.source.suffix import CHUNK, SuffixSource
from pipespec.head.tree import ROOT, Tree

TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=4)


def read(texts: list[list[int]]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for text in texts:
        automaton.begin()
        for token in text:
            automaton.read([token])
    return automaton


def after(texts: list[list[int]], run: list[int]) -> set[int] | None:
    """What followed a run; None: it stands nowhere."""
    found = None
    for text in texts:
        for start in range(len(text) - len(run) + 1):
            if text[start : start + len(run)] == run:
                found = (found or set()) | {*text[start + len(run) : start + len(run) + 1]}
    return found


def check_runs(
    automaton: SuffixAutomaton, texts: list[list[int]], place, ending: list[int]
) -> None:
    """The runs at a place are the endings after which something stood that did not before."""
    told = {}
    for state, length in automaton.runs(place, 100):
        seen = automaton.seen(state)
        tokens = {token for token, _ in seen.likeliest}
        told[length] = tokens
        assert tokens == after(texts, ending[len(ending) - length :])
        assert seen.distinct == len(tokens) and seen.total >= seen.distinct
        assert all(automaton.followed(state, token) == (token in tokens) for token in range(4))
    for length in range(1, len(ending) + 1):
        if wanted := after(texts, ending[len(ending) - length :]):
            assert any(longer >= length and tokens == wanted for longer, tokens in told.items())


@given(TEXTS, st.lists(st.integers(0, 3), max_size=8))
def test_the_longest_ending_is_found_with_all_that_followed(texts, ending):
    automaton = read(texts)
    place = automaton.follow(ending)
    known = [n for n in range(1, len(ending) + 1) if after(texts, ending[-n:]) is not None]
    assert place[1] == max(known, default=0)
    check_runs(automaton, texts, place, ending)


@given(TEXTS)
def test_the_end_of_the_newest_text_is_where_it_stood_before(texts):
    automaton = read(texts)
    check_runs(automaton, texts, automaton.end, texts[-1])
    assert automaton.end[1] == max(
        [n for n in range(1, len(texts[-1]) + 1) if after(texts, texts[-1][-n:])], default=0
    )


@given(TEXTS)
def test_an_automaton_has_two_states_for_a_token_at_most(texts):
    automaton = read(texts)
    assert len(automaton) <= 2 * sum(map(len, texts)) + 1


def begun(source: SuffixSource, tokens: list[int], number: int = 0, **more) -> tuple[Context, Tree]:
    context = Context(number, list(tokens), list(range(len(tokens))), prompt=len(tokens), **more)
    source.begin(context)
    last = len(tokens) - 1
    return context, Tree(last, last - 1, tokens[-1], last, fed=True)


def ask(source: SuffixSource, context: Context, tree: Tree, deeper: int = 0) -> Candidates | None:
    nodes = np.flatnonzero(~tree.expanded)
    (found,) = source.expand([Asked(context, tree, nodes, deeper=deeper)], 4)
    return found


def say(source: SuffixSource, context: Context, tree: Tree, tokens: list[int]) -> None:
    base = len(context.tokens)
    for token in tokens:
        tree.advance(token)
        context.tokens.append(token)
        context.nodes.append(int(tree.id[ROOT]))
    source.accept(Verdict(context.sequence, base, tuple(tokens)))


def test_what_repeats_is_proposed_as_a_path():
    source = SuffixSource()
    text = [*range(40)]
    context, tree = begun(source, [*text, *text[:12]])
    found = ask(source, context, tree, deeper=16)
    assert found is not None and found.paths is not None
    tree.append(found.parents, found.tokens, found.logps, None, found.paths)
    tree.check()
    node = ROOT
    for token in range(12, 24):
        (child,) = [i for i in np.flatnonzero(tree.parent == node) if i and tree.token[i] == token]
        node = int(child)
    assert tree.cum[node] > np.log(0.1)


def test_a_node_is_followed_however_it_came_into_the_tree():
    source = SuffixSource()
    context, tree = begun(source, [1, 2, 3, 4, 5, 6, 1, 2])
    last = tree.index(tree.hang(ROOT, [3, 4]))
    found = ask(source, context, tree)
    assert found is not None
    assert found.tokens[found.parents == last][0, 0] == 5


def test_the_same_is_known_in_one_piece_and_in_many():
    tokens = np.random.default_rng(0).integers(0, 5, 80).tolist()
    whole, pieces = SuffixSource(), SuffixSource()
    context, tree = begun(whole, tokens)
    piece, small = begun(pieces, tokens[:30])
    piece.prompt = len(tokens)
    for token in tokens[30:]:
        say(pieces, piece, small, [token])
        ask(pieces, piece, Tree(0, -1, token, len(piece.tokens) - 1, fed=True))
    found, same = ask(whole, context, tree), ask(pieces, piece, small)
    assert found is not None and same is not None
    assert (found.tokens == same.tokens).all() and np.allclose(found.logps, same.logps)


def test_a_long_prompt_is_read_little_by_little():
    source = SuffixSource()
    context, tree = begun(source, [1, 2, 3] * CHUNK)
    answers = [ask(source, context, tree) is not None for _ in range(3)]
    assert answers == [False, False, True]


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 3), min_size=1, max_size=9))))
def test_sequences_come_and_go_and_what_is_held_is_bounded(life):
    source = SuffixSource(past=24)
    open_ones: dict[int, tuple[Context, Tree]] = {}
    for number, (ends, tokens) in enumerate(life):
        open_ones[number] = begun(source, tokens, number)
        for context, tree in open_ones.values():
            found = ask(source, context, tree, deeper=8)
            assert found is not None
            tree.append(found.parents, found.tokens, found.logps, None, found.paths)
            tree.check()
            assert (np.exp(found.logps).sum(1) <= 1 + 1e-9).all()
            say(source, context, tree, tokens)
        if ends:
            source.end(number)
            del open_ones[number]
        assert source.past.length <= 24
        assert len(source._texts) == len(open_ones)


def test_past_answers_are_known_and_the_oldest_are_forgotten():
    past = Past(20)
    for first in (100, 200, 300):
        past.add([*range(first, first + 8)])
        past.read(100)
    assert past.newer.follow([300, 301])[1] == 2
    assert past.older.follow([200, 201])[1] == 2
    assert past.older.follow([100])[1] == past.newer.follow([100])[1] == 0


@pytest.mark.parametrize("past", [0, 1000])
def test_another_answer_helps_only_if_it_is_held(past):
    source = SuffixSource(past)
    context, tree = begun(source, [1, 2])
    ask(source, context, tree)
    say(source, context, tree, [50, 51, 52, 53, 54])
    source.end(0)
    source.expand([], 4)
    context, tree = begun(source, [9, 50, 51], 1)
    found = ask(source, context, tree)
    assert found is not None
    assert (52 in found.tokens) == bool(past)
    assert 2 not in found.tokens, "prompts of others are not held"


def test_files_are_known_from_the_start(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.txt").write_text("xyz")
    (tmp_path / "a.txt").write_text("abcde")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe\x00")
    corpus = read_corpus(str(tmp_path), 7, lambda text: [ord(letter) for letter in text])
    assert corpus is not None and corpus.length == 7
    source = SuffixSource(0, corpus)
    context, tree = begun(source, [ord("x")])
    found = ask(source, context, tree)
    assert found is not None and found.tokens[0, 0] == ord("y")


def test_what_will_be_drawn_is_ranked_with_the_noise():
    ranked = []
    for seed in range(40):
        source = SuffixSource()
        asked = {"sampling": Sampling(temperature=1.0, seed=seed)}
        context, tree = begun(source, [1, 2, 1, 3, 1, 2, 1, 3, 1], **asked)
        found = ask(source, context, tree)
        assert found is not None and (np.diff(found.logps[0]) <= 0).all()
        ranked.append(int(found.tokens[0, 0]))
    assert {2, 3} <= set(ranked)
