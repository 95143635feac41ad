"""Metrics in Prometheus' format: of the requests that this process has served, and of the cluster,
read from its Redis for each request to /metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace

from prometheus_client import Metric, generate_latest

from pipespec.controller.cluster_status import ClusterStatus
from pipespec.server.metric_definitions import (
    BOTH,
    OURS,
    RequestMetrics,
    cluster_metrics,
    with_prefix,
)
from pipespec.server.request_parsing import ParsedRequest

ENGINE = "0"  # vLLM's label; a server has one cluster


class Metrics:
    """The metrics of one server. `clock` returns seconds."""

    def __init__(self, model: str, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self.unfinished = 0  # answers that this server is waiting for
        self.model = model
        self._labels = {"model_name": model, "engine": ENGINE}
        self.requests = RequestMetrics()

    def request_arrived(self, request: ParsedRequest) -> list[RequestTimer]:
        self.requests.n.observe(request.n)
        for prompt, longest in zip(request.prompts, request.max_tokens, strict=True):
            self.requests.prompt.observe(len(prompt))
            self.requests.longest.observe(longest)
        self.requests.prompt_tokens.inc(request.prompt_tokens)
        return [RequestTimer(self) for _ in request.sampling_params]

    def prometheus_text(self, status: ClusterStatus | None) -> bytes:
        """All metrics as text; those of the cluster only if it answers."""
        collected = SimpleNamespace(collect=lambda: self._collect(status))
        return generate_latest(collected)

    def samples_by_name(
        self, status: ClusterStatus | None
    ) -> dict[str, list[tuple[dict[str, str], float]]]:
        """The same metrics by name, without prefix and without the labels that all of them have."""
        metrics = [with_prefix(OURS, each, {}) for each in self.requests.collect()]
        metrics += [each for each in cluster_metrics(status, {}) if each.name.startswith(OURS)]
        found: dict[str, list[tuple[dict[str, str], float]]] = {}
        for sample in (sample for metric in metrics for sample in metric.samples):
            name = sample.name.removeprefix(OURS)
            found.setdefault(name, []).append((sample.labels, sample.value))
        return found

    def _collect(self, status: ClusterStatus | None) -> Iterable[Metric]:
        for metric in self.requests.collect():
            for prefix in BOTH:
                yield with_prefix(prefix, metric, self._labels)
        yield from cluster_metrics(status, self._labels)


class RequestTimer:
    """Times one answer, from the request on."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics
        self._arrived = self._last = metrics.clock()
        self._first: float | None = None
        self._num_tokens = 0
        self._finished = False
        metrics.unfinished += 1

    def add_tokens(self, tokens: int) -> None:
        now, requests = self._metrics.clock(), self._metrics.requests
        if self._first is None:
            self._first = now
            requests.ttft.observe(now - self._arrived)
        else:
            for _ in range(tokens):
                requests.itl.observe((now - self._last) / tokens)
        requests.generation_tokens.inc(tokens)
        self._last = now
        self._num_tokens += tokens

    def finished(self, reason: str, prefill_ns: int | None = None) -> None:
        """The answer has ended; later calls are ignored. The time to the first token that is not
        `prefill_ns` is the wait until the head starts the request, and communication. Only
        durations are compared, as the head may be on another machine."""
        if self._finished:
            return
        self._finished = True
        self._metrics.unfinished -= 1
        now, requests = self._metrics.clock(), self._metrics.requests
        requests.success.labels(reason).inc()
        requests.e2e.observe(now - self._arrived)
        requests.answer.observe(self._num_tokens)
        if self._first is None:
            return
        decoding = now - self._first
        requests.decode.observe(decoding)
        if prefill_ns is not None:
            prefill = prefill_ns / 1e9
            requests.prefill.observe(prefill)
            requests.queue.observe(max(self._first - self._arrived - prefill, 0.0))
            requests.inference.observe(prefill + decoding)
