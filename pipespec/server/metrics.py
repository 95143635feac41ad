"""What to monitor, in Prometheus' format, under our names and vLLM's.

Counters and histograms count what this process has served. What the cluster does, for whomever,
is read from its Redis when somebody looks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pipespec.controller.overview import Overview
from pipespec.server.asking import Ask

OURS, VLLM = "pipespec_", "vllm:"
LABELS = ("model_name", "engine")
ENGINE = "0"  # a process of ours serves one cluster
# Seconds, and counts: vLLM's buckets, as far as its dashboards show them.
SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5)
CHOICES = (1, 2, 5, 10, 20)
# Why answers end, the last: nobody waits any more.
ENDED_BY_LEAVING = "abort"
ENDS = ("stop", "length", ENDED_BY_LEAVING)


class Metrics:
    """The figures of one server."""

    def __init__(self, model: str):
        self.registry = CollectorRegistry()
        self._model = model
        self.unfinished = 0  # answers that are waited for here
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts")
        self._generation_tokens = self._counter("generation_tokens", "Tokens of answers")
        self._success = {
            prefix: Counter(
                f"{prefix}request_success",
                "Answers by why they ended",
                (*LABELS, "finished_reason"),
                registry=self.registry,
            )
            for prefix in (OURS, VLLM)
        }
        for counter in self._success.values():
            for reason in ENDS:
                counter.labels(self._model, ENGINE, reason)  # 0 is a figure too
        self._ttft = self._histogram("time_to_first_token_seconds", "From request to first token")
        self._itl = self._histogram("inter_token_latency_seconds", "Between tokens")
        self._e2e = self._histogram("e2e_request_latency_seconds", "From request to last token")
        self._decode = self._histogram("request_decode_time_seconds", "From first to last token")
        self._prompt = self._histogram("request_prompt_tokens", "Tokens of a prompt", COUNTS)
        self._answer = self._histogram("request_generation_tokens", "Tokens of an answer", COUNTS)
        self._n = self._histogram("request_params_n", "Answers asked for", CHOICES)
        self._max = self._histogram("request_params_max_tokens", "Longest answer wanted", COUNTS)
        self._running = self._gauge("num_requests_running", "Answers that are decoded")
        self._waiting = self._gauge("num_requests_waiting", "Answers that wait")
        self._kv = self._gauge("kv_cache_usage_perc", "Share of KV slots in use, 0 to 1")
        self._cluster: dict[str, Gauge] = {}

    # --- what is served here ------------------------------------------------------------------

    def asked(self, ask: Ask) -> list[Watch]:
        """A request came; what watches each of its answers."""
        self._n.observe(ask.n)
        for prompt, longest in zip(ask.prompts, ask.max_tokens, strict=True):
            self._prompt.observe(len(prompt))
            self._max.observe(longest)
        self._prompt_tokens.inc(ask.prompt_tokens)
        return [Watch(self) for _ in ask.samplings]

    def success(self, reason: str) -> None:
        """An answer has ended."""
        for counter in self._success.values():
            counter.labels(self._model, ENGINE, reason).inc()

    # --- what the cluster does ----------------------------------------------------------------

    def show(self, overview: Overview | None) -> bytes:
        """All figures as text; of a cluster that does not answer nothing is known."""
        told: Mapping[str, int] = overview.statistics if overview else {}
        unfinished = overview.open + overview.queued if overview else 0
        running = min(told.get("running", 0), unfinished)
        self._running.set(running)
        self._waiting.set(unfinished - running)
        self._kv.set(told.get("kv_slots_held", 0) / max(told.get("kv_slots", 0), 1))
        self._set(f"{OURS}cluster_up", "Whether the cluster answers", overview is not None)
        if overview:
            self._set(f"{OURS}epoch", "Lives of the cluster between faults", overview.epoch)
            self._set(f"{OURS}ranks", "Ranks that take part", overview.joined)
        # Counted by the head since its epoch began, so these may fall.
        for name, value in told.items():
            self._set(f"{OURS}head_{name}", "As `pipespec status` tells it", value)
        self._set(f"{VLLM}num_preemptions_total", "Requests put back", told.get("preemptions", 0))
        fed, roots, tokens = (told.get(n, 0) for n in ("guess_rows", "root_rows", "tokens"))
        self._set(f"{VLLM}spec_decode_num_drafts_total", "Draft rounds", told.get("rounds", 0))
        self._set(f"{VLLM}spec_decode_num_draft_tokens_total", "Guesses that were fed", fed)
        self._set(
            f"{VLLM}spec_decode_num_accepted_tokens_total",
            "Tokens that were fed before they were decided",
            max(tokens - roots, 0),
        )
        return generate_latest(self.registry)

    def _set(self, name: str, text: str, value: float) -> None:
        if name not in self._cluster:
            self._cluster[name] = Gauge(name, text, LABELS, registry=self.registry)
        self._cluster[name].labels(self._model, ENGINE).set(value)

    def _counter(self, name: str, text: str) -> Figure:
        return self._figure(Counter, name, text)

    def _gauge(self, name: str, text: str) -> Figure:
        return self._figure(Gauge, name, text)

    def _histogram(self, name: str, text: str, buckets: Sequence[float] = SECONDS) -> Figure:
        return self._figure(Histogram, name, text, buckets=buckets)

    def _figure(self, kind: Any, name: str, text: str, **options: Any) -> Figure:
        options |= {"registry": self.registry}
        both = [kind(prefix + name, text, LABELS, **options) for prefix in (OURS, VLLM)]
        return Figure([figure.labels(self._model, ENGINE) for figure in both])

    # --- for Watch ----------------------------------------------------------------------------

    def first(self, seconds: float, tokens: int) -> None:
        """The first tokens of an answer came, so long after it was asked for."""
        self._ttft.observe(seconds)
        self._generation_tokens.inc(tokens)

    def more(self, seconds: float, tokens: int) -> None:
        """Tokens came together, so long after those before."""
        for _ in range(tokens):
            self._itl.observe(seconds / tokens)
        self._generation_tokens.inc(tokens)

    def ended(self, reason: str, seconds: float, decoding: float | None, tokens: int) -> None:
        """An answer has ended after so many seconds, `decoding` of them since its first token."""
        self.success(reason)
        self._e2e.observe(seconds)
        self._answer.observe(tokens)
        if decoding is not None:
            self._decode.observe(decoding)


class Figure:
    """One figure under two names."""

    def __init__(self, both: Sequence[Any]):
        self._both = both

    def inc(self, amount: float) -> None:
        for figure in self._both:
            figure.inc(amount)

    def set(self, value: float) -> None:
        for figure in self._both:
            figure.set(value)

    def observe(self, value: float) -> None:
        for figure in self._both:
            figure.observe(value)


class Watch:
    """Takes the times of one answer, from when it was asked for."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics
        self._asked = self._last = time.monotonic()
        self._first: float | None = None
        self._tokens = 0
        self._over = False
        metrics.unfinished += 1

    def heard(self, tokens: int) -> None:
        """So many tokens came."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
            self._metrics.first(now - self._asked, tokens)
        else:
            self._metrics.more(now - self._last, tokens)
        self._last = now
        self._tokens += tokens

    def ended(self, reason: str) -> None:
        """It is over; the first reason stays."""
        if self._over:
            return
        self._over = True
        self._metrics.unfinished -= 1
        now = time.monotonic()
        decoding = None if self._first is None else now - self._first
        self._metrics.ended(reason, now - self._asked, decoding, self._tokens)
