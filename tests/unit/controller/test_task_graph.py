"""The graph of a step: what waits for what, for every shape of pipeline."""

from __future__ import annotations

from graphlib import TopologicalSorter

from hypothesis import given
from hypothesis import strategies as st

from pipespec.controller.task_graph import (
    Layout,
    Task,
    TaskKind,
    compute,
    join,
    prune,
    step_graph,
    transfer,
)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    groups = draw(st.sampled_from([None, tuple(sizes)]))
    return Layout(sum(sizes), groups, draw(st.sampled_from(["lockstep", "free"])))


def predecessors(layout: Layout, steps: int) -> dict[Task, set[Task]]:
    """All edges of the first `steps` steps, by target."""
    before: dict[Task, set[Task]] = {}
    for step in range(steps):
        graph = step_graph(layout, step)
        before |= {task: set() for task in graph.tasks}
        for source, target in graph.edges:
            before[target].add(source)
    return before


def ancestors(before: dict[Task, set[Task]]) -> dict[Task, set[Task]]:
    """Everything that must be complete before a task, by task."""
    above: dict[Task, set[Task]] = {}
    for task in TopologicalSorter(before).static_order():
        above[task] = before[task].union(*(above[source] for source in before[task]))
    return above


def test_the_edges_of_two_stages_in_lockstep() -> None:
    graph = step_graph(Layout(2), 7)
    assert set(graph.edges) == {
        (transfer(0, 6), compute(0, 7)),
        (transfer(0, 6), compute(1, 7)),
        (transfer(1, 6), compute(1, 7)),
        (transfer(1, 6), compute(2, 7)),
        (prune(2, 6), compute(2, 7)),
        (compute(0, 7), prune(0, 7)),
        (compute(1, 7), prune(1, 7)),
        (compute(2, 7), prune(0, 7)),
        (compute(2, 7), prune(1, 7)),
        (compute(2, 7), prune(2, 7)),
        (prune(0, 7), transfer(0, 7)),
        (prune(1, 7), transfer(1, 7)),
        (transfer(0, 7), join(7)),
        (transfer(1, 7), join(7)),
        (prune(2, 7), join(7)),
    }
    assert graph.announced == {prune(0, 7), prune(1, 7)}


def test_stages_of_one_group_compute_in_the_same_step() -> None:
    edges = set(step_graph(Layout(3, groups=(2, 1)), 5).edges)
    assert (transfer(1, 5), compute(2, 5)) in edges
    assert (compute(1, 5), transfer(1, 5)) in edges
    assert (transfer(2, 4), compute(3, 5)) in edges
    assert (prune(2, 5), transfer(2, 5)) in edges


@given(layouts(), st.integers(1, 4))
def test_no_task_waits_for_itself(layout: Layout, steps: int) -> None:
    before = ancestors(predecessors(layout, steps))  # static_order raises CycleError
    assert before
    assert all(task not in its for task, its in before.items())


@given(layouts(), st.integers(0, 50))
def test_edges_lead_into_the_step_from_itself_or_the_one_before(layout: Layout, step: int) -> None:
    graph = step_graph(layout, step)
    earlier = set(step_graph(layout, step - 1).tasks) if step else set()
    assert len(set(graph.edges)) == len(graph.edges)
    assert len(set(graph.tasks)) == len(graph.tasks)
    for source, target in graph.edges:
        assert target in graph.tasks
        assert source in graph.tasks or source in earlier


@given(layouts())
def test_every_step_has_the_edges_of_the_first_shifted(layout: Layout) -> None:
    def shifted(step: int) -> set[tuple[Task, Task]]:
        return {
            (a._replace(step=a.step - step), b._replace(step=b.step - step))
            for a, b in step_graph(layout, step).edges
        }

    assert shifted(1) == shifted(23)
    assert shifted(0) == {(a, b) for a, b in shifted(1) if a.step == 0}


@given(layouts())
def test_a_verdict_reaches_every_rank_once_and_in_order(layout: Layout) -> None:
    above = ancestors(predecessors(layout, 3))
    for rank in layout.ranks:
        for step in range(3):
            assert compute(layout.last, step) in above[prune(rank, step)]
            if step:
                assert prune(rank, step - 1) in above[prune(rank, step)]
    graph = step_graph(layout, 3)
    announced = {prune(rank, 3) for rank in layout.ranks if rank != layout.last}
    assert {task for task in graph.announced if task.kind is TaskKind.PRUNE} == announced
    # What an announcement waits for is the verdict and nothing else.
    told = [edge for edge in graph.controller_edges if edge[1].kind is TaskKind.PRUNE]
    assert sorted(told) == sorted((compute(layout.last, 3), task) for task in announced)


@given(layouts())
def test_free_running_rank_learns_when_the_next_one_took_the_previous_batch(
    layout: Layout,
) -> None:
    graph = step_graph(layout, 3)
    told = [edge for edge in graph.controller_edges if edge[1].kind is TaskKind.TRANSFER]
    links = [
        rank for rank in range(layout.last) if layout.sync == "free" and not layout.same_group(rank)
    ]
    assert sorted(told) == sorted((compute(rank + 1, 2), transfer(rank, 3)) for rank in links)
    assert {transfer(rank, 3) for rank in links} <= graph.announced


@given(layouts())
def test_a_rank_runs_its_tasks_in_program_order(layout: Layout) -> None:
    above = ancestors(predecessors(layout, 3))
    for rank in layout.ranks:
        sends = rank != layout.last
        for step in range(3):
            assert compute(rank, step) in above[prune(rank, step)]
            if sends:
                assert compute(rank, step) in above[transfer(rank, step)]
            if step:
                end = transfer(rank, step - 1) if sends else prune(rank, step - 1)
                assert end in above[compute(rank, step)]
                if layout.sync == "lockstep":
                    assert prune(rank, step - 1) in above[compute(rank, step)]


@given(st.integers(1, 12))
def test_in_lockstep_a_send_waits_for_the_verdict_and_in_free_running_it_does_not(
    num_stages: int,
) -> None:
    for sync, waits in (("lockstep", True), ("free", False)):
        layout = Layout(num_stages, sync=sync)
        above = ancestors(predecessors(layout, 1))
        for rank in range(num_stages):
            assert (compute(num_stages, 0) in above[transfer(rank, 0)]) is waits


@given(layouts())
def test_a_batch_reaches_the_last_stage_one_group_per_step(layout: Layout) -> None:
    steps = layout.num_stages + 2
    above = ancestors(predecessors(layout, steps))
    for rank in range(layout.num_stages):
        arrival = layout.group_of[rank + 1] - layout.group_of[rank]
        assert transfer(rank, 0) in above[compute(rank + 1, arrival)]


@given(layouts())
def test_the_join_follows_every_task_of_its_step(layout: Layout) -> None:
    above = ancestors(predecessors(layout, 2))
    tasks = set(step_graph(layout, 1).tasks) - {join(1)}
    assert tasks <= above[join(1)]


@given(st.sampled_from(list(TaskKind)), st.integers(0, 99), st.integers(0, 10**9))
def test_a_task_is_known_by_its_id(kind: TaskKind, rank: int, step: int) -> None:
    task = Task(kind, rank, step)
    assert Task.parse(task.id) == task
