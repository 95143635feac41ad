"""A proposer in a thread of its own: the head never waits for it, and it has its own texts."""

from collections.abc import Iterator, Sequence
from threading import Event, current_thread

import pytest

from pipespec.core import Verdict
from pipespec.extras.emulation.machine import EmulatedMachine
from pipespec.head.proposer import Context, Proposal, ProposalRequest
from pipespec.head.proposers.async_proposer import AsyncProposer, AsyncResult
from pipespec.head.tree import ROOT
from tests.helpers.drafted import Drafted


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


def answered(beside: AsyncProposer) -> AsyncResult:
    while (found := beside.poll()) is None:
        pass
    return found


def test_head_continues_while_a_pass_runs_in_the_thread(slow: Slow, beside: AsyncProposer):
    drafted = Drafted.start(beside, [7, 8], 3)
    beside.submit([drafted.asked()], 5)
    assert beside.poll() is None
    drafted.decide(9)
    drafted.context.tokens.append(10)  # decided, but not accepted yet
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
    drafted = Drafted.start(beside, [1])
    drafted.decide()
    beside.submit([drafted.asked()], 1)
    slow.may.set()
    with pytest.raises(ValueError, match="it decided nothing"):
        answered(beside)


def test_pass_before_all_decided_tokens_were_sent_is_an_error(beside: AsyncProposer):
    drafted = Drafted.start(beside, [1])
    drafted.context.tokens.append(2)
    with pytest.raises(AssertionError, match="was not accepted"):
        beside.submit([drafted.asked()], 1)


def test_pass_longer_than_its_emulated_time_is_marked_unpaced(slow: Slow):
    slow.may.set()
    beside = AsyncProposer(slow, EmulatedMachine(mid_ms=1e-6))
    beside.submit([Drafted.start(beside, [1]).asked()], 1)
    assert not answered(beside).paced
    beside.close()
