"""The task graph of one step: a batch goes from the head through all stages, and its verdict to
every rank.

    rank 0   compute ── transfer ──┐                             ┌──> prune
    rank 1              ┌──────────┴─> compute ── transfer ──┐   ├──> prune
    rank 2                             ┌─────────────────────┴─> compute ──> prune

The compute of the last rank is followed by every prune: that edge carries the verdict. No rank
waits for a verdict before it goes on: links hold as many batches as are sent
(`pipespec.transport.distributed`), and the head decides how many these are
(`pipespec.head.in_flight`). The counterpart in PipeDec is appendix B. Everything here is pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import NamedTuple


class TaskKind(StrEnum):
    """What a task does; the value is the first part of a task's id. A batch mixes prompt chunks and
    tree nodes, so prefill and decode are one kind, COMPUTE."""

    COMPUTE = "c"
    PRUNE = "p"
    TRANSFER = "x"


class Task(NamedTuple):
    """One thing that one rank does in one step."""

    kind: TaskKind
    rank: int
    step: int

    @property
    def id(self) -> str:
        """The name of the task in Redis, such as "c:3:17"."""
        return f"{self.kind.value}:{self.rank}:{self.step}"

    @classmethod
    def parse(cls, name: str) -> Task:
        kind, rank, step = name.split(":")
        return cls(TaskKind(kind), int(rank), int(step))


Edge = tuple[Task, Task]
compute = partial(Task, TaskKind.COMPUTE)
prune = partial(Task, TaskKind.PRUNE)
transfer = partial(Task, TaskKind.TRANSFER)


@dataclass(frozen=True)
class Graph:
    """The tasks of one step, and the edges on which the controller acts: those that lead into a
    task from one of another rank. It notifies the owner of such a task when it is ready. The other
    edges are left out, as a rank runs its own tasks in order and gets batches over its link. That
    also keeps Redis off the critical path: an early verdict waits at the rank, not in Redis until
    the rank has computed."""

    step: int
    tasks: tuple[Task, ...]
    edges: tuple[Edge, ...]


def step_graph(num_stages: int, step: int) -> Graph:
    """The graph of step `step` (from 0) of a head and so many stages."""
    ranks, last = range(num_stages + 1), num_stages
    tasks = [kind(rank, step) for rank in ranks for kind in (compute, prune)]
    tasks += [transfer(rank, step) for rank in ranks[:-1]]
    edges = [(compute(last, step), prune(rank, step)) for rank in ranks[:-1]]  # the verdict
    return Graph(step, tuple(tasks), tuple(edges))
