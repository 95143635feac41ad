"""How a verdict travels: through the controller, as the payload of the last compute task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipespec.control.client import Controller
from pipespec.graph import Task
from pipespec.trace import Timeline
from pipespec.types import TokenLogprobs, Verdict


def pack(verdicts: Sequence[Verdict], drawn_ns: int) -> bytes:
    """Little-endian int64: when it was drawn; then the verdicts, one by one.

    A verdict is request, base, count, the tokens, and whether log-probabilities follow. If so:
    for every token how many are the most probable ones, their ids, and as the bits of float64
    its own log-probability and theirs.
    """
    flat: list[int] = [drawn_ns]
    for verdict in verdicts:
        flat += (verdict.request, verdict.base, len(verdict.tokens), *verdict.tokens)
        flat.append(bool(verdict.logprobs))
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
        request, base, count = take(3)
        tokens = tuple(take(count))
        (reported,) = take(1)
        logprobs = []
        for _ in range(count * reported):
            (num_top,) = take(1)
            ids = take(num_top)
            own, *values = take(1 + num_top, "<f8")
            logprobs.append(TokenLogprobs(own, tuple(zip(ids, values, strict=True))))
        verdicts.append(Verdict(request, base, tokens, tuple(logprobs)))
    return verdicts, drawn_ns


def hear(
    controller: Controller, done: Sequence[Task], prune: Task, timeline: Timeline
) -> list[Verdict]:
    """Report what is done and wait for the verdict that `prune` needs.

    What counts as the controller's time is the call and, of the wait, the part after the
    verdict was drawn; before that the pipeline was at work.
    """
    with timeline("control"):
        controller.complete(done)
    start = timeline.clock()
    with timeline("wait"):
        payload = controller.wait(prune)
    verdicts, drawn_ns = unpack(payload)
    now = timeline.clock()
    timeline.totals["control"] += min(max(now - max(drawn_ns, start), 0), now - start)
    return verdicts
