"""What is said of many decoded prompts: latencies, throughput, what speculation brought.

Names and meanings are those of `vllm bench serve` where both know the same thing. What vLLM takes
between the chunks that its server streams, ITL, is between verdicts here; what it counts in chunks
is counted in tokens. TBT, of the papers on speculative decoding, is between one token and the next,
0 inside a verdict; tokens weigh alike. Under `emulate.scale` all times are divided by it.

`tokens_per_step`, `rows_per_step`, `hit_rate` and `accepted_per_batch` are of a request: its own
tokens and rows in the steps in which it was open, means over all. What begins with `pipeline`, and
`stage_busy`, is of the whole run, in which a step that served many requests counts once
(`merge_periods`), also those of others who ask the same cluster.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from pipespec.timing.stats import merge_periods

PERCENTILES = (50, 90, 99)
OF_BENCHMARK = (
    *("mean_ttft_ms", "mean_tbt_ms", "tokens_per_step", "hit_rate", "accepted_per_batch"),
)


@dataclass(frozen=True)
class RequestResult:
    """One decoded prompt.

    `token_ms` are the arrivals of the tokens since the request was handed in, `ttft_ms` the
    first of them; `stats` is what `summarise` returns. `started_ms` is when it was handed
    in, since the run began; `draft_overruns` counts its draft rounds that overran, and
    `periods` is what each stage reported under that name.
    """

    id: str
    benchmark: str
    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    ttft_ms: float
    token_ms: list[float]
    stats: dict[str, Any]
    started_ms: float = 0.0
    draft_overruns: int = 0
    periods: list[dict[str, int]] = field(default_factory=list)


@dataclass(frozen=True)
class BenchResult:
    """All requests, in the order of the samples, and how long they took together.

    `concurrency` and `request_rate` are those of `Load`. `labels`
    (`answers.labels`) say whether times are emulated, draft tokens synthetic, the text lossy.
    """

    requests: list[RequestResult]
    duration_s: float
    concurrency: int | None
    labels: dict[str, Any]
    request_rate: float = math.inf

    def summary(self) -> dict[str, Any]:
        """One figure per name; None where there is nothing to take it from."""
        tokens_in = sum(len(request.prompt_ids) for request in self.requests)
        tokens_out = sum(len(request.token_ids) for request in self.requests)
        return {
            **self.labels,
            "completed": len(self.requests),
            "max_concurrency": self.concurrency,
            "request_rate": "inf" if math.isinf(self.request_rate) else self.request_rate,
            "duration": self.duration_s,
            "total_input_tokens": tokens_in,
            "total_output_tokens": tokens_out,
            "request_throughput": len(self.requests) / self.duration_s,
            "output_throughput": tokens_out / self.duration_s,
            "total_token_throughput": (tokens_in + tokens_out) / self.duration_s,
            "max_output_tokens_per_s": _best_second(self.requests),
            "max_concurrent_requests": _most_at_once(self.requests),
            **_latencies(self.requests),
            **_speculation(self.requests),
            **_pipeline(self.requests),
        }

    def by_benchmark(self) -> list[dict[str, Any]]:
        """The main figures of every benchmark that the samples are of, in their order."""
        rows = []
        for name in dict.fromkeys(request.benchmark for request in self.requests):
            requests = [request for request in self.requests if request.benchmark == name]
            figures = {**_latencies(requests), **_speculation(requests)}
            rows.append(
                {
                    "benchmark": name,
                    "completed": len(requests),
                    "total_output_tokens": sum(len(request.token_ids) for request in requests),
                    **{key: figures[key] for key in OF_BENCHMARK},
                }
            )
        return rows


def _latencies(requests: Sequence[RequestResult]) -> dict[str, float | None]:
    several = [request.token_ms for request in requests if len(request.token_ms) > 1]
    kinds = {
        "ttft": [request.ttft_ms for request in requests],
        "tpot": [(times[-1] - times[0]) / (len(times) - 1) for times in several],
        "itl": [gap for times in several for gap in np.diff(arrivals(times))],
        "tbt": [gap for times in several for gap in np.diff(times)],
        "e2el": [request.token_ms[-1] for request in requests],
    }
    measures: dict[str, Callable[..., Any]] = {
        "mean": np.mean,
        "median": np.median,
        "std": np.std,
        **{f"p{percent}": partial(np.percentile, q=percent) for percent in PERCENTILES},
    }
    return {
        f"{name}_{kind}_ms": float(measure(values)) if values else None
        for kind, values in kinds.items()
        for name, measure in measures.items()
    }


def _best_second(requests: Sequence[RequestResult]) -> float:
    """Tokens of the second in which most came."""
    first = min(request.started_ms for request in requests)
    came = [int(r.started_ms + at - first) // 1000 for r in requests for at in r.token_ms]
    return float(max(Counter(came).values()))


def _most_at_once(requests: Sequence[RequestResult]) -> int:
    """How many were handed in and had not their last token, at most."""
    changes = [(r.started_ms, 1) for r in requests]
    changes += [(r.started_ms + r.token_ms[-1], -1) for r in requests]
    # Of one moment, who leaves is counted first.
    return max(accumulate(change for _, change in sorted(changes)))


def _speculation(requests: Sequence[RequestResult]) -> dict[str, Any]:
    """What speculation brought to a request, over all of them.

    `tokens_per_step` counts tokens and steps after a request's first verdict with a token, as
    `summarise` does; `accepted_per_batch` is how many tokens a verdict on a request decided
    that decided any. `rows_per_step` weighs every step of a request alike.
    """
    later = [sum(at > r.token_ms[0] for at in r.token_ms) for r in requests]
    rates = [r.stats["tokens_per_step"] for r in requests]
    steps = sum(count / rate for count, rate in zip(later, rates, strict=True) if rate)
    tokens = sum(len(r.token_ms) for r in requests)
    weights = [r.stats["steps"] for r in requests]
    rows = [(r.stats["rows_per_step"], w) for r, w in zip(requests, weights, strict=True)]
    known = [(value, weight) for value, weight in rows if value is not None]
    whole = sum(weight for _, weight in known)
    return {
        "tokens_per_step": sum(later) / steps if steps else None,
        "hit_rate": sum(r.stats["hit_rate"] * len(r.token_ms) for r in requests) / tokens,
        "accepted_per_batch": tokens / sum(len(arrivals(r.token_ms)) for r in requests),
        "rows_per_step": sum(value * w for value, w in known) / whole if known else None,
    }


def _pipeline(requests: Sequence[RequestResult]) -> dict[str, Any]:
    """What the pipeline did while any of the requests was open, prompts included.

    Steps and rows are those that the first stage computed. `stage_busy` is the share of the time
    with a request in which each stage computed. `overruns` counts a stage's step once, but a
    draft round once for every request that it served.
    """
    stages = [merge_periods(each) for each in zip(*(r.periods for r in requests), strict=True)]
    steps = stages[0]["steps"] if stages else 0
    tokens = sum(len(r.token_ms) for r in requests)
    overruns = sum(stage["overruns"] for stage in stages)
    return {
        "pipeline_steps": steps,
        "pipeline_tokens_per_step": tokens / steps if steps else None,
        "pipeline_rows_per_step": stages[0]["rows"] / steps if steps else None,
        "stage_busy": [stage["busy_ns"] / max(stage["elapsed_ns"], 1) for stage in stages],
        "overruns": overruns + sum(r.draft_overruns for r in requests),
    }


def arrivals(times: Sequence[float]) -> list[float]:
    """The different moments at which tokens came: tokens of one verdict come at once."""
    return list(dict.fromkeys(times))
