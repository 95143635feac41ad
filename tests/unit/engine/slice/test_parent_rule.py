"""The parent rule: rows and verdicts in any relative order, one outcome (design page)."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipespec.core import COMMITTED, DRAFT, KIND, NODE, PARENT, POSITION, TOKEN, Verdict
from pipespec.engine.slice.parent_rule import DROPPED, Lineage, LiveNodes
from pipespec.head.proposer import Context
from pipespec.head.tree import ROOT, Tree
from pipespec.sampling.verifier import AcceptedPath

VOCABULARY = 3


def new_lineage(capacity: int = 64) -> Lineage:
    return Lineage(1, LiveNodes(capacity))


def admit(lineage: Lineage, rows: np.ndarray) -> np.ndarray:
    """bool `[rows]`: which of the rows were kept."""
    return lineage.nodes.admit(rows, {1: lineage}) != DROPPED


class Pipeline:
    """Several stages that hear rows and verdicts whenever the scheduler says so.

    Links keep their order and verdicts keep theirs; nothing else is promised. The "target"
    knows the text, so the last stage's verdicts need no model.
    """

    def __init__(self, num_stages: int, text: list[int], prompt: int, rng: np.random.Generator):
        self.text, self.rng = text, rng
        self.context = Context(1, text[:prompt], list(range(prompt)))
        self.tree = Tree(prompt - 1, prompt - 2, text[prompt - 1], prompt - 1, fed=True)
        self.stages = [new_lineage(capacity=4) for _ in range(num_stages)]
        self.links: list[deque[np.ndarray]] = [deque() for _ in range(num_stages)]
        self.verdicts: list[deque[Verdict]] = [deque() for _ in range(num_stages)]
        self.heard: deque[Verdict] = deque()
        self.path: list[int] = list(range(prompt))  # node ids of the decided text
        cut = int(rng.integers(0, prompt))
        for rows in (self.context.rows(0, cut), self.context.rows(cut, prompt)):
            self.links[0].append(rows)

    def grow_and_feed(self) -> None:
        """Random guesses, a random ancestor-closed choice of them, of any depth."""
        tree = self.tree
        for _ in range(int(self.rng.integers(0, 3))):
            open_nodes = np.flatnonzero(~tree.expanded)
            if len(open_nodes) and len(tree) < 60:
                parent = self.rng.choice(open_nodes, 1)
                size = int(self.rng.integers(1, VOCABULARY + 1))
                tokens = self.rng.permutation(VOCABULARY)[None, :size]
                tree.add_children(parent, tokens, -self.rng.exponential(size=tokens.shape))
        fed = tree.fed.copy()
        chosen = []
        for i in range(len(tree)):
            if not fed[i] and (i == ROOT or fed[tree.parent[i]]) and self.rng.random() < 0.5:
                fed[i] = True
                chosen.append(i)
        rows = tree.rows(1, np.array(chosen, int))
        tree.fed = fed
        self.links[0].append(rows)

    def hear(self) -> None:
        if self.heard:
            for token in self.heard.popleft().tokens:
                self.tree.advance([token])
                self.path.append(int(self.tree.id[ROOT]))

    def tell(self, stage: int) -> None:
        if self.verdicts[stage]:
            self.stages[stage].apply(self.verdicts[stage].popleft())
            self.stages[stage].check()

    def compute(self, stage: int) -> None:
        if not self.links[stage]:
            return
        lineage = self.stages[stage]
        rows = self.links[stage].popleft()
        rows = rows[admit(lineage, rows)]
        lineage.check()
        if stage + 1 < len(self.stages):
            self.links[stage + 1].append(rows)
            return
        rows = rows[rows[:, KIND] != COMMITTED]
        nodes, parents, tokens = (rows[:, c].tolist() for c in (NODE, PARENT, TOKEN))
        positions = rows[:, POSITION].tolist()
        drawn = [self.text[p + 1] if p + 1 < len(self.text) else 0 for p in positions]
        walk = AcceptedPath(lineage.tip, nodes, parents, tokens)
        while walk.row is not None:
            walk.append(drawn[walk.row])
        if walk.tokens:
            verdict = Verdict(1, lineage.decided, tuple(walk.tokens))
            lineage.apply(verdict)
            lineage.check()
            self.heard.append(verdict)
            for queue in self.verdicts[:-1]:
                queue.append(verdict)

    def settle(self) -> None:
        """Deliver everything that is on its way."""
        for stage in range(len(self.stages)):
            while self.links[stage]:
                self.compute(stage)
        while self.heard:
            self.hear()
        for stage in range(len(self.stages)):
            while self.verdicts[stage]:
                self.tell(stage)


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 4),
    st.integers(1, 4),
    st.lists(st.integers(0, 9), min_size=20, max_size=200),
)
def test_any_interleaving_has_the_reference_outcome(seed, num_stages, prompt, schedule):
    rng = np.random.default_rng(seed)
    text = rng.integers(0, VOCABULARY, 400).tolist()
    pipeline = Pipeline(num_stages, text, prompt, rng)
    for action in schedule:
        stage = int(rng.integers(num_stages))
        (pipeline.grow_and_feed, pipeline.hear)[action % 2]() if action < 4 else (
            pipeline.compute if action < 8 else pipeline.tell
        )(stage)
    pipeline.settle()

    decided = pipeline.stages[-1].decided
    fed = set(pipeline.tree.id[pipeline.tree.fed].tolist())
    root = int(pipeline.tree.id[ROOT])
    for lineage in pipeline.stages:
        # Everyone agrees on the text; the root's row may still be unfed.
        assert lineage.decided == decided == len(pipeline.path)
        assert lineage.tip == pipeline.path[lineage.length - 1]
        assert list(lineage.expected) == text[lineage.length : decided]
        # What lives is what the head has fed below the root.
        live = set(lineage.nodes.node[lineage.live].tolist())
        assert live == fed - {root}


@pytest.mark.slow
@given(st.integers(0, 2**32 - 1), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_a_pipeline_that_is_served_fairly_decodes_the_text(seed, num_stages):
    rng = np.random.default_rng(seed)
    text = rng.integers(0, VOCABULARY, 60).tolist()
    pipeline = Pipeline(num_stages, text, 2, rng)
    for _ in range(150):
        pipeline.grow_and_feed()
        pipeline.settle()
    assert pipeline.stages[0].decided >= 40
    assert all(s.decided == pipeline.stages[0].decided for s in pipeline.stages)


def test_repeated_verdict_changes_nothing():
    lineage = new_lineage()
    context = Context(1, [5, 6], [0, 1])
    admit(lineage, context.rows(0, 2))
    verdict = Verdict(1, 2, (7,))
    lineage.apply(verdict)
    lineage.apply(verdict)
    assert lineage.decided == 3 and list(lineage.expected) == [7]


def test_a_guess_that_was_dropped_and_made_again_is_not_taken_for_the_new_one():
    """Whoever feeds rows knows under which id a token was accepted."""
    rows = Context(1, [5], [0]).rows(0)
    old, new = (np.array([[1, node, 0, 7, 1, DRAFT]]) for node in (1, 2))
    for known, committed, left in ((None, [1], 0), ([1], [1], 0), ([2], [], 1)):
        lineage = new_lineage()
        admit(lineage, np.concatenate((rows, old)))
        followed, _ = lineage.apply(Verdict(1, 1, (7,)), known)
        assert [lineage.tip for _ in followed] == committed
        assert len(lineage.expected) == left
        lineage.check()
    admit(lineage, new)
    assert (lineage.tip, lineage.length) == (2, 2)
