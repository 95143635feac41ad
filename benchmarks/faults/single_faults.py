"""The faults of `benchmarks.faults.chaos`, one request at a time, and how results are judged."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipespec.instruments.bench.dataset import Sample

LOCAL_KINDS = ("kill", "hang", "redis")
HOST_KINDS = ("cut", "agent")
KINDS = (*LOCAL_KINDS, *HOST_KINDS)
OUTCOMES = ("recovered", "ended_first", "missed")
# Seconds for which a link is cut: from less to more than a lease and SSH's timeout.
CUT_S = (0.5, 8.0)
PROMPT_CHARACTERS = 160
SAMPLED = "sampling.temperature=0.9"


@dataclass(frozen=True)
class PromptCase:
    """A prompt and the settings that decode it."""

    id: str
    prompt: str
    settings: tuple[str, ...]

    @property
    def verify(self) -> str:
        return "sampled" if SAMPLED in self.settings else "greedy"


@dataclass(frozen=True)
class Fault:
    """A fault that happens during one answer, drawn from the seed.

    Attributes:
        kind: one of KINDS.
        target: the rank, the two hosts or the host; empty for Redis.
        at: the fault happens after so many tokens.
        cut_s: how long a link is cut; 0 for the other kinds.
        question: the index of the prompt case that is decoded.
    """

    kind: str
    target: str
    at: int
    cut_s: float
    question: int


@dataclass(frozen=True)
class FaultResult:
    """The effect of a fault.

    Attributes:
        outcome: `recovered`; `ended_first`: the answer ended without the failed part; `missed`:
            the target did not exist.
        recovery_s: None unless recovered.
        epochs: how many began because of it.
        reason: why an epoch ended before the answer did, as the cluster reports it.
        mismatches, lost, doubled: tokens.
    """

    outcome: str
    recovery_s: float | None
    epochs: int
    reason: str
    mismatches: int
    lost: int
    doubled: int

    @property
    def wrong(self) -> int:
        return self.mismatches + self.lost + self.doubled


def prompt_cases(samples: Sequence[Sample], tokens: int) -> list[PromptCase]:
    """Every prompt greedy and sampled in turn, each with its own seed."""
    length = (f"decode.max_new_tokens={tokens}", "decode.ignore_eos=true")
    return [
        PromptCase(sample.id, sample.prompt[:PROMPT_CHARACTERS], (*how, *length))
        for number, sample in enumerate(samples)
        for how in (("sampling.temperature=0",), (SAMPLED, f"sampling.seed={number}"))
    ]


def schedule(
    seed: int,
    count: int,
    *,
    kinds: Sequence[str],
    ranks: int,
    hosts: Sequence[str],
    tokens: int,
    num_cases: int,
) -> list[Fault]:
    """The faults of a run. Kinds come equally often, in an order that changes."""
    draw = random.Random(seed)
    order: list[str] = []
    while len(order) < count:
        order += draw.sample(list(kinds), len(kinds))
    faults = []
    for number, kind in enumerate(order[:count]):
        target = ""
        if kind in ("kill", "hang"):
            target = str(draw.randrange(ranks))
        elif kind == "cut":
            target = "-".join(draw.choice(list(itertools.combinations(hosts, 2))))
        elif kind == "agent":
            target = draw.choice(hosts)
        cut_s = round(draw.uniform(*CUT_S), 2) if kind == "cut" else 0.0
        # Early enough that tokens are left to decode.
        at = draw.randint(1, tokens * 3 // 4)
        faults.append(Fault(kind, target, at, cut_s, number % num_cases))
    return faults


def compare(answer: dict[str, Any], expected: Sequence[int]) -> tuple[int, int, int]:
    """How many tokens of an answer differ from the expected ones, were lost, and came twice.

    `answer` is the message of `tools.rig.driver`.
    """
    have = lost = doubled = 0
    for _, base, count, _ in answer["events"]:
        lost += max(0, base - have)
        doubled += max(0, have - base)
        have = base + count
    tokens = answer["tokens"]
    differ = sum(a != b for a, b in zip(tokens, expected, strict=False))
    return differ + abs(len(tokens) - len(expected)), lost, doubled


def recovery_s(fault: Fault, answer: dict[str, Any], since_s: float, epoch: int) -> float | None:
    """Seconds until the next token after a fault; None: the answer ended first.

    `since_s` is the time of the fault, which happened in `epoch`, or of a link's repair.
    """
    for at_s, _, _, during in answer["events"]:
        if at_s > since_s and (fault.kind == "cut" or during > epoch):
            return float(at_s - since_s)
    return None


def short(reason: str) -> str:
    """A reason without the details that a library adds, such as its own source files."""
    return reason.partition(": [")[0]


def table(faults: Sequence[Fault], results: Sequence[FaultResult]) -> list[dict[str, Any]]:
    """A row for each kind, and one for all."""
    done = list(zip(faults, results, strict=False))
    rows = []
    for kind in [*(kind for kind in KINDS if any(f.kind == kind for f, _ in done)), "all"]:
        mine = [result for fault, result in done if kind in (fault.kind, "all")]
        times = [result.recovery_s for result in mine if result.recovery_s is not None]
        row: dict[str, Any] = {"fault": kind, "times": len(mine)}
        row |= {name: sum(result.outcome == name for result in mine) for name in OUTCOMES}
        for name, percent in (("median_s", 50), ("p90_s", 90), ("p99_s", 99), ("worst_s", 100)):
            row[name] = float(np.percentile(times, percent)) if times else None
        rows.append(row)
    return rows


def describe(number: int, of: int, fault: Fault, question: PromptCase, result: FaultResult) -> str:
    """A line of the log about one fault and its result."""
    what = " ".join(filter(None, (fault.kind, fault.target)))
    if fault.cut_s:
        what += f" for {fault.cut_s:g} s"
    came = {
        "recovered": f"recovered after {result.recovery_s or 0:.2f} s",
        "ended_first": "the answer ended first",
        "missed": "there was no target",
    }[result.outcome]
    text = f"{number:4}/{of}  {what}, at token {fault.at}, {question.verify}: {came}"
    text += f"; epochs begun: {result.epochs}" + (f" ({result.reason})" if result.reason else "")
    return text + (f"  WRONG: {result}" if result.wrong else "")
