"""How a verdict travels: through the controller, as the payload of the last compute task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipespec.controller.client import Controller
from pipespec.controller.graph import Task, prune, transfer
from pipespec.core import TokenLogprobs, Verdict
from pipespec.emulation import wait_until
from pipespec.trace import Timeline

_LOGPROBS, _FAILED = 1, 2


def pack(verdicts: Sequence[Verdict], drawn_ns: int) -> bytes:
    """Little-endian int64: when it was drawn; then the verdicts, one by one.

    A verdict is sequence, base, count, the tokens, and flags: whether log-probabilities follow, and
    whether it failed. If they follow: for every token how many are the most probable ones, their
    ids, and as the bits of float64 its own log-probability and theirs.
    """
    flat: list[int] = [drawn_ns]
    for verdict in verdicts:
        flat += (verdict.sequence, verdict.base, len(verdict.tokens), *verdict.tokens)
        flat.append(_LOGPROBS * bool(verdict.logprobs) | _FAILED * verdict.failed)
        for token in verdict.logprobs:
            values = (token.logprob, *(value for _, value in token.top))
            flat += (len(token.top), *(id_ for id_, _ in token.top))
            flat += np.array(values, "<f8").view("<i8").tolist()
    return np.array(flat, "<i8").tobytes()


def unpack(payload: bytes) -> tuple[list[Verdict], int]:
    """The inverse of `pack`."""
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
        failed = bool(flags & _FAILED)
        verdicts.append(Verdict(sequence, base, tokens, tuple(logprobs), failed))
    return verdicts, drawn_ns


class VerdictReceiver:
    """What the controller tells one rank: verdicts, in the order of their steps, and free links.

    `delay_ms` is how long word takes on an emulated network.
    """

    def __init__(
        self, controller: Controller, rank: int, timeline: Timeline, delay_ms: float = 0.0
    ) -> None:
        self.controller = controller
        self.rank = rank
        self.timeline = timeline
        self.delay_ms = delay_ms
        self.heard = 0  # verdicts so far, and the step of the next
        self._payload: bytes | None = None  # of the next verdict, still on the emulated network

    def verdict(self, timeout: float | None = None) -> list[Verdict] | None:
        """The verdict of step `heard`; None: it has not come within `timeout` seconds.

        What counts as the controller's time is, of the wait, the part after the verdict was
        drawn; before that the pipeline was at work.
        """
        start = self.timeline.clock()
        with self.timeline("wait"):
            if self._payload is None:
                self._payload = self._told(prune(self.rank, self.heard), timeout)
            if self._payload is None:
                return None
            verdicts, drawn_ns = unpack(self._payload)
            left_ms = self.delay_ms - (self.timeline.clock() - drawn_ns) / 1e6
            if timeout is not None and self.delay_ms and left_ms > timeout * 1e3:
                return None
            wait_until(drawn_ns, self.delay_ms)
        now = self.timeline.clock()
        self.timeline.totals["control"] += min(max(now - max(drawn_ns, start), 0), now - start)
        self._payload = None
        self.heard += 1
        return verdicts

    def link(self, step: int) -> int:
        """Wait until the batch of `step` may be sent; when the next rank took the one before,
        on its clock."""
        with self.timeline("wait"):
            payload = self._told(transfer(self.rank, step), None)
            assert payload is not None
            taken_ns = int(np.frombuffer(payload, "<i8", 1)[0])
            wait_until(taken_ns, self.delay_ms)
        return taken_ns

    def _told(self, task: Task, timeout: float | None) -> bytes | None:
        if timeout is None:
            return self.controller.wait(task)
        return self.controller.poll(task, timeout)
