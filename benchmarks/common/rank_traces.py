"""The trace of one request: the phases of every rank in every step, in milliseconds."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import comparison
from benchmarks.common.comparison import CaseRun
from pipespec.instruments.bench.dataset import Sample

# The names of a trace's phases in tables and figures, in their order.
KINDS = {
    "compute": "compute",
    "pace": "pace",
    "draft": "draft",
    "verify": "verify",
    "prune": "prune",
    "send": "send",
    "control": "controller",
    "receive": "wait",
    "wait": "wait",
}


@dataclass(frozen=True)
class Span:
    """One phase of one rank in one step; milliseconds."""

    phase: str
    start: float
    length: float
    step: int

    @property
    def end(self) -> float:
        return self.start + self.length


@dataclass(frozen=True)
class Trace:
    """The spans of every rank, the head first, in order of time."""

    labels: list[str]
    ranks: list[list[Span]]

    @classmethod
    def read(cls, path: Path, scale: float = 1.0) -> Trace:
        """Read the file that `trace=FILE` writes. Times that were emulated `scale` times slower are
        scaled back."""
        millisecond = 1e3 * scale
        labels: dict[int, str] = {}
        ranks: dict[int, list[Span]] = defaultdict(list)
        for event in json.loads(path.read_text())["traceEvents"]:
            if event["ph"] == "M":
                labels[event["tid"]] = event["args"]["name"]
            elif event["ph"] == "X":
                span = Span(
                    event["name"],
                    event["ts"] / millisecond,
                    event["dur"] / millisecond,
                    event["args"]["step"],
                )
                ranks[event["tid"]].append(span)
        return cls(
            [labels[rank].partition(":")[0] for rank in sorted(labels)],
            [sorted(ranks[rank], key=lambda span: span.start) for rank in sorted(labels)],
        )

    def verdicts(self) -> dict[int, float]:
        """The time at which the last stage published the verdict of each step."""
        return {span.step: span.end for span in self.ranks[-1] if span.phase == "pace"}

    def computed(self, rank: int) -> dict[int, Span]:
        """A stage's computation in each step, with the wait that makes it as long as stated."""
        starts = {span.step: span.start for span in self.ranks[rank] if span.phase == "compute"}
        return {
            span.step: Span("compute", starts[span.step], span.end - starts[span.step], span.step)
            for span in self.ranks[rank]
            if span.phase == "pace"
        }


def record(
    name: str,
    overrides: Sequence[str],
    prompt: str,
    folder: Path,
    *,
    prompt_tokens: int | None = None,
    scale: float = 1.0,
) -> tuple[CaseRun, Trace]:
    """Decode one prompt, cut to `prompt_tokens`, and read its trace as `Trace.read` does."""
    file = folder / "trace.json"
    case_run = comparison.run(
        name,
        [*overrides, f"trace={file}"],
        [Sample("text", "text", prompt)],
        prompt_tokens=prompt_tokens,
        temporary=[folder],
    )
    return case_run, Trace.read(file, scale)


def phases(trace: Trace) -> list[dict[str, str | float]]:
    """Median milliseconds per step of each rank in each phase, during decoding."""
    steps = sorted(trace.verdicts())
    rows: list[dict[str, str | float]] = []
    for label, spans in zip(trace.labels, trace.ranks, strict=True):
        spent = {kind: dict.fromkeys(steps, 0.0) for kind in KINDS.values()}
        for span in spans:
            if span.step in spent[KINDS[span.phase]]:
                spent[KINDS[span.phase]][span.step] += span.length
        rows.append(
            {"rank": label} | {kind: statistics.median(of.values()) for kind, of in spent.items()}
        )
    return rows
