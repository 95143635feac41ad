"""The statistics of a request, from one report per rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from pipespec.timing.batch_times import unpack

Report = dict[str, Any]
# Counts of a stage since it last had no request, which it reports beside those of a request.
PERIOD = ("since_ns", "elapsed_ns", "busy_ns", "steps", "rows", "overruns")


def empty_report(rank: int) -> Report:
    """The report of a rank that was lost before it could make one."""
    if rank:
        counts = dict.fromkeys(("elapsed_ns", "busy_ns", "steps", "rows", "dropped", "overruns"), 0)
        period = dict.fromkeys(PERIOD, 0)
        common = {"control_ns": 0, "events": [], "period": period, "attention": None}
        return {"rank": rank, "times": "", **common, **counts}
    return {
        "rank": 0,
        "times": "",
        "overlap": True,
        "control_ns": 0,
        "features_ns": 0,
        "events": [],
        "hits": 0,
        "cached_tokens": 0,
        "replayed": 0,
        "token_ns": [],
        "counts": dict.fromkeys(("steps", "rows", "rounds", "overruns"), 0),
        "first_token": {},
    }


def summarise(enqueued_ns: int, reports: list[Report]) -> dict[str, Any]:
    """The statistics of one request.

    Args:
        enqueued_ns: when the request was submitted, on the ranks' clock.
        reports: what each rank reported at its end, in any order.

    Times are milliseconds. `cached_tokens` of the prompt were in the KV cache when the request
    started. Rates over steps count the steps between the first token and the last; with fewer than
    two tokens they are None. `hit_rate` is the share of tokens that had been fed before they were
    decided. After a recovery tokens that an earlier epoch decided count for `ttft_ms` alone.
    `stage_busy` is the share of the request's time in which each stage computed.
    `control_ms_per_step` is the time per step that a rank spends on the controller, the mean over
    the ranks: calls, and the transfer of verdicts. `features_ms_per_step` is how long per step the
    head waited for features of the target, which a draft head reads. `attention` is the backend of
    each stage.
    `stage_times` are the latest of each stage (`BatchTimes`), and `round_times` those of the draft
    by the nodes that a round expanded; `overlap` says whether it drafted while the stages computed.
    """
    head, *stages = sorted(reports, key=lambda report: report["rank"])
    decided, counts, first = head["token_ns"], head["counts"], head["first_token"]
    times = decided[head["replayed"] :]
    between = [(b - a) / 1e6 for a, b in pairwise(times)]
    later = sum(t > times[0] for t in times) if times else 0
    steps = counts["steps"] - first.get("steps", 0)
    rows = counts["rows"] - first.get("rows", 0)
    seconds = (times[-1] - times[0]) / 1e9 if times else 0.0

    def per_step(value: float) -> float | None:
        return value / steps if steps else None

    return {
        "cached_tokens": head["cached_tokens"],
        "ttft_ms": (decided[0] - enqueued_ns) / 1e6 if decided else None,
        "tbt_ms": {
            "mean": float(np.mean(between)) if between else None,
            "p50": float(np.median(between)) if between else None,
            "p99": float(np.percentile(between, 99)) if between else None,
        },
        "tokens_per_s": len(between) / seconds if seconds else None,
        "steps": counts["steps"],
        "step_ms": per_step(seconds * 1e3),
        "tokens_per_step": per_step(later),
        "hit_rate": head["hits"] / len(times) if times else None,
        "rows_per_step": per_step(rows),
        "pruned_rows": sum(stage["dropped"] for stage in stages),
        "draft_rounds_per_step": per_step(counts["rounds"] - first.get("rounds", 0)),
        "control_ms_per_step": sum(report["control_ns"] for report in reports)
        / 1e6
        / (len(reports) * max(counts["steps"], 1)),
        "features_ms_per_step": head["features_ns"] / 1e6 / max(counts["steps"], 1),
        "stage_busy": [stage["busy_ns"] / max(stage["elapsed_ns"], 1) for stage in stages],
        "overruns": sum(stage["overruns"] for stage in stages) + counts["overruns"],
        "attention": [stage["attention"] for stage in stages],
        "stage_times": [unpack(stage["times"])._asdict() for stage in stages],
        "round_times": unpack(head["times"]).points,
        "overlap": head["overlap"],
    }


def merge_periods(periods: Iterable[Mapping[str, int]]) -> Counter[str]:
    """Counts of a stage over the periods in its reports on some requests.

    Requests that ran at the same time report the same period, each up to its own end: the longest
    counts, so that no step counts twice.
    """
    longest: dict[int, Mapping[str, int]] = {}
    for period in periods:
        known = longest.setdefault(period["since_ns"], period)
        longest[period["since_ns"]] = max(known, period, key=lambda each: each["elapsed_ns"])
    whole = Counter[str]()
    for period in longest.values():
        whole.update({name: period[name] for name in PERIOD if name != "since_ns"})
    return whole
