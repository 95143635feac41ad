from hypothesis import given
from hypothesis import strategies as st

from pipespec.controller.task_graph import Task, TaskKind, compute, prune, step_graph, transfer


@given(st.integers(1, 24), st.integers(0, 50))
def test_the_verdict_alone_leads_to_another_rank(num_stages: int, step: int) -> None:
    graph = step_graph(num_stages, step)
    every = [kind(rank, step) for kind in (compute, prune) for rank in range(num_stages + 1)]
    assert sorted(graph.tasks) == sorted(every + [transfer(i, step) for i in range(num_stages)])
    verdict = [(compute(num_stages, step), prune(rank, step)) for rank in range(num_stages)]
    assert sorted(graph.edges) == verdict


@given(st.sampled_from(list(TaskKind)), st.integers(0, 99), st.integers(0, 10**9))
def test_a_task_is_known_by_its_id(kind: TaskKind, rank: int, step: int) -> None:
    task = Task(kind, rank, step)
    assert Task.parse(task.id) == task
