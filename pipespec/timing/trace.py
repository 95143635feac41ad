"""Measures the phases of a rank: totals, and a Chrome/Perfetto trace on request."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from pipespec.timing.clock import Clock, monotonic_ns

# One event of a trace: name, start and duration in nanoseconds, step, counts.
Event = tuple[str, int, int, int, dict[str, int]]
# The name of events that count the rows of a step, by kind.
ROWS = "rows"


class Timeline:
    """Phases of one rank.

    `with timeline("compute"):` adds to `totals["compute"]` (nanoseconds) and, when the
    timeline records, keeps the span for the trace.
    """

    def __init__(self, *, record: bool = False, clock: Clock = monotonic_ns):
        self.clock = clock
        self.record = record
        self.totals: Counter[str] = Counter()
        self.events: list[Event] = []
        self.step = 0

    def __call__(self, phase: str) -> _Span:
        return _Span(self, phase)

    def add_rows(self, **counts: int) -> None:
        """Keep the rows of this step, by kind, for the trace."""
        if self.record:
            self.events.append((ROWS, self.clock(), 0, self.step, counts))

    def take(self) -> tuple[Counter[str], list[Event]]:
        """Totals and events since the last call."""
        taken = self.totals, self.events
        self.totals, self.events = Counter(), []
        return taken


class _Span:
    __slots__ = ("_phase", "_start", "_timeline")

    def __init__(self, timeline: Timeline, phase: str):
        self._timeline = timeline
        self._phase = phase

    def __enter__(self) -> None:
        self._start = self._timeline.clock()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        timeline = self._timeline
        duration = timeline.clock() - self._start
        timeline.totals[self._phase] += duration
        if timeline.record:
            timeline.events.append((self._phase, self._start, duration, timeline.step, {}))


def write_chrome_trace(path: Path, ranks: Iterable[tuple[int, str, list[Event]]]) -> None:
    """Write the events of all ranks, (rank, label, events) each, for Perfetto.

    Format: "Trace Event Format", microseconds: complete events, one thread per rank, and counter
    events, one track of rows per rank.
    """
    out: list[dict[str, Any]] = []
    for rank, label, events in ranks:
        thread = {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank}
        out.append({**thread, "args": {"name": label}})
        for phase, start, duration, step, counts in events:
            common = {"pid": 0, "tid": rank, "ts": start / 1e3}
            if phase == ROWS:
                name = f"{ROWS}, rank {rank}"
                out.append({"ph": "C", "name": name, **common, "args": counts})
            else:
                args = {"step": step}
                span = {"ph": "X", "name": phase, **common, "dur": duration / 1e3, "args": args}
                out.append(span)
    path.write_text(json.dumps({"traceEvents": out, "displayTimeUnit": "ms"}))
