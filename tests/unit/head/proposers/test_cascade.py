"""A mid-size model that scores the tree late, against a tree that is a dictionary of texts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipespec.core import NODE, PARENT, Batch, Request, Verdict
from pipespec.extras.emulation.synthetic_proposer import Accuracy, SyntheticProposer
from pipespec.head.policies.best_first import BestFirst
from pipespec.head.policies.level import Level
from pipespec.head.policies.policy import SpeculationPolicy
from pipespec.head.proposer import Context, Proposal, ProposalRequest
from pipespec.head.proposers.async_proposer import AsyncResult
from pipespec.head.proposers.cascade import CascadeProposer
from pipespec.head.scheduler import Scheduler
from pipespec.head.scheduler_types import SchedulerConfig
from pipespec.head.sequence import Sequence
from pipespec.head.tree import ROOT, Tree
from tests.helpers.trees import Text, TextTree, check_tree, texts_of

VOCABULARY = 5
# What a model says follows a text.
Said = dict[Text, dict[int, float]]


def text_of(tree: Tree, node: int) -> Text:
    return tuple(tree.token[tree.path(node)[1:]].tolist())


class Mid:
    """A mid-size model whose passes end when the test answers them."""

    def __init__(self) -> None:
        self.requests: list[ProposalRequest] = []  # of the pass under way
        self._result: AsyncResult | None = None

    def submit(self, requests: list[ProposalRequest], children: int) -> None:
        assert not self.requests, "a pass is under way"
        self.requests = requests

    def answer(self, proposal: Proposal | None) -> None:
        self.requests, self._result = [], AsyncResult([proposal], paced=True)

    def poll(self) -> AsyncResult | None:
        result, self._result = self._result, None
        return result

    def start_sequence(self, context: Context) -> None: ...
    def accept_verdict(self, verdict: Verdict) -> None: ...
    def end_sequence(self, sequence: int) -> None: ...
    def close(self) -> None: ...


def scheduler_with(
    mid: Mid, policy: SpeculationPolicy, rounds: int, context_limit: int
) -> Scheduler:
    draft = SyntheticProposer(Accuracy({1: 0.5}, spread=0.5), [[1]], VOCABULARY, 0)
    config = SchedulerConfig(policy, 3, rounds=rounds, prefill_chunk=1, context_limit=context_limit)
    return Scheduler(config, CascadeProposer(draft, mid, 3, context_limit))


class Plain(TextTree):
    """What a tree is to hold."""

    def __init__(self) -> None:
        super().__init__()
        self.fed: set[Text] = {()}
        self.scored: set[Text] = set()

    def advance(self, token: int) -> None:
        def below(texts: set[Text]) -> set[Text]:
            return {text[1:] for text in texts if text[:1] == (token,)}

        hit = (token,) in self.logp
        self.fed, self.scored = below(self.fed), below(self.scored)
        self.logp = {text[1:]: logp for text, logp in self.logp.items() if text[:1] == (token,)}
        self.logp[()] = 0.0
        assert hit or len(self.logp) == 1


def answer(
    asked: ProposalRequest, nodes: np.ndarray, rng: np.random.Generator
) -> tuple[Proposal, Said]:
    """What a model may say of some of the nodes that it was asked about."""
    children = int(rng.integers(1, VOCABULARY))
    tokens = np.array([rng.permutation(VOCABULARY)[:children] for _ in nodes]).reshape(-1, children)
    chances = rng.dirichlet(np.ones(children + 1), len(nodes))[:, :children]
    logps = np.log(chances)
    said = {
        text_of(asked.tree, node): dict(zip(row.tolist(), logp.tolist(), strict=True))
        for node, row, logp in zip(nodes.tolist(), tokens, logps, strict=True)
    }
    return Proposal(nodes, tokens, logps), said


class Story:
    """A scheduler with one request, and what its tree is to hold."""

    def __init__(self, seed: int, capacity: int = 64) -> None:
        self.rng = np.random.default_rng(seed)
        policy = BestFirst(width=4, children=VOCABULARY, capacity=capacity, row_cost=0.0)
        self.mid = Mid()
        self.scheduler = scheduler_with(self.mid, policy, 1000, 60)
        self.scheduler.admission.add(
            Request(0, (1,), max_new_tokens=50), lambda token: False, now=0
        )
        (self.sequence,) = self.scheduler.admit()
        self.plain = Plain()
        self.batch = self.fed()
        self.scheduler.begin_step()

    @property
    def tree(self) -> Tree:
        return self.sequence.tree

    def fed(self) -> Batch:
        batch = self.scheduler.next_batch(self.scheduler.plan_batch(0.0))
        assert isinstance(batch, Batch)
        return batch

    def draft(self) -> None:
        if work := self.scheduler.next_expansion(0.0):
            (asked,) = work.requests
            found, said = answer(asked, asked.nodes, self.rng)
            self.plain.expand(said)
            self.scheduler.add_proposals(work, [found], 1.0)

    def feed(self) -> None:
        """Of all that is not fed, what is likeliest is."""
        here = texts_of(self.tree)
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
        self.scheduler.begin_step()

    def ask(self) -> None:
        if self.mid.requests:
            return
        self.scheduler.refine()
        for asked in self.mid.requests:
            texts = {text_of(asked.tree, node) for node in asked.nodes.tolist()}
            assert not texts & self.plain.scored, "a node is asked about twice"
            self.plain.scored |= texts
            assert {text[:-1] for text in texts} <= self.plain.scored | {()}

    def hear(self) -> None:
        """The pass ends: all, some or none of its nodes are answered."""
        if not self.mid.requests:
            return
        (asked,) = self.mid.requests
        count = int(self.rng.integers(0, len(asked.nodes) + 2))
        ids = asked.tree.id
        now = {
            node: text for text, i in texts_of(self.tree).items() for node in [int(self.tree.id[i])]
        }
        if count > len(asked.nodes):
            found, said, nodes = None, {}, asked.nodes[:0]
        else:
            nodes = asked.tree.most_probable(asked.nodes, count)
            found, then = answer(asked, nodes, self.rng)
            said = {
                now[int(ids[node])]: row
                for node, row in zip(nodes.tolist(), then.values(), strict=True)
                if int(ids[node]) in now
            }
        unsaid = set(ids[asked.nodes].tolist()) - set(ids[nodes].tolist())
        self.plain.scored -= {now[node] for node in unsaid if node in now}
        before = self.scheduler.totals.scored
        self.mid.answer(found)
        self.scheduler.take_scores()
        count = self.scheduler.totals.scored - before
        assert count in (0, len(said)), "a part of an answer was taken"
        if count:  # else the mid-size model has been wrong too often to be believed
            self.plain.expand(said)

    def decide(self) -> None:
        children = self.tree.token[1:][self.tree.parent[1:] == ROOT].tolist()
        token = int(self.rng.choice([*children, int(self.rng.integers(VOCABULARY))]))
        base = len(self.sequence.context.tokens)
        self.plain.advance(token)
        self.scheduler.apply(Verdict(self.sequence.number, base, (token,)), now=0)

    def check(self) -> None:
        check_tree(self.tree)
        here = texts_of(self.tree)
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
def test_late_scores_are_added_to_a_tree_that_has_changed(seed, capacity, count):
    story = Story(seed, capacity)
    for deed in story.rng.choice(["draft", "draft", "feed", "ask", "hear", "decide"], count):
        getattr(story, deed)()
        story.check()
        held = np.count_nonzero(story.tree.expanded | story.tree.fed)
        assert held <= capacity, "what stays whatever comes is more than the tree may hold"


def requested(scheduler: Scheduler, mid: Mid, sequence: Sequence) -> ProposalRequest:
    scheduler.refine()
    (asked,) = mid.requests
    assert asked.context is sequence.context
    return asked


def test_scores_of_a_cancelled_request_are_dropped():
    story = Story(0)
    story.draft()
    asked = requested(story.scheduler, story.mid, story.sequence)
    found, _ = answer(asked, asked.nodes, story.rng)
    story.scheduler.admission.cancel(0)
    before = len(story.tree)
    story.mid.answer(found)
    story.scheduler.take_scores()
    assert len(story.tree) == before
    assert story.scheduler.totals.scored == 0


def test_scores_are_used_while_the_mid_size_model_predicts_better():
    """The text is always token 1: the small draft gives it an even chance, the mid-size model
    little, later much."""
    policy = BestFirst(width=4, children=2, row_cost=0.0)
    mid = Mid()
    scheduler = scheduler_with(mid, policy, 1, 200)
    scheduler.admission.add(Request(0, (1,), max_new_tokens=190), lambda token: False, now=0)
    (sequence,) = scheduler.admit()

    def taken(chance: float) -> bool:
        """One token later: whether what the mid-size model said of the root is in the tree."""
        scheduler.begin_step()
        tree, root = sequence.tree, np.array([ROOT])
        even = Proposal(root, np.array([[0, 1]]), np.log([[0.5, 0.5]]))
        tree.add_children(even.parents, even.tokens, even.logps)
        asked = requested(scheduler, mid, sequence)
        assert asked.nodes[0] == ROOT
        found = Proposal(root, np.array([[0, 1]]), np.log([[1 - chance, chance]]))
        before = scheduler.totals.scored
        mid.answer(found)
        scheduler.take_scores()
        scheduler.next_batch(scheduler.plan_batch(0.0))
        base = len(sequence.context.tokens)
        scheduler.apply(Verdict(sequence.number, base, (1,)), now=0)
        return scheduler.totals.scored > before

    wrong = [taken(0.1) for _ in range(20)]
    assert wrong[0] and not wrong[-1]
    right = [taken(0.9) for _ in range(80)]
    assert not right[0] and right[-1]


def test_level_policy_requests_no_scores():
    """Its nodes are fed level by level: children of what was fed would come too late."""
    mid = Mid()
    scheduler = scheduler_with(mid, Level(4, 4), 1, 60)
    scheduler.admission.add(Request(0, (1,), max_new_tokens=50), lambda token: False, now=0)
    list(scheduler.admit())
    scheduler.refine()
    assert not mid.requests
