"""A mid-size model that scores the tree late, against a tree that is a dictionary of texts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipespec.core import NODE, PARENT, Batch, Request, Verdict
from pipespec.head.feed.best_first import BestFirst
from pipespec.head.feed.level import Level
from pipespec.head.scheduler import Scheduler
from pipespec.head.scoring import ScorePart, ScoreWork
from pipespec.head.sequence import Sequence
from pipespec.head.source.protocol import Asked, Candidates
from pipespec.head.tree import ROOT, SMALLEST, Tree
from pipespec.head.work import SchedulerConfig

VOCABULARY = 5
Text = tuple[int, ...]
# What a model says follows a text.
Said = dict[Text, dict[int, float]]


def text_of(tree: Tree, node: int) -> Text:
    return tuple(tree.token[tree.path(node)[1:]].tolist())


class Plain:
    """What a tree is to hold, by text below the root."""

    def __init__(self) -> None:
        self.logp: dict[Text, float] = {(): 0.0}
        self.fed: set[Text] = {()}
        self.scored: set[Text] = set()

    def said(self, said: Said) -> None:
        for above, row in said.items():
            left = max(1 - sum(np.exp([*row.values()])), SMALLEST)
            bound = min([*row.values(), float(np.log(left))])
            for text in [text for text in self.logp if text and text[:-1] == above]:
                self.logp[text] = min(self.logp[text], bound)
            self.logp |= {(*above, token): logp for token, logp in row.items()}

    def cum(self, text: Text) -> float:
        return sum(self.logp[text[:end]] for end in range(len(text) + 1))

    def advance(self, token: int) -> None:
        def below(texts: set[Text]) -> set[Text]:
            return {text[1:] for text in texts if text[:1] == (token,)}

        hit = (token,) in self.logp
        self.fed, self.scored = below(self.fed), below(self.scored)
        self.logp = {text[1:]: logp for text, logp in self.logp.items() if text[:1] == (token,)}
        self.logp[()] = 0.0
        assert hit or len(self.logp) == 1


def answer(asked: Asked, nodes: np.ndarray, rng: np.random.Generator) -> tuple[Candidates, Said]:
    """What a model may say of some of the nodes that it was asked about."""
    children = int(rng.integers(1, VOCABULARY))
    tokens = np.array([rng.permutation(VOCABULARY)[:children] for _ in nodes]).reshape(-1, children)
    chances = rng.dirichlet(np.ones(children + 1), len(nodes))[:, :children]
    logps = np.log(chances)
    said = {
        text_of(asked.tree, node): dict(zip(row.tolist(), logp.tolist(), strict=True))
        for node, row, logp in zip(nodes.tolist(), tokens, logps, strict=True)
    }
    return Candidates(nodes, tokens, logps), said


class Story:
    """A scheduler with one request, and what its tree is to hold."""

    def __init__(self, seed: int, capacity: int = 64) -> None:
        self.rng = np.random.default_rng(seed)
        policy = BestFirst(width=4, children=VOCABULARY, capacity=capacity, row_cost=0.0)
        self.scheduler = Scheduler(
            SchedulerConfig(policy, 3, rounds=1000, prefill_chunk=1, context_limit=60, mid_rows=3)
        )
        self.scheduler.add(Request(0, (1,), max_new_tokens=50), lambda token: False, now=0)
        (self.sequence,) = self.scheduler.admit()
        self.plain = Plain()
        self.asked: ScoreWork | None = None
        self.batch = self.fed()
        self.scheduler.begin()

    @property
    def tree(self) -> Tree:
        return self.sequence.tree

    def texts(self) -> dict[Text, int]:
        found = {text_of(self.tree, i): i for i in range(len(self.tree))}
        assert len(found) == len(self.tree), "a text stands twice"
        return found

    def fed(self) -> Batch:
        batch = self.scheduler.next_batch(0.0)
        assert isinstance(batch, Batch)
        return batch

    def draft(self) -> None:
        if work := self.scheduler.expansion(0.0):
            (asked,) = work.asked
            found, said = answer(asked, asked.nodes, self.rng)
            self.plain.said(said)
            self.scheduler.graft(work, [found], 1.0)

    def feed(self) -> None:
        """Of all that is not fed, what is likeliest is."""
        here = self.texts()
        unfed = sorted(
            (text for text in here if text not in self.plain.fed), key=self.plain.cum, reverse=True
        )
        before = self.tree.fed.copy()
        batch = self.fed()
        new = {text_of(self.tree, i) for i in np.flatnonzero(self.tree.fed & ~before).tolist()}
        least = min((self.plain.cum(text) for text in new), default=0.0)
        assert all(self.plain.cum(text) <= least + 1e-9 for text in unfed if text not in new), (
            "a likelier node was passed over"
        )
        earlier = {-1, *self.tree.id[before].tolist(), *self.sequence.context.nodes[:-1]}
        for row in batch.rows.tolist():
            assert row[PARENT] in earlier, "a row came before its parent"
            earlier.add(row[NODE])
        self.plain.fed |= new
        self.scheduler.begin()

    def ask(self) -> None:
        if self.asked is None and (work := self.scheduler.scoring()):
            (asked,) = work.asked
            texts = {text_of(asked.tree, node) for node in asked.nodes.tolist()}
            assert not texts & self.plain.scored, "a node is asked about twice"
            self.plain.scored |= texts
            assert {text[:-1] for text in texts} <= self.plain.scored | {()}
            self.asked = work

    def hear(self) -> None:
        """The pass ends: all, some or none of its nodes are answered."""
        if self.asked is None:
            return
        work, self.asked = self.asked, None
        (asked,) = work.asked
        count = int(self.rng.integers(0, len(asked.nodes) + 2))
        ids = asked.tree.id
        now = {node: text for text, i in self.texts().items() for node in [int(self.tree.id[i])]}
        if count > len(asked.nodes):
            found, said, nodes = None, {}, asked.nodes[:0]
        else:
            nodes = asked.tree.best(asked.nodes, count)
            found, then = answer(asked, nodes, self.rng)
            said = {
                now[int(ids[node])]: row
                for node, row in zip(nodes.tolist(), then.values(), strict=True)
                if int(ids[node]) in now
            }
        unsaid = set(ids[asked.nodes].tolist()) - set(ids[nodes].tolist())
        self.plain.scored -= {now[node] for node in unsaid if node in now}
        before = self.scheduler.totals.scored
        self.scheduler.rescore(work, [found])
        count = self.scheduler.totals.scored - before
        assert count in (0, len(said)), "a part of an answer was taken"
        if count:  # else the mid-size model has been wrong too often to be believed
            self.plain.said(said)

    def decide(self) -> None:
        children = self.tree.token[1:][self.tree.parent[1:] == ROOT].tolist()
        token = int(self.rng.choice([*children, int(self.rng.integers(VOCABULARY))]))
        base = len(self.sequence.context.tokens)
        self.plain.advance(token)
        self.scheduler.apply(Verdict(self.sequence.number, base, (token,)), now=0)

    def check(self) -> None:
        self.tree.check()
        here = self.texts()
        assert here.keys() <= self.plain.logp.keys()
        # What is missing was trimmed: it had been neither fed nor expanded.
        assert self.plain.fed <= here.keys() | {()}
        self.plain.logp = {text: self.plain.logp[text] for text in here}
        self.plain.scored &= here.keys()
        for text, i in here.items():
            assert i == ROOT or self.tree.logp[i] == pytest.approx(self.plain.logp[text])
            assert self.tree.cum[i] == pytest.approx(self.plain.cum(text))
            assert self.tree.fed[i] == (text in self.plain.fed)
            assert self.tree.scored[i] == (text in self.plain.scored)


@given(st.integers(0, 2**32 - 1), st.sampled_from([12, 64, 1000]), st.integers(1, 60))
def test_what_is_scored_late_is_in_the_tree_whatever_came_between(seed, capacity, count):
    story = Story(seed, capacity)
    for deed in story.rng.choice(["draft", "draft", "feed", "ask", "hear", "decide"], count):
        getattr(story, deed)()
        story.check()
        held = np.count_nonzero(story.tree.expanded | story.tree.fed)
        assert held <= capacity, "what stays whatever comes is more than the tree may hold"


def scored(scheduler: Scheduler, sequence: Sequence) -> ScoreWork:
    work = scheduler.scoring()
    assert work is not None and [part.sequence for part in work.parts] == [sequence]
    return work


def test_of_a_request_that_has_ended_nothing_is_scored():
    story = Story(0)
    story.draft()
    work = scored(story.scheduler, story.sequence)
    (asked,) = work.asked
    found, _ = answer(asked, asked.nodes, story.rng)
    story.scheduler.cancel(0)
    before = len(story.tree)
    story.scheduler.rescore(work, [found])
    assert len(story.tree) == before
    assert story.scheduler.totals.scored == 0


def test_who_was_right_is_believed():
    """The text is always token 1: the small draft gives it an even chance, the mid-size model
    little, later much."""
    policy = BestFirst(width=4, children=2, row_cost=0.0)
    scheduler = Scheduler(
        SchedulerConfig(policy, 3, rounds=1, prefill_chunk=1, context_limit=200, mid_rows=3)
    )
    scheduler.add(Request(0, (1,), max_new_tokens=190), lambda token: False, now=0)
    (sequence,) = scheduler.admit()

    def taken(chance: float) -> bool:
        """One token later: whether what the mid-size model said of the root is in the tree."""
        scheduler.begin()
        tree, root = sequence.tree, np.array([ROOT])
        even = Candidates(root, np.array([[0, 1]]), np.log([[0.5, 0.5]]))
        tree.append(even.parents, even.tokens, even.logps)
        (asked,) = scored(scheduler, sequence).asked
        assert asked.nodes[0] == ROOT
        found = Candidates(root, np.array([[0, 1]]), np.log([[1 - chance, chance]]))
        before = scheduler.totals.scored
        scheduler.rescore(ScoreWork((ScorePart(sequence, tree, asked),), 2), [found])
        scheduler.next_batch(0.0)
        base = len(sequence.context.tokens)
        scheduler.apply(Verdict(sequence.number, base, (1,)), now=0)
        return scheduler.totals.scored > before

    wrong = [taken(0.1) for _ in range(20)]
    assert wrong[0] and not wrong[-1]
    right = [taken(0.9) for _ in range(80)]
    assert not right[0] and right[-1]


def test_a_level_is_not_scored():
    """Its nodes are fed level by level: children of what was fed would come too late."""
    scheduler = Scheduler(
        SchedulerConfig(Level(4, 4), 3, rounds=1, prefill_chunk=1, context_limit=60, mid_rows=3)
    )
    scheduler.add(Request(0, (1,), max_new_tokens=50), lambda token: False, now=0)
    list(scheduler.admit())
    assert scheduler.scoring() is None
