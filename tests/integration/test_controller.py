"""The task graph in a real Redis: what is announced to whom, and when."""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipespec.controller import epoch_control
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.controller.lua_scripts import ERRORS, evalsha, load_scripts
from pipespec.controller.rank_controller import MAX_OPEN_STEPS, Controller
from pipespec.controller.redis_connection import RedisConnection
from pipespec.controller.redis_keys import RedisKeys
from pipespec.controller.task_graph import Graph, Task, compute, prune, step_graph, transfer
from pipespec.core import DraftTokens
from pipespec.errors import ControllerError, GraphError, StaleEpoch
from pipespec.system.folders import resource_dir
from tests.helpers.waiting import until

numbers = count()


class Cluster:
    """The clients of all ranks of one epoch."""

    def __init__(self, server: EmbeddedRedis, namespace: str, num_stages: int):
        self.url = server.url
        self.namespace = namespace
        self.num_stages = num_stages
        self.epoch = epoch_control.begin_epoch(self.url, namespace)
        self.ranks = [
            Controller(
                self.url,
                namespace=namespace,
                epoch=self.epoch,
                rank=rank,
                computing={"attention": "sdpa"},
            )
            for rank in range(num_stages + 1)
        ]

    def run_step(self, step: int, verdict: bytes) -> list[bytes]:
        """A step of every rank; what each waiting rank was told."""
        last = self.num_stages
        self.ranks[0].submit(step_graph(self.num_stages, step))
        self.ranks[last].complete([compute(last, step)], verdict)
        told = []
        for rank in range(last):
            told.append(self.ranks[rank].wait(prune(rank, step), timeout=5))
            mine = [compute(rank, step), prune(rank, step), transfer(rank, step)]
            self.ranks[rank].complete(mine)
        self.ranks[last].complete([prune(last, step)])
        return told

    def settle(self) -> None:
        """Waits until Redis has done what was sent so far; raises what it refused."""
        for controller in self.ranks:
            controller.watched_requests([])  # its reply follows those of all earlier commands

    def close(self) -> None:
        for controller in self.ranks:
            controller.close()


@pytest.fixture
def cluster(server: EmbeddedRedis, namespace: str) -> Iterator[Cluster]:
    cluster = Cluster(server, namespace, num_stages=3)
    yield cluster
    cluster.close()


def refused(cluster: Cluster, send: Callable[[], None]) -> ControllerError:
    """What Redis refused of something that is sent without waiting."""
    try:
        send()
        cluster.settle()
    except ControllerError as error:
        return error
    raise AssertionError("nothing was refused")


def test_a_verdict_reaches_every_rank_in_every_step(cluster):
    for step in range(20):
        verdict = b"verdict \x00\r\n %d" % step
        assert cluster.run_step(step, verdict) == [verdict] * 3


def test_a_rank_leaves_once_redis_has_done_what_it_said_last(cluster):
    cluster.ranks[0].submit(step_graph(cluster.num_stages, 0))
    cluster.settle()
    with cluster.ranks[3] as last:
        last.complete([compute(3, 0)], b"verdict")
    assert cluster.ranks[1].wait(prune(1, 0), 0) == b"verdict", "it was told before the rank left"
    with pytest.raises(GraphError), cluster.ranks[2] as mistaken:
        mistaken.complete([Task.parse("c:9:0")])


def test_a_wait_for_a_verdict_ends_when_a_request_arrives(cluster):
    head = cluster.ranks[0]
    head.submit(step_graph(cluster.num_stages, 0))
    assert head.next_requests(1, wait=False) == []
    cluster.ranks[1].enqueue(prompt=(1, 2), max_new_tokens=1)
    assert head.wait(prune(0, 0), or_request=True) is None
    assert len(head.next_requests(1, wait=False) or ()) == 1
    cluster.ranks[3].complete([compute(3, 0)], b"v")
    assert head.wait(prune(0, 0), or_request=True) == b"v"


def test_announcements_can_be_awaited_in_any_order(cluster):
    for step in range(2):
        cluster.ranks[0].submit(step_graph(cluster.num_stages, step))
        cluster.ranks[3].complete([compute(3, step), prune(3, step)], b"%d" % step)
    assert cluster.ranks[0].wait(prune(0, 1), timeout=5) == b"1"
    assert cluster.ranks[0].wait(prune(0, 0), 0) == b"0"


@pytest.mark.parametrize(
    ("tasks", "named"),
    [
        ([compute(1, 0)], "c:1:0 is complete already"),
        ([compute(2, 0), compute(2, 0)], "c:2:0 is complete already"),
        ([transfer(3, 0)], "x:3:0 is not one of step 0"),
        ([compute(1, MAX_OPEN_STEPS)], "far ahead of the last submitted step 0"),
    ],
)
def test_a_completion_that_cannot_be_is_refused_at_the_next_call(cluster, tasks, named):
    cluster.ranks[0].submit(step_graph(cluster.num_stages, 0))
    cluster.settle()
    cluster.ranks[1].complete([compute(1, 0)])
    cluster.settle()
    error = refused(cluster, lambda: cluster.ranks[2].complete(tasks))
    assert isinstance(error, GraphError)
    assert named in str(error)


def test_a_rank_that_waits_in_vain_learns_that_it_was_refused(cluster):
    cluster.ranks[0].submit(step_graph(cluster.num_stages, 0))
    cluster.settle()
    with pytest.raises(GraphError, match="x:3:0"):  # noqa: PT012 - either may say it
        cluster.ranks[2].complete([transfer(3, 0)])
        cluster.ranks[2].wait(prune(2, 0), timeout=5)


def test_a_refusal_is_found_while_a_rank_waits_for_another(cluster, pipe):
    """Else nobody would learn that a verdict was lost: all ranks wait for its step."""
    rank = cluster.ranks[-1]
    rank.look()
    pipe.call("SCRIPT", "FLUSH", "SYNC")
    with pytest.raises(ControllerError, match="lost the scripts"):  # noqa: PT012 - either may say it
        rank.complete([compute(cluster.num_stages, 0)], b"verdict")
        with rank.unattended():
            until(rank.look)
    rank.look()  # it is the rank's own again


A, B, C = compute(0, 0), compute(1, 0), prune(1, 0)


@pytest.mark.parametrize(
    ("graph", "named"),
    [
        (Graph(0, (A, A), ()), "c:0:0 cannot be submitted"),
        (Graph(0, (compute(0, 1),), ()), "c:0:1 cannot be submitted"),
        (Graph(0, (A, C), ((B, C),)), "from c:1:0, which is unknown"),
        (Graph(0, (A,), ((A, C),)), "to p:1:0, which is not in step 0"),
        (Graph(0, (C,), ((compute(0, 3), C),)), "from c:0:3, which is unknown"),
    ],
)
def test_a_graph_that_cannot_be_is_refused_whole(cluster, graph, named):
    error = refused(cluster, lambda: cluster.ranks[0].submit(graph))
    assert isinstance(error, GraphError)
    assert named in str(error)
    assert cluster.run_step(0, b"v") == [b"v"] * 3  # as if nothing had been submitted


def test_steps_follow_one_another_and_the_oldest_is_not_left_behind(cluster):
    cluster.run_step(5, b"")
    cluster.settle()
    for send, said in (
        (lambda: cluster.ranks[1].complete([compute(1, 5)]), "c:1:5 is complete already"),
        (
            lambda: cluster.ranks[0].submit(step_graph(cluster.num_stages, 7)),
            "step 7 was submitted after step 5",
        ),
    ):
        assert isinstance(error := refused(cluster, send), GraphError)
        assert said in str(error)
    for step in range(6, 6 + MAX_OPEN_STEPS):
        cluster.ranks[0].submit(step_graph(cluster.num_stages, step))
    graph = step_graph(cluster.num_stages, 6 + MAX_OPEN_STEPS)
    error = refused(cluster, lambda: cluster.ranks[0].submit(graph))
    assert isinstance(error, GraphError)
    assert "while step 6 is not complete" in str(error)


def test_rank_of_an_old_epoch_is_refused(cluster):
    cluster.ranks[0].submit(step_graph(cluster.num_stages, 0))
    assert epoch_control.begin_epoch(cluster.url, cluster.namespace) == cluster.epoch + 1
    error = refused(cluster, lambda: cluster.ranks[1].complete([compute(1, 0)]))
    assert isinstance(error, StaleEpoch)
    assert f"epoch {cluster.epoch} is over" in str(error)
    with pytest.raises(StaleEpoch):
        Controller(cluster.url, namespace=cluster.namespace, epoch=cluster.epoch, rank=1)


def test_a_rank_that_waits_learns_that_its_epoch_is_over(cluster):
    with ThreadPoolExecutor(1) as waiter:
        waiting = waiter.submit(cluster.ranks[2].wait, prune(2, 0), timeout=20)
        epoch_control.begin_epoch(cluster.url, cluster.namespace)
        with pytest.raises(StaleEpoch):
            waiting.result(20)


def test_an_old_epoch_leaves_nothing_that_stays(cluster, pipe):
    cluster.run_step(0, b"v")
    cluster.ranks[0].submit(step_graph(cluster.num_stages, 1))
    cluster.ranks[1].complete([compute(1, 7)])  # of a step that never comes
    cluster.settle()
    epoch_control.begin_epoch(cluster.url, cluster.namespace)
    left = pipe.call("KEYS", f"{RedisKeys(cluster.namespace).epochs}:*")
    assert all(pipe.call("TTL", key) > 0 for key in left)


@dataclass
class Reference:
    """What the transitions of a graph do, the slow and obvious way."""

    flags: dict[str, str] = field(default_factory=dict)  # submitted tasks
    edges: list[tuple[str, str]] = field(default_factory=list)  # not satisfied at submission
    gathered: dict[str, str] = field(default_factory=dict)
    done: dict[str, str] = field(default_factory=dict)
    announced: list[tuple[str, str]] = field(default_factory=list)
    told: set[str] = field(default_factory=set)

    def submit(self, tasks: dict[str, str], edges: list[tuple[str, str]]) -> None:
        floor = self.floor()
        self.flags |= tasks
        for source, target in edges:
            if source in self.done:
                result = self.done[source] if step_of(source) >= floor else ""
                self.gathered[target] = self.gathered.get(target, "") + result
            else:
                self.edges.append((source, target))
        for task in tasks:
            if not any(target == task for _, target in self.edges):
                self.ready(task)

    def complete(self, tasks: list[str], payload: str) -> None:
        for task in tasks:
            self.done[task] = payload
            for source, target in [edge for edge in self.edges if edge[0] == task]:
                self.edges.remove((source, target))
                self.gathered[target] = self.gathered.get(target, "") + payload
                if not any(other == target for _, other in self.edges):
                    self.ready(target)

    def ready(self, task: str) -> None:
        if self.flags[task] == "a" and task not in self.done and task not in self.told:
            self.told.add(task)
            self.announced.append((task, self.gathered.get(task, "")))

    def floor(self) -> int:
        """The oldest step with a task that is not complete."""
        steps = sorted({step_of(task) for task in self.flags})
        open_steps = {step_of(task) for task in self.flags if task not in self.done}
        return min(open_steps, default=steps[-1] + 1 if steps else 0)


def step_of(task: str) -> int:
    return int(task.split(":")[2])


@st.composite
def histories(draw: st.DrawFn) -> list[tuple]:
    """Steps with random tasks and edges, and an order in which all of it happens."""
    steps: list[dict[str, str]] = []
    for step in range(draw(st.integers(1, 4))):
        ranks = draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
        steps.append(
            {
                f"{chr(97 + i)}:{rank}:{step}": draw(st.sampled_from("taa"))
                for i, rank in enumerate(ranks)
            }
        )
    order = [task for tasks in steps for task in tasks]
    edges: list[list[tuple[str, str]]] = []
    for tasks in steps:
        pairs = [(a, b) for b in tasks for a in order[: order.index(b)]]
        edges.append(draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else [])
    runnable = draw(st.permutations(order))
    submissions = list(range(len(steps)))
    history: list[tuple] = []
    while submissions or runnable:
        if submissions and (not runnable or draw(st.booleans())):
            step = submissions.pop(0)
            history.append(("submit", step, steps[step], edges[step]))
        else:
            size = draw(st.integers(1, 3))
            payload = draw(st.sampled_from(["", "A", "bc", "D"]))
            history.append(("complete", runnable[:size], payload))
            runnable = runnable[size:]
    return history


@settings(max_examples=100, deadline=None)
@given(histories())
def test_any_graph_completed_in_any_order_announces_what_the_reference_does(server, history):
    namespace = f"history-{next(numbers)}"
    keys = RedisKeys(namespace)
    epoch = epoch_control.begin_epoch(server.url, namespace)
    pipe = RedisConnection(server.url)
    mine = (keys.epoch, keys.graph(epoch), keys.ready(epoch))
    reference = Reference()
    for event in history:
        if event[0] == "submit":
            _, step, tasks, edges = event
            reference.submit(tasks, edges)
            flat = " ".join(f"{task} {flag}" for task, flag in tasks.items())
            pairs = " ".join(f"{source} {target}" for source, target in edges)
            pipe.call(*evalsha("submit", mine, epoch, step, 100, flat, pairs))
        else:
            _, ids, payload = event
            reference.complete(ids, payload)
            pipe.call(*evalsha("complete", mine, epoch, 100, payload, *ids))
        for rank in range(3):
            told = pipe.call("LRANGE", f"{mine[2]}:{rank}", 0, -1)
            expected = [
                f"{task} {payload}".encode()
                for task, payload in reference.announced
                if task.split(":")[1] == str(rank)
            ]
            assert told == expected
        records = {int(step) for step in pipe.call("SMEMBERS", f"{mine[1]}:steps")}
        assert all(step >= reference.floor() for step in records)
    assert pipe.call("SMEMBERS", f"{mine[1]}:steps") == []
    left = {key.decode() for key in pipe.call("KEYS", f"{keys.epochs}:*")}
    assert not {key for key in left if re.search(r":graph:\d", key)}
    pipe.close()


def test_every_transition_states_its_contract_and_asks_for_no_time():
    for path in resource_dir("lua").glob("*.lua"):
        text = path.read_text()
        assert text.startswith(f"-- {path.stem}: ")
        for part in ("-- KEYS[1]", "-- ARGV[1]", "-- Reply", "-- Errors"):
            assert part in text, f"{path.name} does not state {part}"
    refusals = set()
    for script in load_scripts().values():
        assert "'TIME'" not in script
        assert "--- @include" not in script
        refusals |= {*re.findall(r"refuse\('(\w+)'", script)}
    assert refusals == set(ERRORS), "each code has an exception"


def guesses_of(step: int) -> DraftTokens:
    rows = np.arange(step % 3)
    return DraftTokens(step, rows, rows + 7, -rows / 2)


def test_the_last_stage_reads_what_the_head_has_published_since(cluster):
    head, last = cluster.ranks[0], cluster.ranks[-1]
    assert last.read_draft_tokens(5) == []
    for step in range(4):
        head.publish_draft_tokens(5, guesses_of(step))
    cluster.settle()
    for step, found in enumerate(last.read_draft_tokens(5)):
        for name, values in asdict(guesses_of(step)).items():
            assert np.array_equal(getattr(found, name), values), name
    assert step == 3
    assert last.read_draft_tokens(5) == []
    head.publish_draft_tokens(5, guesses_of(4))
    head.publish_draft_tokens(6, guesses_of(0))
    cluster.settle()
    assert [found.step for found in last.read_draft_tokens(5)] == [4]
    assert len(last.read_draft_tokens(6)) == 1, "those of another sequence"
