"""The controller's contract: what head and stages rely on, of Redis and of the tests' controllers.

Every test runs with `Controller` over a real Redis and with the scripted controllers of
tests/helpers, so that a loop that passes its unit tests meets the same behaviour in a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pipespec.controller import epoch_control
from pipespec.controller.draft_token_message import END_OF_SEQUENCE
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.controller.log_records import Accepted
from pipespec.controller.rank_controller import Controller
from pipespec.controller.task_graph import Layout, compute, prune, step_graph
from pipespec.controller.verdict_exchange import pack_verdicts, unpack_verdicts
from pipespec.core import DraftTokens, Request, Verdict
from tests.helpers.story import StoryController
from tests.helpers.toy_pipeline import Board, LastBoard

PROMPT = (7, 8, 9)
REDIS, SCRIPTED = "redis", "scripted"


@dataclass
class Case:
    """A head's controller, the ids of the three requests in its queue, and who cancels them."""

    head: Any
    requests: list[int]
    cancel: Callable[[int], None]


@pytest.fixture(params=[REDIS, SCRIPTED])
def case(request: pytest.FixtureRequest, server: EmbeddedRedis, namespace: str) -> Iterator[Case]:
    if request.param == SCRIPTED:
        asked = [Request(id=i, prompt=PROMPT, max_new_tokens=4) for i in (1, 2, 3)]
        cancels: set[int] = set()
        yield Case(StoryController(asked, cancels=cancels), [1, 2, 3], cancels.add)
        return
    epoch = epoch_control.begin_epoch(server.url, namespace)
    with Controller(server.url, namespace=namespace, epoch=epoch, rank=0) as head:
        ids = [head.enqueue(prompt=PROMPT, max_new_tokens=4) for _ in range(3)]
        head.close_queue()
        yield Case(head, ids, head.cancel)


def test_requests_come_in_order_and_no_more_than_asked_for(case: Case) -> None:
    first = case.head.next_requests(2, wait=True)
    second = case.head.next_requests(2, wait=True)
    assert first is not None
    assert second is not None
    assert [each.id for each, _ in first] == case.requests[:2]
    assert [each.id for each, _ in second] == case.requests[2:]
    assert [answer for _, answer in first + second] == [()] * 3


def test_a_queue_that_is_empty_and_closed_gives_none(case: Case) -> None:
    assert len(case.head.next_requests(9, wait=True) or ()) == 3
    assert case.head.next_requests(9, wait=True) is None
    assert case.head.next_requests(9, wait=False) is None


def test_accepted_tokens_can_be_read_back(case: Case) -> None:
    number, other, _ = case.requests
    case.head.next_requests(3, wait=True)
    case.head.accept([(number, Accepted(3, (10, 11))), (other, Accepted(3, (20,)))])
    case.head.accept([(number, Accepted(5, (12,)))])
    assert case.head.tokens(number) == (10, 11, 12)
    assert case.head.tokens(other) == (20,)


def test_tokens_that_were_accepted_before_are_skipped(case: Case) -> None:
    number = case.requests[0]
    case.head.next_requests(1, wait=True)
    case.head.accept([(number, Accepted(3, (10, 11)))])
    case.head.accept([(number, Accepted(3, (10, 11, 12)))])
    assert case.head.tokens(number) == (10, 11, 12)


def test_the_head_learns_which_requests_are_cancelled(case: Case) -> None:
    number, other, _ = case.requests
    case.head.next_requests(3, wait=True)
    assert not case.head.cancelled(number)
    case.cancel(number)
    # Cancellations are read with other notices, at the latest by the next look for requests.
    case.head.next_requests(1, wait=False)
    assert case.head.cancelled(number)
    assert not case.head.cancelled(other)


def draft_of(step: int) -> DraftTokens:
    return DraftTokens(step, np.array([0]), np.array([step + 5]), np.array([-0.5]))


def test_draft_tokens_are_read_once_in_the_order_of_steps(case: Case) -> None:
    for step in range(3):
        case.head.publish_draft_tokens(5, draft_of(step))
    found = case.head.read_draft_tokens(5, until=2)
    assert [draft.step for draft in found] == [0, 1, 2]
    assert [draft.tokens.tolist() for draft in found] == [[5], [6], [7]]
    assert case.head.read_draft_tokens(5, until=None) == []
    case.head.publish_draft_tokens(5, END_OF_SEQUENCE)
    assert [draft.step for draft in case.head.read_draft_tokens(5, until=99)] == [
        END_OF_SEQUENCE.step
    ]


def test_draft_tokens_of_one_sequence_are_not_those_of_another(case: Case) -> None:
    case.head.publish_draft_tokens(5, draft_of(0))
    case.head.publish_draft_tokens(6, draft_of(1))
    assert [draft.step for draft in case.head.read_draft_tokens(6, until=1)] == [1]
    assert [draft.step for draft in case.head.read_draft_tokens(5, until=0)] == [0]


# --- verdicts -----------------------------------------------------------------------------------


@dataclass
class Stages:
    """The controllers of two stages; `submit` lets the head begin a step."""

    first: Any
    last: Any
    submit: Callable[[int], None]


@pytest.fixture(params=[REDIS, SCRIPTED])
def stages(
    request: pytest.FixtureRequest, server: EmbeddedRedis, namespace: str
) -> Iterator[Stages]:
    if request.param == SCRIPTED:
        drawn: list[bytes] = []
        yield Stages(Board(drawn), LastBoard(drawn), lambda step: None)
        return
    layout = Layout(2)
    epoch = epoch_control.begin_epoch(server.url, namespace)
    with (
        Controller(server.url, namespace=namespace, epoch=epoch, rank=0) as head,
        Controller(server.url, namespace=namespace, epoch=epoch, rank=1) as first,
        Controller(server.url, namespace=namespace, epoch=epoch, rank=2) as last,
    ):
        yield Stages(first, last, lambda step: head.submit(step_graph(layout, step)))


def test_a_verdict_is_not_there_before_the_last_stage_has_computed(stages: Stages) -> None:
    stages.submit(0)
    assert stages.first.poll(prune(1, 0)) is None


def test_every_stage_gets_the_verdicts_in_the_order_of_steps(stages: Stages) -> None:
    sent = [[Verdict(1, base, (base + 4,))] for base in range(4)]
    for step, verdicts in enumerate(sent):
        stages.submit(step)
        stages.last.complete([compute(2, step)], pack_verdicts(verdicts, step))
    received = [unpack_verdicts(stages.first.wait(prune(1, step))) for step in range(4)]
    assert [verdicts for verdicts, _ in received] == sent
    assert all(a < b for (_, a), (_, b) in pairwise(received))


def test_a_stage_may_compute_before_or_after_the_verdict_of_its_step(stages: Stages) -> None:
    stages.submit(0)
    stages.first.complete([compute(1, 0)])
    stages.last.complete([compute(2, 0)], pack_verdicts([], 1))
    assert unpack_verdicts(stages.first.wait(prune(1, 0))) == ([], 1)
    stages.submit(1)
    stages.last.complete([compute(2, 1)], pack_verdicts([], 2))
    stages.first.complete([compute(1, 1)])
    assert unpack_verdicts(stages.first.wait(prune(1, 1))) == ([], 2)
