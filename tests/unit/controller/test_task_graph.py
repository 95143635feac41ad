"""The graph of a step: what waits for a task of another rank, for every shape of pipeline."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipespec.controller.task_graph import (
    Layout,
    Task,
    TaskKind,
    compute,
    prune,
    step_graph,
    transfer,
)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    groups = draw(st.sampled_from([None, tuple(sizes)]))
    return Layout(sum(sizes), groups, draw(st.sampled_from(["lockstep", "free"])))


def test_the_graph_of_two_stages() -> None:
    verdict = {(compute(2, 7), prune(0, 7)), (compute(2, 7), prune(1, 7))}
    for sync in ("lockstep", "free"):
        assert set(step_graph(Layout(2, sync=sync), 7).edges) == verdict
    assert set(step_graph(Layout(2), 7).tasks) == {
        *(kind(rank, 7) for kind in (compute, prune) for rank in range(3)),
        *(transfer(rank, 7) for rank in range(2)),
    }


@given(layouts(), st.integers(0, 50))
def test_edges_lead_into_the_step_from_another_rank_in_it_or_in_the_one_before(
    layout: Layout, step: int
) -> None:
    graph = step_graph(layout, step)
    earlier = set(step_graph(layout, step - 1).tasks) if step else set()
    assert len(set(graph.edges)) == len(graph.edges)
    assert len(set(graph.tasks)) == len(graph.tasks)
    for source, target in graph.edges:
        assert target in graph.tasks
        assert source in graph.tasks or source in earlier
        assert source.rank != target.rank


@given(layouts())
def test_a_verdict_reaches_every_rank_once(layout: Layout) -> None:
    verdicts = [edge for edge in step_graph(layout, 3).edges if edge[1].kind is TaskKind.PRUNE]
    others = range(layout.num_stages)
    assert sorted(verdicts) == [(compute(layout.last, 3), prune(rank, 3)) for rank in others]


@given(st.sampled_from(list(TaskKind)), st.integers(0, 99), st.integers(0, 10**9))
def test_a_task_is_known_by_its_id(kind: TaskKind, rank: int, step: int) -> None:
    task = Task(kind, rank, step)
    assert Task.parse(task.id) == task
