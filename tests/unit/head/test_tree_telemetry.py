"""Snapshots of the head's steps for clients that watch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipespec.core import Request
from pipespec.head.policies.best_first import BestFirst
from pipespec.head.scheduler_types import Totals
from pipespec.head.tree import ROOT, Tree
from pipespec.head.tree_telemetry import MAX_NODES, STEP, StepSnapshot, TreeSnapshot, TreeTelemetry
from tests.unit.head.test_head_loop import TEXT, head


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Grown in random rounds, some of it fed, pruned now and then."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    tree = Tree(5, 4, 7, 9, fed=draw(st.booleans()))
    for _ in range(draw(st.integers(0, 6))):
        open_nodes = np.flatnonzero(~tree.expanded)
        if len(open_nodes):
            chosen = np.sort(rng.permutation(open_nodes)[:20])
            tokens = np.tile(np.arange(8), (len(chosen), 1))
            tree.add_children(chosen, tokens, np.log(rng.dirichlet(np.ones(8), len(chosen))))
        unfed = np.flatnonzero(~tree.fed & tree.fed[tree.parent])
        if tree.fed[ROOT] and len(unfed):
            tree.mark_fed(tree.most_probable(unfed, 10))
        if draw(st.booleans()):
            tree.advance([draw(st.integers(0, 9))])
    return tree


@given(trees(), st.lists(st.integers(0, 2**31 - 1), max_size=5))
def test_tree_snapshot_has_the_fed_nodes_and_their_ancestors(
    tree: Tree, accepted: list[int]
) -> None:
    shown = TreeSnapshot.unpack(TreeSnapshot.of(tree, 30, tuple(accepted)).pack())
    assert (shown.length, shown.size, shown.accepted) == (30, len(tree), tuple(accepted))
    assert len(shown.id) == min(len(tree), MAX_NODES)
    where = {node: place for place, node in enumerate(tree.id.tolist())}
    at = [where[node] for node in shown.id.tolist()]
    assert at == sorted(at) and at[0] == ROOT
    assert shown.token.tolist() == tree.token[at].tolist()
    assert shown.fed.tolist() == tree.fed[at].tolist()
    assert shown.logp.tolist() == pytest.approx(tree.logp[at].tolist())
    assert shown.id[shown.parent].tolist() == tree.id[tree.parent[at]].tolist()
    fed = set(tree.id[tree.fed].tolist())
    assert len(fed & set(shown.id.tolist())) == min(len(fed), MAX_NODES - (not tree.fed[ROOT]))


def test_telemetry_is_disabled_without_watchers() -> None:
    watching = TreeTelemetry()
    assert not watching.enabled
    watching.update_watchers(set(), Totals())
    assert watching.enabled
    assert watching.snapshot(3, Totals(), {}).keys() == {STEP}
    watching.update_watchers(None, Totals())
    assert not watching.enabled


def test_watched_request_gets_every_step_and_every_accepted_token_once() -> None:
    requests = [Request(3, tuple(TEXT[:10]), 40), Request(4, tuple(TEXT[:5]), 30)]
    loop, link, controller = head(
        BestFirst(16, 4), requests, {3: TEXT, 4: TEXT}, chunk=4, at_once=2
    )
    controller.watched_requests = lambda requests: {3}
    loop.run_until_done()
    steps = [StepSnapshot.unpack(entry[STEP]) for entry in controller.shown]
    assert [step.step for step in steps] == list(range(len(steps)))
    sent = {batch.step: len(batch) for batch in link.sent}
    assert [step.decided + step.draft + step.prompt for step in steps] == [
        sent[step.step] for step in steps
    ]
    assert {key for entry in controller.shown for key in entry} == {STEP, "3"}
    shown = [TreeSnapshot.unpack(entry["3"]) for entry in controller.shown if "3" in entry]
    told = [token for tree in shown for token in tree.accepted]
    assert told == TEXT[10 : 10 + len(told)]
    assert len(told) == shown[-1].length - 10 > 20
    assert all(tree.token[0] == TEXT[tree.length - 1] for tree in shown)
