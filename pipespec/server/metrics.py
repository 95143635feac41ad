"""The metrics of /metrics, under the prefix pipespec_ and, where vLLM has it, under vllm: too: of
the requests that this process has served, and of the cluster, read from its Redis for each request.

A metric whose value is unknown is left out instead of being 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import prometheus_client
from prometheus_client import Metric, generate_latest
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import HistogramMetricFamily as Histogram
from prometheus_client.core import SummaryMetricFamily as Summary
from prometheus_client.utils import floatToGoString

from pipespec.cluster.deployment.rank_assignment import RankAssignment
from pipespec.cluster.processes.fault_stats import (
    RECOVERIES,
    RECOVERY_NS,
    RESUMPTION_NS,
    RESUMPTIONS,
    FaultKind,
)
from pipespec.controller.cluster_status import ClusterStatus, labelled
from pipespec.core import STEP_TOKENS
from pipespec.server.request_parsing import ParsedRequest

OURS, VLLM = "pipespec_", "vllm:"
BOTH, OWN = (OURS, VLLM), (OURS,)
# Buckets for seconds and counts: vLLM's, as far as its dashboards show them.
SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5)
CHOICES = (1, 2, 5, 10, 20)
# Why answers end; "abort": the client has disconnected, or the request has failed.
ABORTED = "abort"
ENDS = ("stop", "length", ABORTED)


# --- requests to this server --------------------------------------------------------------------


class RequestMetrics:
    """The metrics of the requests to one server, without prefixes."""

    def __init__(self) -> None:
        total = partial(prometheus_client.Counter, registry=None)
        seconds = partial(prometheus_client.Histogram, buckets=SECONDS, registry=None)
        counts = partial(prometheus_client.Histogram, buckets=COUNTS, registry=None)
        self.prompt_tokens = total("prompt_tokens", "Prompt tokens")
        self.generation_tokens = total("generation_tokens", "Generated tokens")
        reasons = "Finished answers, by reason", ("finished_reason",)
        self.success = total("request_success", *reasons)
        for reason in ENDS:
            self.success.labels(reason)  # exported as 0 until one ends so
        self.ttft = seconds("time_to_first_token_seconds", "From request to first token")
        self.itl = seconds("inter_token_latency_seconds", "Between tokens")
        self.e2e = seconds("e2e_request_latency_seconds", "From request to last token")
        self.queue = seconds("request_queue_time_seconds", "From request until the head starts it")
        start = "From the start at the head to"
        self.prefill = seconds("request_prefill_time_seconds", f"{start} first token")
        self.decode = seconds("request_decode_time_seconds", "From first to last token")
        self.inference = seconds("request_inference_time_seconds", f"{start} last token")
        self.prompt = counts("request_prompt_tokens", "Tokens per prompt")
        self.answer = counts("request_generation_tokens", "Tokens per answer")
        self.n = counts("request_params_n", "Answers wanted per prompt", buckets=CHOICES)
        self.longest = counts("request_params_max_tokens", "Largest number of tokens wanted")

    def collect(self) -> Iterable[Metric]:
        for metric in vars(self).values():
            yield from metric.collect()


# --- the cluster --------------------------------------------------------------------------------


def with_prefix(prefix: str, metric: Metric, labels: Mapping[str, str]) -> Metric:
    found = Metric(prefix + metric.name, metric.documentation, metric.type)
    for sample in metric.samples:
        found.add_sample(prefix + sample.name, {**labels, **sample.labels}, sample.value)
    return found


def cluster_metrics(status: ClusterStatus | None, labels: Mapping[str, str]) -> Iterable[Metric]:
    """All metrics of a cluster; None: it does not answer."""
    up = Gauge("cluster_up", "Whether the cluster answers", float(status is not None))
    yield with_prefix(OURS, up, labels)
    if status is not None:
        for prefixes, metrics in ((BOTH, _shared(status)), (OWN, _own(status))):
            for metric in metrics:
                for prefix in prefixes if metric.samples else ():
                    yield with_prefix(prefix, metric, labels)


def _shared(status: ClusterStatus) -> Iterable[Metric]:
    totals, state = status.totals, status.state
    known = status.open + status.queued
    running = min(state.get("running", 0), known)
    hits = _by_number(status, "hits")
    yield Gauge("num_requests_running", "Requests being decoded", running)
    yield Gauge("num_requests_waiting", "Requests that wait", known - running)
    if state:
        share = state["kv_slots_held"] / max(state["kv_slots"], 1)
        yield Gauge("kv_cache_usage_perc", "Share of KV slots in use, 0 to 1", share)
        sizes = {"block_size": "1", "num_gpu_blocks": str(state["kv_slots"])}
        yield _infos("cache_config_info", "KV slots, as blocks of one token", [sizes])
    yield Counter("prefix_cache_queries", "Prompt tokens looked up", totals["cache_queries"])
    yield Counter("prefix_cache_hits", "Prompt tokens found in KV", totals["cache_hits"])
    yield Counter("num_preemptions", "Requests that were preempted", totals["preemptions"])
    yield Counter("spec_decode_num_drafts", "Draft rounds", totals["rounds"])
    yield Counter("spec_decode_num_draft_tokens", "Draft tokens verified", totals["draft_rows"])
    yield Counter("spec_decode_num_accepted_tokens", "Draft tokens accepted", sum(hits.values()))
    by_position = {depth - 1: count for depth, count in hits.items()}
    name = "spec_decode_num_accepted_tokens_per_pos"
    yield _labelled(name, "Draft tokens accepted, by depth - 1", "position", by_position)
    steps = {float(most): count for most, count in labelled(totals, "step_tokens").items()}
    up_to = accumulate(steps.get(most, 0) for most in STEP_TOKENS)
    yield Histogram(
        "iteration_tokens_total",
        "Prompt and new tokens per step",
        buckets=[*zip(map(floatToGoString, STEP_TOKENS), up_to, strict=True)],
        sum_value=totals["prompt_rows"] + totals["tokens"],
    )


def _own(status: ClusterStatus) -> Iterable[Metric]:
    totals, state = status.totals, status.state
    yield Gauge("epoch", "Epoch: starts, recoveries and changes of hosts so far", status.epoch)
    yield Gauge("ranks", "Ranks that have joined the epoch", status.joined)
    yield Gauge("kv_slots", "KV slots of every stage", state.get("kv_slots"))
    yield Gauge("kv_slots_held", "KV slots in use", state.get("kv_slots_held"))
    yield Gauge("kv_slots_retained", "KV slots of the prefix cache", state.get("kv_slots_retained"))
    yield Gauge("row_budget", "Rows per step, not counting prefill", state.get("row_budget"))
    yield Counter("steps", "Steps with rows", totals["steps"])
    yield Counter("decided_tokens", "Tokens generated for all clients", totals["tokens"])
    names = {"decided": "root_rows", "prompt": "prompt_rows", "draft": "draft_rows"}
    rows = {kind: totals[name] for kind, name in names.items()}
    yield _labelled("rows", "Rows, by kind", "kind", rows)
    for name, text, count in (
        ("draft_rows", "Draft tokens verified, by depth", "fed"),
        ("draft_hits", "Draft tokens accepted, by depth", "hits"),
        ("draft_hits_expected", "Acceptances that the proposer predicted, by depth", "expected"),
    ):
        yield _labelled(name, text, "depth", _by_number(status, count))
    # Only some clusters have one.
    yield _infos("rank_info", "How each rank computes", _rank_infos(status))
    yield _infos("rank_place_info", "Each rank's host, device and layers", _rank_places(status))
    share = "Share of time with requests spent computing"
    yield _labelled("stage_busy_share", share, "stage", status.busy, Gauge)
    for name, text in (
        ("active", "Time with requests"),
        ("busy", "Time spent computing"),
        ("receive", "Time receiving"),
        ("send", "Time sending"),
    ):
        seconds = {n: ns * 1e-9 for n, ns in _by_number(status, f"{name}_ns").items()}
        yield _labelled(f"stage_{name}_seconds", text, "stage", seconds)
    faults = {str(kind): status.faults.get(kind, 0) for kind in FaultKind}
    yield _labelled("faults", "Faults, by their kind; a lost host is one", "kind", faults)
    for name, text, count, ns in (
        ("recovery", "From a fault until all ranks joined", RECOVERIES, RECOVERY_NS),
        ("resumption", "From a fault to the next token", RESUMPTIONS, RESUMPTION_NS),
    ):
        total = totals[ns] / 1e9
        yield Summary(f"{name}_seconds", text, count_value=totals[count], sum_value=total)


def _labelled(
    name: str, text: str, label: str, counts: Mapping[Any, float], kind: Any = Counter
) -> Metric:
    metric: Metric = kind(name, text, labels=[label])
    for value, count in counts.items():
        metric.add_metric([str(value)], count)  # type: ignore[attr-defined]
    return metric


def _by_number(status: ClusterStatus, name: str) -> dict[int, int]:
    """The counts of a name by their labels: whole numbers from 1 on, in order."""
    found = {int(number): count for number, count in labelled(status.totals, name).items()}
    return {number: found[number] for number in sorted(found) if number >= 1}


def _infos(name: str, text: str, infos: Iterable[Mapping[str, str]]) -> Metric:
    metric = Metric(name, text, "gauge")
    for labels in infos:
        metric.add_sample(name, dict(labels), 1.0)
    return metric


def _rank_infos(status: ClusterStatus) -> Iterable[Mapping[str, str]]:
    for rank, how in status.computing.items():
        yield {
            "rank": str(rank),
            "attention": how["attention"],
            "graph_rows": ",".join(map(str, how["graph_rows"])),
            "compiled": str(how["compiled"]).lower(),
        }


def _rank_places(status: ClusterStatus) -> Iterable[Mapping[str, str]]:
    if not status.assignment:
        return
    assigned = RankAssignment.decode(status.assignment)
    for rank, worker in enumerate(assigned.workers):
        layers = assigned.layers[rank - 1] if rank else range(0)
        yield {
            "rank": str(rank),
            "host": worker.rpartition("/")[0],
            "device": status.computing.get(rank, {}).get("device", ""),
            "devices": str(len(assigned.members(rank))),
            "layers": f"{layers.start}-{layers.stop - 1}" if layers else "",
        }


# --- one server ---------------------------------------------------------------------------------


class Metrics:
    """The metrics of one server. `clock` returns seconds."""

    def __init__(self, model: str, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self.unfinished = 0  # answers that this server is waiting for
        self.model = model
        # Both are vLLM's labels; a server has one cluster.
        self._labels = {"model_name": model, "engine": "0"}
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
        own = (
            with_prefix(prefix, metric, self._labels)
            for metric in self.requests.collect()
            for prefix in BOTH
        )
        metrics = [*own, *cluster_metrics(status, self._labels)]
        return generate_latest(SimpleNamespace(collect=lambda: metrics))

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


class RequestTimer:
    """Times one answer, from the request on."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics
        self._arrived = self._last = metrics.clock()
        self._first: float | None = None
        self.num_tokens = 0
        self.reason = ""  # why it has ended
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
        self.num_tokens += tokens

    def finished(self, reason: str, prefill_ns: int | None = None) -> None:
        """The answer has ended; later calls are ignored. The time to the first token that is not
        `prefill_ns` is the wait until the head starts the request, and communication. Only
        durations are compared, as the head may be on another machine."""
        if self.reason:
            return
        self.reason = reason
        self._metrics.unfinished -= 1
        now, requests = self._metrics.clock(), self._metrics.requests
        requests.success.labels(reason).inc()
        requests.e2e.observe(now - self._arrived)
        requests.answer.observe(self.num_tokens)
        if self._first is None:
            return
        decoding = now - self._first
        requests.decode.observe(decoding)
        if prefill_ns is not None:
            prefill = prefill_ns / 1e9
            requests.prefill.observe(prefill)
            requests.queue.observe(max(self._first - self._arrived - prefill, 0.0))
            requests.inference.observe(prefill + decoding)
