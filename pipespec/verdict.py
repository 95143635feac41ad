"""How a verdict travels: through the controller, as the payload of the last compute task."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipespec.control.client import Controller
from pipespec.graph import Task
from pipespec.trace import Timeline
from pipespec.types import Verdict


def pack(verdicts: Sequence[Verdict], drawn_ns: int) -> bytes:
    """Little-endian int64: when it was drawn; then request, base, count, tokens, one by one."""
    flat: list[int] = [drawn_ns]
    for verdict in verdicts:
        flat += (verdict.request, verdict.base, len(verdict.tokens), *verdict.tokens)
    return np.array(flat, "<i8").tobytes()


def unpack(payload: bytes) -> tuple[list[Verdict], int]:
    """The inverse of `pack`."""
    drawn_ns, *flat = np.frombuffer(payload, "<i8").tolist()
    verdicts: list[Verdict] = []
    at = 0
    while at < len(flat):
        request, base, count = flat[at : at + 3]
        at += 3 + count
        verdicts.append(Verdict(request, base, tuple(flat[at - count : at])))
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
