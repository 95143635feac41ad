"""What `benchmarks.chaos` does, and how it judges what came of it. Pure."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipespec.client.dataset import Sample

LOCAL_KINDS = ("kill", "hang", "redis")
HOST_KINDS = ("cut", "agent")
KINDS = (*LOCAL_KINDS, *HOST_KINDS)
OUTCOMES = ("recovered", "ended_first", "missed")
# Seconds for which a link is cut: shorter and longer than a lease and than SSH's patience.
CUT_S = (0.5, 8.0)
PROMPT_CHARACTERS = 160
SAMPLED = ("verify=sample", "verify.temperature=0.9")


@dataclass(frozen=True)
class Question:
    """A prompt and how it is decoded."""

    id: str
    prompt: str
    settings: tuple[str, ...]

    @property
    def verify(self) -> str:
        return "sampled" if SAMPLED[0] in self.settings else "greedy"


@dataclass(frozen=True)
class Fault:
    """What is done in one answer, all of it drawn from the seed.

    Attributes:
        kind: one of KINDS.
        target: the rank, the two hosts or the host; empty for Redis.
        at: the fault happens when so many tokens have come.
        cut_s: how long a link is cut; 0 for the other kinds.
        question: which of the questions is asked.
    """

    kind: str
    target: str
    at: int
    cut_s: float
    question: int


@dataclass(frozen=True)
class Struck:
    """What a fault did.

    Attributes:
        outcome: `recovered`; `ended_first`: the answer needed nothing more from what was hit;
            `missed`: what was to be hit was not there.
        recovery_s: None unless recovered.
        epochs: how many began because of it.
        reason: why an epoch ended before the answer did, in the cluster's words.
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


def questions(samples: Sequence[Sample], tokens: int) -> list[Question]:
    """Every prompt greedy and sampled in turn, each with a seed of its own."""
    length = (f"decode.max_new_tokens={tokens}", "decode.ignore_eos=true")
    return [
        Question(sample.id, sample.prompt[:PROMPT_CHARACTERS], (*how, *length))
        for number, sample in enumerate(samples)
        for how in (("verify=greedy",), (*SAMPLED, f"verify.seed={number}"))
    ]


def schedule(
    seed: int,
    count: int,
    *,
    kinds: Sequence[str],
    ranks: int,
    hosts: Sequence[str],
    tokens: int,
    num_questions: int,
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
        # Early enough that something is left to be done.
        at = draw.randint(1, tokens * 3 // 4)
        faults.append(Fault(kind, target, at, cut_s, number % num_questions))
    return faults


def compare(answer: dict[str, Any], expected: Sequence[int]) -> tuple[int, int, int]:
    """Tokens of an answer that are not the expected ones, that are lost, and that came twice.

    `answer` is what `tools.rig.driver` tells.
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
    """Seconds to the token with which the answer went on; None: it ended first.

    `since_s` is the moment of the fault, which came in `epoch`, or that of a link's mend.
    """
    for at_s, _, _, during in answer["events"]:
        if at_s > since_s and (fault.kind == "cut" or during > epoch):
            return float(at_s - since_s)
    return None


def short(reason: str) -> str:
    """A reason without what a library says of it, which names places of its own sources."""
    return reason.partition(": [")[0]


def table(faults: Sequence[Fault], struck: Sequence[Struck]) -> list[dict[str, Any]]:
    """A row per kind, and one of all."""
    done = list(zip(faults, struck, strict=False))
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


def line(number: int, of: int, fault: Fault, question: Question, result: Struck) -> str:
    """One fault and what came of it, for whoever watches."""
    what = " ".join(filter(None, (fault.kind, fault.target)))
    if fault.cut_s:
        what += f" for {fault.cut_s:g} s"
    came = {
        "recovered": f"went on after {result.recovery_s or 0:.2f} s",
        "ended_first": "the answer ended first",
        "missed": "there was nothing to hit",
    }[result.outcome]
    text = f"{number:4}/{of}  {what}, at token {fault.at}, {question.verify}: {came}"
    text += f"; epochs begun: {result.epochs}" + (f" ({result.reason})" if result.reason else "")
    return text + (f"  WRONG: {result}" if result.wrong else "")
