"""A proposer in a thread of its own: the head never waits for it, and it has its own texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Event, current_thread

import numpy as np
import pytest

from pipespec.core import Verdict
from pipespec.extras.emulation.machine import EmulatedMachine
from pipespec.head.proposer import Context, Proposal, ProposalRequest
from pipespec.head.proposers.async_proposer import AsyncProposer, AsyncResult
from pipespec.head.tree import ROOT, Tree


class Slow:
    """A proposer whose passes wait for `may`; `calls` are those of its methods, in order."""

    def __init__(self) -> None:
        self.may = Event()
        self.calls: list[tuple[str, list[int]]] = []
        self._contexts: dict[int, Context] = {}

    def start_sequence(self, context: Context) -> None:
        self._contexts[context.sequence] = context
        self.calls.append(("begin", [*context.tokens]))

    def accept_verdict(self, verdict: Verdict) -> None:
        if not verdict.tokens:
            raise ValueError("it decided nothing")
        self.calls.append(("accept", [*self._contexts[verdict.sequence].tokens]))

    def end_sequence(self, sequence: int) -> None:
        self.calls.append(("end", [sequence]))

    def propose(self, asked: Sequence[ProposalRequest], children: int) -> list[Proposal | None]:
        assert self.may.wait(60)
        self.calls.append(("expand", [*asked[0].context.tokens]))
        nodes = asked[0].nodes
        return [Proposal.from_lists(nodes, [[(children, 0.5)]] * len(nodes))]


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def beside(slow: Slow) -> Iterator[AsyncProposer]:
    beside = AsyncProposer(slow)
    yield beside
    slow.may.set()
    beside.close()


def asked(context: Context) -> list[ProposalRequest]:
    root = len(context.tokens) - 1
    return [
        ProposalRequest(
            context, Tree(root, root - 1, context.tokens[-1], root, fed=True), np.array([0])
        )
    ]


def decide(beside: AsyncProposer, context: Context, token: int) -> None:
    """As the head does: it extends its own text first."""
    context.tokens.append(token)
    context.nodes.append(len(context.nodes))
    beside.accept_verdict(Verdict(context.sequence, len(context.tokens) - 1, (token,)))


def answered(beside: AsyncProposer) -> AsyncResult:
    while (found := beside.poll()) is None:
        pass
    return found


def test_head_continues_while_a_pass_runs_in_the_thread(slow: Slow, beside: AsyncProposer):
    context = Context(3, [7, 8], [0, 1])
    beside.start_sequence(context)
    beside.submit(asked(context), 5)
    assert beside.poll() is None
    decide(beside, context, 9)
    context.tokens.append(10)  # decided, but not accepted yet
    beside.end_sequence(3)
    slow.may.set()
    found = answered(beside)
    (candidates,) = found.proposals
    assert candidates is not None and candidates.parents.tolist() == [ROOT]
    assert candidates.tokens.tolist() == [[5]] and found.paced
    assert beside.poll() is None, "a result is returned once"
    while len(slow.calls) < 4:
        beside.poll()
    assert slow.calls == [
        ("begin", [7, 8]),
        ("expand", [7, 8]),
        ("accept", [7, 8, 9]),
        ("end", [3]),
    ]


def test_the_thread_launches_kernels_on_the_device_of_its_model(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
):
    made_current: list[tuple[str, object]] = []

    def set_device(device: object) -> None:
        made_current.append((current_thread().name, device))

    monkeypatch.setattr("torch.cuda.set_device", set_device)
    beside = AsyncProposer(slow, device="cuda:1")
    beside.start_sequence(Context(3, [7], [0]))
    beside.close()
    assert made_current == [("mid-size model_0", "cuda:1")]


def test_error_in_the_thread_is_raised_in_the_head(slow: Slow, beside: AsyncProposer):
    context = Context(0, [1], [0])
    beside.start_sequence(context)
    beside.accept_verdict(Verdict(0, 1, ()))
    beside.submit(asked(context), 1)
    slow.may.set()
    with pytest.raises(ValueError, match="it decided nothing"):
        answered(beside)


def test_pass_before_all_decided_tokens_were_sent_is_an_error(beside: AsyncProposer):
    context = Context(0, [1], [0])
    beside.start_sequence(context)
    context.tokens.append(2)
    with pytest.raises(AssertionError, match="was not accepted"):
        beside.submit(asked(context), 1)


def test_pass_longer_than_its_emulated_time_is_marked_unpaced(slow: Slow):
    slow.may.set()
    beside = AsyncProposer(slow, EmulatedMachine(mid_ms=1e-6))
    context = Context(0, [1], [0])
    beside.start_sequence(context)
    beside.submit(asked(context), 1)
    assert not answered(beside).paced
    beside.close()
