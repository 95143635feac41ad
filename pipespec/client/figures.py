"""What is said of many decoded prompts: latencies, throughput, what guessing brought.

Names and meanings are those of `vllm bench serve --metric-percentiles 50,90,99` where both
know the same thing:

- TTFT: from handing a request in (waiting in the queue included) to its first token.
- TPOT: of one request, the time from its first to its last token, per token after the first;
  requests weigh alike.
- ITL: between two arrivals. vLLM takes it between the chunks that its server streams, however
  many tokens a chunk has; a verdict is our chunk. So tokens of one verdict have one ITL, and
  no ITL is 0.
- E2EL: from handing a request in to its last token.

Beside them stands TBT, of the papers on speculative decoding: between one token and the next,
0 inside a verdict; tokens weigh alike.

Under `pace.scale` all times are divided by it: they are those of the emulated machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class RequestResult:
    """One decoded prompt.

    `token_ms` are the arrivals of the tokens since the request was handed in, `ttft_ms` the
    first of them; `stats` is described in `pipespec.stats`.
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


@dataclass(frozen=True)
class BenchResult:
    """All requests, in the order of the samples, and how long they took together.

    `labels` (`answers.labels`) say whether times are emulated, guesses synthetic, the text
    lossy.
    """

    requests: list[RequestResult]
    duration_s: float
    concurrency: int
    labels: dict[str, Any]

    def summary(self) -> dict[str, Any]:
        """One figure per name; None where there is nothing to take it from."""
        tokens_in = sum(len(request.prompt_ids) for request in self.requests)
        tokens_out = sum(len(request.token_ids) for request in self.requests)
        return {
            **self.labels,
            "completed": len(self.requests),
            "max_concurrency": self.concurrency,
            "duration": self.duration_s,
            "total_input_tokens": tokens_in,
            "total_output_tokens": tokens_out,
            "request_throughput": len(self.requests) / self.duration_s,
            "output_throughput": tokens_out / self.duration_s,
            "total_token_throughput": (tokens_in + tokens_out) / self.duration_s,
            **_latencies(self.requests),
            **_speculation(self.requests),
        }

    def by_benchmark(self) -> list[dict[str, Any]]:
        """The main figures of every benchmark that the samples are of, in their order."""
        rows = []
        for name in dict.fromkeys(request.benchmark for request in self.requests):
            requests = [request for request in self.requests if request.benchmark == name]
            latencies, speculation = _latencies(requests), _speculation(requests)
            rows.append(
                {
                    "benchmark": name,
                    "completed": len(requests),
                    "total_output_tokens": sum(len(request.token_ids) for request in requests),
                    **{key: latencies[key] for key in ("mean_ttft_ms", "mean_tbt_ms")},
                    **{
                        key: speculation[key]
                        for key in ("tokens_per_step", "hit_rate", "accepted_per_batch")
                    },
                }
            )
        return rows


def _latencies(requests: Sequence[RequestResult]) -> dict[str, float | None]:
    """Mean, median, standard deviation and percentiles of every kind of latency."""
    several = [request.token_ms for request in requests if len(request.token_ms) > 1]
    kinds = {
        "ttft": [request.ttft_ms for request in requests],
        "tpot": [(times[-1] - times[0]) / (len(times) - 1) for times in several],
        "itl": [gap for times in several for gap in gaps(arrivals(times))],
        "tbt": [gap for times in several for gap in gaps(times)],
        "e2el": [request.token_ms[-1] for request in requests],
    }
    figures: dict[str, float | None] = {}
    for kind, values in kinds.items():
        figures[f"mean_{kind}_ms"] = float(np.mean(values)) if values else None
        figures[f"median_{kind}_ms"] = float(np.median(values)) if values else None
        figures[f"std_{kind}_ms"] = float(np.std(values)) if values else None
        for percent in PERCENTILES:
            figures[f"p{percent}_{kind}_ms"] = (
                float(np.percentile(values, percent)) if values else None
            )
    return figures


def _speculation(requests: Sequence[RequestResult]) -> dict[str, Any]:
    """What guessing brought, over all requests.

    `tokens_per_step` counts tokens and steps after a request's first verdict with a token, as
    `pipespec.stats` does; `accepted_per_batch` is how many tokens a verdict decided that
    decided any. `stage_busy` and `rows_per_step` are means that weigh every step alike.
    """
    later = [sum(at > r.token_ms[0] for at in r.token_ms) for r in requests]
    rates = [r.stats["tokens_per_step"] for r in requests]
    steps = sum(count / rate for count, rate in zip(later, rates, strict=True) if rate)
    tokens = sum(len(r.token_ms) for r in requests)
    weights = [r.stats["steps"] for r in requests]
    rows = [(r.stats["rows_per_step"], w) for r, w in zip(requests, weights, strict=True)]
    known = [(value, weight) for value, weight in rows if value is not None]
    stages = zip(*(r.stats["stage_busy"] for r in requests), strict=True)
    return {
        "tokens_per_step": sum(later) / steps if steps else None,
        "hit_rate": sum(r.stats["hit_rate"] * len(r.token_ms) for r in requests) / tokens,
        "accepted_per_batch": tokens / sum(len(arrivals(r.token_ms)) for r in requests),
        "rows_per_step": _weighted(known),
        "stage_busy": [_weighted([*zip(busy, weights, strict=True)]) for busy in stages],
        "overruns": sum(r.stats["overruns"] for r in requests),
    }


def _weighted(pairs: Sequence[tuple[float, float]]) -> float | None:
    """The mean of values that each come with a weight; None without any."""
    whole = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / whole if pairs else None


def arrivals(times: Sequence[float]) -> list[float]:
    """The different moments at which tokens came: tokens of one verdict come at once."""
    return list(dict.fromkeys(times))


def gaps(times: Sequence[float]) -> list[float]:
    """From each moment to the next."""
    return [b - a for a, b in pairwise(times)]
