"""Verdicts travel through the controller, as the payload of the last compute task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipespec.controller.rank_controller import Controller
from pipespec.controller.task_graph import prune
from pipespec.core import GRAMMAR, NO_MEMORY, NOT_FINITE, TokenLogprobs, Verdict
from pipespec.timing.clock import wait_until
from pipespec.timing.trace import Timeline

_LOGPROBS = 1
# The flag of each reason why a verdict failed.
_FAILED = {GRAMMAR: 2, NOT_FINITE: 4, NO_MEMORY: 8}


def pack_verdicts(verdicts: Sequence[Verdict], drawn_ns: int) -> bytes:
    """Little-endian int64: when it was drawn; then the verdicts, one by one. A verdict is sequence,
    base, count, the tokens, and flags: whether log-probabilities follow, and why it failed, if it
    did. If they follow: for every token how many are the most probable ones, their ids, and as the
    bits of float64 its own log-probability and theirs."""
    flat: list[int] = [drawn_ns]
    for verdict in verdicts:
        flat += (verdict.sequence, verdict.base, len(verdict.tokens), *verdict.tokens)
        failed = 0 if verdict.failed is None else _FAILED[verdict.failed]
        flat.append(_LOGPROBS * bool(verdict.logprobs) | failed)
        for token in verdict.logprobs:
            values = (token.logprob, *(value for _, value in token.top))
            flat += (len(token.top), *(id_ for id_, _ in token.top))
            flat += np.array(values, "<f8").view("<i8").tolist()
    return np.array(flat, "<i8").tobytes()


def unpack_verdicts(payload: bytes) -> tuple[list[Verdict], int]:
    numbers = np.frombuffer(payload, "<i8")
    at = 0

    def take(count: int, kind: str = "<i8") -> list[Any]:
        nonlocal at
        at += count
        return numbers[at - count : at].view(kind).tolist()

    (drawn_ns,) = take(1)
    verdicts: list[Verdict] = []
    while at < len(numbers):
        sequence, base, count = take(3)
        tokens = tuple(take(count))
        (flags,) = take(1)
        logprobs = []
        for _ in range(count if flags & _LOGPROBS else 0):
            (num_top,) = take(1)
            ids = take(num_top)
            own, *values = take(1 + num_top, "<f8")
            logprobs.append(TokenLogprobs(own, tuple(zip(ids, values, strict=True))))
        failed = next((why for why, flag in _FAILED.items() if flags & flag), None)
        verdicts.append(Verdict(sequence, base, tokens, tuple(logprobs), failed))
    return verdicts, drawn_ns


class VerdictReceiver:
    """Receives for one rank the verdicts of all steps in order.
    `delay_ms` is how long a verdict travels at least."""

    def __init__(
        self, controller: Controller, rank: int, timeline: Timeline, delay_ms: float = 0.0
    ) -> None:
        self.controller = controller
        self.rank = rank
        self.timeline = timeline
        self.delay_ms = delay_ms
        self.num_received = 0  # verdicts so far, and the step of the next
        self._payload: bytes | None = None  # of the next verdict, still under way

    def verdict(
        self, timeout: float | None = None, *, or_request: bool = False
    ) -> list[Verdict] | None:
        """The verdict of step `num_received`; None: it has not arrived within `timeout` seconds, or
        before a request for the head did (`or_request`). Of the wait, only the part after the
        verdict was drawn counts as the controller's time: before that the pipeline was
        computing."""
        start = self.timeline.clock()
        with self.timeline("wait"):
            if self._payload is None:
                awaited = prune(self.rank, self.num_received)
                self._payload = self.controller.wait(awaited, timeout, or_request=or_request)
            if self._payload is None:
                return None
            verdicts, drawn_ns = unpack_verdicts(self._payload)
            left_ms = self.delay_ms - (self.timeline.clock() - drawn_ns) / 1e6
            if timeout is not None and self.delay_ms and left_ms > timeout * 1e3:
                return None
            wait_until(drawn_ns, self.delay_ms)
        now = self.timeline.clock()
        self.timeline.totals["control"] += min(max(now - max(drawn_ns, start), 0), now - start)
        self._payload = None
        self.num_received += 1
        return verdicts
