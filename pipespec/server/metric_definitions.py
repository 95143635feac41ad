"""The metrics of /metrics: their names, and how they are computed.

Each is exported under the prefix pipespec_ and, where vLLM has it, under vllm: too. A metric whose
value is unknown is left out instead of being 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import Counter, Histogram, Metric
from prometheus_client.utils import floatToGoString

from pipespec.cluster import fault_stats
from pipespec.cluster.fault_stats import FaultKind
from pipespec.cluster.rank_assignment import RankAssignment
from pipespec.controller.cluster_status import ClusterStatus, labelled
from pipespec.core import STEP_TOKENS

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

GAUGE, COUNTER, HISTOGRAM, SUMMARY = "gauge", "counter", "histogram", "summary"
# The suffix of a name, labels, and a value.
Sample = tuple[str, Mapping[str, str], float]
Read = Callable[[ClusterStatus], Iterable[Sample]]


# --- requests to this server --------------------------------------------------------------------


class RequestMetrics:
    """The metrics of the requests to one server, without prefixes."""

    def __init__(self) -> None:
        self.prompt_tokens = _counter("prompt_tokens", "Prompt tokens")
        self.generation_tokens = _counter("generation_tokens", "Generated tokens")
        self.success = Counter(
            "request_success", "Finished answers, by reason", ("finished_reason",), registry=None
        )
        for reason in ENDS:
            self.success.labels(reason)  # exported as 0 until one ends so
        self.ttft = _seconds("time_to_first_token_seconds", "From request to first token")
        self.itl = _seconds("inter_token_latency_seconds", "Between tokens")
        self.e2e = _seconds("e2e_request_latency_seconds", "From request to last token")
        self.queue = _seconds("request_queue_time_seconds", "From request until the head starts it")
        self.prefill = _seconds(
            "request_prefill_time_seconds", "From the start at the head to first token"
        )
        self.decode = _seconds("request_decode_time_seconds", "From first to last token")
        self.inference = _seconds(
            "request_inference_time_seconds", "From the start at the head to last token"
        )
        self.prompt = _histogram("request_prompt_tokens", "Tokens per prompt", COUNTS)
        self.answer = _histogram("request_generation_tokens", "Tokens per answer", COUNTS)
        self.n = _histogram("request_params_n", "Answers wanted per prompt", CHOICES)
        self.longest = _histogram(
            "request_params_max_tokens", "Largest number of tokens wanted", COUNTS
        )

    def collect(self) -> Iterable[Metric]:
        for metric in vars(self).values():
            yield from metric.collect()


def _counter(name: str, text: str) -> Counter:
    return Counter(name, text, registry=None)


def _histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
    return Histogram(name, text, buckets=buckets, registry=None)


def _seconds(name: str, text: str) -> Histogram:
    return _histogram(name, text, SECONDS)


# --- the cluster --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClusterMetric:
    """A metric of the cluster; a counter's name is without "_total".

    `read` computes its samples; none if the value is unknown.
    """

    name: str
    kind: str
    prefixes: Sequence[str]
    read: Read
    text: str

    def metric(self, status: ClusterStatus) -> Metric:
        """The metric without a prefix."""
        metric = Metric(self.name, self.text, self.kind)
        for suffix, labels, value in self.read(status):
            metric.add_sample(self.name + suffix, dict(labels), value)
        return metric


def with_prefix(prefix: str, metric: Metric, labels: Mapping[str, str]) -> Metric:
    """The same metric under a prefix, with more labels."""
    found = Metric(prefix + metric.name, metric.documentation, metric.type)
    for sample in metric.samples:
        found.add_sample(prefix + sample.name, {**labels, **sample.labels}, sample.value)
    return found


def cluster_metrics(status: ClusterStatus | None, labels: Mapping[str, str]) -> Iterable[Metric]:
    """All metrics of a cluster; None: it does not answer."""
    up = Metric("cluster_up", "Whether the cluster answers", GAUGE)
    up.add_sample(up.name, {}, float(status is not None))
    yield with_prefix(OURS, up, labels)
    for definition in CLUSTER_METRICS if status is not None else ():
        assert status is not None
        metric = definition.metric(status)
        for prefix in definition.prefixes if metric.samples else ():
            yield with_prefix(prefix, metric, labels)


def _num_running(status: ClusterStatus) -> float:
    return min(status.state.get("running", 0), status.open + status.queued)


def _num_waiting(status: ClusterStatus) -> float:
    return status.open + status.queued - _num_running(status)


def _gauge(value: Callable[[ClusterStatus], float]) -> Read:
    """A value that is always known."""
    return lambda status: [("", {}, value(status))]


def _state(name: str) -> Read:
    """A value that the head reports, once it has."""
    return lambda status: [("", {}, status.state[name])] if status.state else []


def _kv_usage(status: ClusterStatus) -> list[Sample]:
    state = status.state
    return [("", {}, state["kv_slots_held"] / max(state["kv_slots"], 1))] if state else []


def _cache_config(status: ClusterStatus) -> list[Sample]:
    if not status.state:
        return []
    return [("", {"block_size": "1", "num_gpu_blocks": str(status.state["kv_slots"])}, 1)]


def _total(name: str) -> Read:
    """A count."""
    return lambda status: [("_total", {}, status.totals[name])]


def _total_if_any(name: str) -> Read:
    """A count that only some clusters have."""
    return lambda status: [("_total", {}, status.totals[name])] if status.totals.get(name) else []


def _by(name: str, label: str, first: int, *, offset: int = 0, scale: float = 1.0) -> Read:
    """A count times `scale`, by a label: whole numbers from `first` on, to which `offset` is
    added."""

    def read(status: ClusterStatus) -> list[Sample]:
        found = {int(number): count for number, count in labelled(status.totals, name).items()}
        return [
            ("_total", {label: str(number + offset)}, found[number] * scale)
            for number in sorted(found)
            if number >= first
        ]

    return read


def _seconds_by_stage(name: str) -> Read:
    """Seconds by stage."""
    return _by(name, "stage", 1, scale=1e-9)


def _rows(status: ClusterStatus) -> list[Sample]:
    kinds = {"decided": "root_rows", "prompt": "prompt_rows", "draft": "draft_rows"}
    return [("_total", {"kind": kind}, status.totals[name]) for kind, name in kinds.items()]


def _accepted(status: ClusterStatus) -> list[Sample]:
    hits = labelled(status.totals, "hits")
    return [("_total", {}, sum(count for depth, count in hits.items() if depth != "0"))]


def _step_tokens(status: ClusterStatus) -> list[Sample]:
    steps = {float(most): count for most, count in labelled(status.totals, "step_tokens").items()}
    up_to = accumulate(steps.get(most, 0) for most in STEP_TOKENS)
    read_and_decided = status.totals["prompt_rows"] + status.totals["tokens"]
    return [
        *(
            ("_bucket", {"le": floatToGoString(most)}, count)
            for most, count in zip(STEP_TOKENS, up_to, strict=True)
        ),
        ("_count", {}, sum(steps.values())),
        ("_sum", {}, read_and_decided),
    ]


def _busy(status: ClusterStatus) -> list[Sample]:
    return [("", {"stage": stage}, share) for stage, share in status.busy.items()]


def _rank_info(status: ClusterStatus) -> list[Sample]:
    return [
        (
            "",
            {
                "rank": str(rank),
                "attention": how["attention"],
                "graph_rows": ",".join(map(str, how["graph_rows"])),
                "compiled": str(how["compiled"]).lower(),
            },
            1,
        )
        for rank, how in status.computing.items()
    ]


def _rank_places(status: ClusterStatus) -> list[Sample]:
    if not status.assignment:
        return []
    assigned = RankAssignment.decode(status.assignment)
    places: list[Sample] = []
    for rank, worker in enumerate(assigned.workers):
        layers = assigned.layers[rank - 1] if rank else range(0)
        place = {
            "rank": str(rank),
            "host": worker.rpartition("/")[0],
            "device": status.computing.get(rank, {}).get("device", ""),
            "devices": str(len(assigned.members(rank))),
            "layers": f"{layers.start}-{layers.stop - 1}" if layers else "",
        }
        places.append(("", place, 1.0))
    return places


def _faults(status: ClusterStatus) -> list[Sample]:
    return [("_total", {"kind": kind}, status.faults.get(kind, 0)) for kind in FaultKind]


def _times(count: str, nanoseconds: str) -> Read:
    """A summary of durations: their count and their sum."""
    return lambda status: [
        ("_count", {}, status.totals[count]),
        ("_sum", {}, status.totals[nanoseconds] / 1e9),
    ]


CLUSTER_METRICS = tuple(
    ClusterMetric(*row)
    for row in (
        ("epoch", GAUGE, OWN, _gauge(lambda o: o.epoch), "Epoch: starts and recoveries so far"),
        ("ranks", GAUGE, OWN, _gauge(lambda o: o.joined), "Ranks that have joined the epoch"),
        ("num_requests_running", GAUGE, BOTH, _gauge(_num_running), "Requests being decoded"),
        ("num_requests_waiting", GAUGE, BOTH, _gauge(_num_waiting), "Requests that wait"),
        ("kv_cache_usage_perc", GAUGE, BOTH, _kv_usage, "Share of KV slots in use, 0 to 1"),
        ("kv_slots", GAUGE, OWN, _state("kv_slots"), "KV slots of every stage"),
        ("kv_slots_held", GAUGE, OWN, _state("kv_slots_held"), "KV slots in use"),
        (
            "kv_slots_retained",
            GAUGE,
            OWN,
            _state("kv_slots_retained"),
            "KV slots of the prefix cache",
        ),
        ("prefix_cache_queries", COUNTER, BOTH, _total("cache_queries"), "Prompt tokens looked up"),
        ("prefix_cache_hits", COUNTER, BOTH, _total("cache_hits"), "Prompt tokens found in KV"),
        ("row_budget", GAUGE, OWN, _state("row_budget"), "Rows per step, not counting prefill"),
        ("cache_config_info", GAUGE, BOTH, _cache_config, "KV slots, as blocks of one token"),
        ("num_preemptions", COUNTER, BOTH, _total("preemptions"), "Requests that were preempted"),
        ("steps", COUNTER, OWN, _total("steps"), "Steps with rows"),
        ("decided_tokens", COUNTER, OWN, _total("tokens"), "Tokens generated for all clients"),
        ("iteration_tokens_total", HISTOGRAM, BOTH, _step_tokens, "Prompt and new tokens per step"),
        ("rows", COUNTER, OWN, _rows, "Rows, by kind"),
        ("spec_decode_num_drafts", COUNTER, BOTH, _total("rounds"), "Draft rounds"),
        (
            "spec_decode_num_draft_tokens",
            COUNTER,
            BOTH,
            _total("draft_rows"),
            "Draft tokens verified",
        ),
        ("spec_decode_num_accepted_tokens", COUNTER, BOTH, _accepted, "Draft tokens accepted"),
        (
            *("spec_decode_num_accepted_tokens_per_pos", COUNTER, BOTH),
            *(_by("hits", "position", 1, offset=-1), "Draft tokens accepted, by depth - 1"),
        ),
        ("draft_rows", COUNTER, OWN, _by("fed", "depth", 1), "Draft tokens verified, by depth"),
        ("draft_hits", COUNTER, OWN, _by("hits", "depth", 1), "Draft tokens accepted, by depth"),
        (
            *("draft_hits_expected", COUNTER, OWN),
            *(_by("expected", "depth", 1), "Acceptances that the proposer predicted, by depth"),
        ),
        ("mid_passes", COUNTER, OWN, _total_if_any("mid_passes"), "Passes of the mid-size model"),
        (
            "mid_scored",
            COUNTER,
            OWN,
            _total_if_any("scored"),
            "Nodes that the mid-size model scored",
        ),
        ("rank_info", GAUGE, OWN, _rank_info, "How each rank computes"),
        ("rank_place_info", GAUGE, OWN, _rank_places, "Each rank's host, device and layers"),
        ("stage_busy_share", GAUGE, OWN, _busy, "Share of time with requests spent computing"),
        (
            "stage_active_seconds",
            COUNTER,
            OWN,
            _seconds_by_stage("active_ns"),
            "Time with requests",
        ),
        ("stage_busy_seconds", COUNTER, OWN, _seconds_by_stage("busy_ns"), "Time spent computing"),
        ("stage_receive_seconds", COUNTER, OWN, _seconds_by_stage("receive_ns"), "Time receiving"),
        ("stage_send_seconds", COUNTER, OWN, _seconds_by_stage("send_ns"), "Time sending"),
        ("faults", COUNTER, OWN, _faults, "Epochs ended by a fault, by its kind"),
        (
            *("recovery_seconds", SUMMARY, OWN),
            *(
                _times(fault_stats.RECOVERIES, fault_stats.RECOVERY_NS),
                "From a fault until all ranks joined",
            ),
        ),
        (
            *("resumption_seconds", SUMMARY, OWN),
            *(
                _times(fault_stats.RESUMPTIONS, fault_stats.RESUMPTION_NS),
                "From a fault to the next token",
            ),
        ),
    )
)
