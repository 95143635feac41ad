"""The graph of a step: what waits for a task of another rank."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipespec.controller.task_graph import (
    Task,
    TaskKind,
    compute,
    prune,
    step_graph,
    transfer,
)


def test_the_graph_of_two_stages() -> None:
    graph = step_graph(2, 7)
    assert set(graph.edges) == {(compute(2, 7), prune(0, 7)), (compute(2, 7), prune(1, 7))}
    assert set(graph.tasks) == {
        *(kind(rank, 7) for kind in (compute, prune) for rank in range(3)),
        *(transfer(rank, 7) for rank in range(2)),
    }


@given(st.integers(1, 24), st.integers(0, 50))
def test_the_verdict_alone_leads_to_another_rank(num_stages: int, step: int) -> None:
    graph = step_graph(num_stages, step)
    assert len(set(graph.tasks)) == len(graph.tasks) == 3 * num_stages + 2
    verdict = [(compute(num_stages, step), prune(rank, step)) for rank in range(num_stages)]
    assert sorted(graph.edges) == verdict


@given(st.sampled_from(list(TaskKind)), st.integers(0, 99), st.integers(0, 10**9))
def test_a_task_is_known_by_its_id(kind: TaskKind, rank: int, step: int) -> None:
    task = Task(kind, rank, step)
    assert Task.parse(task.id) == task
