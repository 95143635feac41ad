"""The task graph of one step, laid out from the shape of the pipeline.

What waits for what in one step of a lockstep pipeline with two stages; the arrows that leave on
the right lead into the next step:

    rank 0   compute ── prune ── transfer ─┬─> compute(0, t+1)
                          ^                └─> compute(1, t+1)
    rank 1   compute ── prune ── transfer ─┬─> compute(1, t+1)
                          ^                └─> compute(2, t+1)
    rank 2   compute ─────┴──── prune ───────> compute(2, t+1)

The compute of the last rank is followed by every prune: that edge of the graph carries the
verdict. Running free, a transfer waits for no prune: links hold as many batches as are sent
(`pipespec.transport.distributed`), and the head decides how many these are.
The counterpart in PipeDec is appendix B. Everything here is pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, partial
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
class Layout:
    """The shape of the pipeline. `groups` are PipeDec's G_i: the number of consecutive stages that
    together form one pipeline step, in order; None makes every stage a group of its own. `sync` is
    "lockstep" (a send waits for the verdict of its step) or "free" (it does not; verdicts are
    applied in order whenever they come)."""

    num_stages: int
    groups: tuple[int, ...] | None = None
    sync: str = "lockstep"

    def __post_init__(self) -> None:
        # Settings are checked as such (`ClusterConfig`).
        sizes = (1,) * self.num_stages if self.groups is None else self.groups
        assert min(sizes, default=0) > 0 and sum(sizes) == self.num_stages, f"{self}"
        assert self.sync in ("lockstep", "free"), self.sync

    @property
    def free(self) -> bool:
        return self.sync == "free"

    @property
    def ranks(self) -> range:
        return range(self.num_stages + 1)

    @property
    def last(self) -> int:
        """The rank that draws the verdict."""
        return self.num_stages

    @property
    def num_steps(self) -> int:
        """Steps that a batch takes from the head through the last stage: the groups."""
        return len(self.groups) if self.groups is not None else self.num_stages

    @property
    def largest_group(self) -> int:
        """How many stages compute a batch within one step, at most."""
        return max(self.groups or (1,))

    @cached_property
    def group_of(self) -> tuple[int, ...]:
        """The pipeline step of every rank; the head is a group of its own."""
        sizes = (1, *(self.groups or (1,) * self.num_stages))
        return tuple(group for group, size in enumerate(sizes) for _ in range(size))

    def same_group(self, rank: int) -> bool:
        """Whether what `rank` sends is computed by the next rank in the same step."""
        return self.group_of[rank] == self.group_of[rank + 1]


@dataclass(frozen=True)
class Graph:
    """The tasks of one step, and the edges on which the controller acts: those that lead into a
    task from one of another rank, in this step or the last. It notifies the owner of such a task
    when it is ready. The other edges are left out, as a rank runs its own tasks in order and gets
    batches over its link. That also keeps Redis off the critical path: an early verdict waits at
    the rank, not in Redis until the rank has computed."""

    step: int
    tasks: tuple[Task, ...]
    edges: tuple[Edge, ...]


def step_graph(layout: Layout, step: int) -> Graph:
    """The graph of step `step` (from 0)."""
    first, last = layout.ranks[:-1], layout.last
    tasks = [kind(rank, step) for rank in layout.ranks for kind in (compute, prune)]
    tasks += [transfer(rank, step) for rank in first]
    edges = [(compute(last, step), prune(rank, step)) for rank in first]  # the verdict
    return Graph(step, tuple(tasks), tuple(edges))
