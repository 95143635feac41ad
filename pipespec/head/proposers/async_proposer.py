"""A proposer that works in a thread of its own, while the head continues."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipespec.core import Verdict
from pipespec.head.proposer import Context, Proposal, ProposalRequest, Proposer
from pipespec.system.device_copy import make_current
from pipespec.timing.clock import REAL_TIME, StepClock, monotonic_ns

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class AsyncResult:
    """The result of a pass, one proposal per request. `paced`: whether it kept to the least time of
    a pass (`StepClock`)."""

    proposals: list[Proposal | None]
    paced: bool


@dataclass(slots=True)
class _Text:
    """A text of the head, the thread's copy, and how many tokens that has or will have."""

    context: Context
    copy: Context
    num_sent: int


class AsyncProposer:
    """Runs one pass of a proposer at a time in a thread.

    The thread starts and ends sequences, accepts verdicts and runs passes in the order of the
    calls, and has its own copy of each text. So before `submit`, every decided token must have been
    passed to `accept_verdict`, and the caller must not change the trees that it submits. An error
    in the thread is raised by the next `poll`.
    """

    def __init__(
        self,
        proposer: Proposer,
        clock: StepClock = REAL_TIME,
        device: str | torch.device = "cpu",
    ):
        """`clock`: the least time of a pass; `device`: of the proposer's model."""
        self._proposer = proposer
        self.parts = (proposer,)
        self._clock = clock
        self._thread = ThreadPoolExecutor(
            1, "mid-size model", initializer=make_current, initargs=(device,)
        )
        self._doing: deque[Future[Any]] = deque()
        self._pass: Future[AsyncResult] | None = None
        self._texts: dict[int, _Text] = {}

    def start_sequence(self, context: Context) -> None:
        """See `Proposer`, as of the next two methods."""
        number = context.sequence
        text = replace(context, tokens=[*context.tokens], nodes=[*context.nodes])
        self._texts[number] = _Text(context, text, len(text.tokens))
        self._do(self._proposer.start_sequence, text)

    def accept_verdict(self, verdict: Verdict) -> None:
        text = self._texts[verdict.sequence]
        first, text.num_sent = text.num_sent, len(text.context.tokens)
        tokens, nodes = text.context.tokens[first:], text.context.nodes[first:]
        self._do(self._accept, text.copy, tokens, nodes, verdict)

    def end_sequence(self, sequence: int) -> None:
        del self._texts[sequence]
        self._do(self._proposer.end_sequence, sequence)

    def submit(self, requests: Sequence[ProposalRequest], children: int) -> None:
        """Begin a pass, after the answer to the last one."""
        assert self._pass is None, "a pass is under way"
        copied = []
        for each in requests:
            text = self._texts[each.context.sequence]
            sent = text.num_sent
            assert sent == len(each.context.tokens), "a verdict was not accepted before the pass"
            copied.append(replace(each, context=text.copy))
        self._pass = self._do(self._propose, copied, children)

    def poll(self) -> AsyncResult | None:
        """The result of the pass, once; None: it is not done, or there is none."""
        ended = self._pass if self._pass is not None and self._pass.done() else None
        # Looked at second: if the pass has ended, so has all before it.
        while self._doing and self._doing[0].done():
            self._doing.popleft().result()
        if ended is None:
            return None
        self._pass = None
        return ended.result()

    def close(self) -> None:
        """Wait for the call that is running, and cancel the others."""
        self._thread.shutdown(cancel_futures=True)

    def _do(self, what: Callable[..., Any], *arguments: object) -> Future[Any]:
        self._doing.append(self._thread.submit(what, *arguments))
        return self._doing[-1]

    def _accept(
        self, text: Context, tokens: Sequence[int], nodes: Sequence[int], verdict: Verdict
    ) -> None:
        text.tokens += tokens
        text.nodes += nodes
        self._proposer.accept_verdict(verdict)

    def _propose(self, requests: Sequence[ProposalRequest], children: int) -> AsyncResult:
        start = monotonic_ns()
        proposals = self._proposer.propose(requests, children)
        return AsyncResult(proposals, self._clock.wait_for_mid_pass(start))
