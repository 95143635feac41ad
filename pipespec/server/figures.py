"""Every figure of /metrics: what it is called, and what of the cluster it says.

One name each, which Prometheus sees under our prefix and, where vLLM has such a figure, under
vLLM's too. What cannot be known is left out, never 0 instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import Counter, Histogram, Metric
from prometheus_client.utils import floatToGoString

from pipespec.cluster import faults
from pipespec.cluster.faults import FaultKind
from pipespec.cluster.rank_assignment import RankAssignment
from pipespec.controller.overview import Overview, labelled
from pipespec.core import STEP_TOKENS

OURS, VLLM = "pipespec_", "vllm:"
BOTH, OWN = (OURS, VLLM), (OURS,)
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

GAUGE, COUNTER, HISTOGRAM, SUMMARY = "gauge", "counter", "histogram", "summary"
# What is added to a name, labels, and a value.
Sample = tuple[str, Mapping[str, str], float]
Read = Callable[[Overview], Iterable[Sample]]


# --- of the answers of one server ---------------------------------------------------------------


class Served:
    """What one server counts of its own answers, without prefixes."""

    def __init__(self) -> None:
        self.prompt_tokens = _counter("prompt_tokens", "Tokens of prompts")
        self.generation_tokens = _counter("generation_tokens", "Tokens of answers")
        self.success = Counter(
            "request_success", "Answers by why they ended", ("finished_reason",), registry=None
        )
        for reason in ENDS:
            self.success.labels(reason)  # 0 is a figure too
        self.ttft = _seconds("time_to_first_token_seconds", "From request to first token")
        self.itl = _seconds("inter_token_latency_seconds", "Between tokens")
        self.e2e = _seconds("e2e_request_latency_seconds", "From request to last token")
        self.queue = _seconds("request_queue_time_seconds", "From request to its opening")
        self.prefill = _seconds("request_prefill_time_seconds", "From its opening to first token")
        self.decode = _seconds("request_decode_time_seconds", "From first to last token")
        self.inference = _seconds(
            "request_inference_time_seconds", "From its opening to last token"
        )
        self.prompt = _histogram("request_prompt_tokens", "Tokens of a prompt", COUNTS)
        self.answer = _histogram("request_generation_tokens", "Tokens of an answer", COUNTS)
        self.n = _histogram("request_params_n", "Answers asked for", CHOICES)
        self.longest = _histogram("request_params_max_tokens", "Longest answer wanted", COUNTS)

    def collect(self) -> Iterable[Metric]:
        for figure in vars(self).values():
            yield from figure.collect()


def _counter(name: str, text: str) -> Counter:
    return Counter(name, text, registry=None)


def _histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
    return Histogram(name, text, buckets=buckets, registry=None)


def _seconds(name: str, text: str) -> Histogram:
    return _histogram(name, text, SECONDS)


# --- of the cluster, whoever asks ---------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """What of a cluster is told under one name; a counter's is without "_total".

    `read` takes it from what the cluster says; nothing: that is not known.
    """

    name: str
    kind: str
    prefixes: Sequence[str]
    read: Read
    text: str

    def metric(self, seen: Overview) -> Metric:
        """The figure without a prefix."""
        metric = Metric(self.name, self.text, self.kind)
        for suffix, labels, value in self.read(seen):
            metric.add_sample(self.name + suffix, dict(labels), value)
        return metric


def under(prefix: str, metric: Metric, labels: Mapping[str, str]) -> Metric:
    """The same figure under a prefix, with more labels."""
    found = Metric(prefix + metric.name, metric.documentation, metric.type)
    for sample in metric.samples:
        found.add_sample(prefix + sample.name, {**labels, **sample.labels}, sample.value)
    return found


def of_cluster(seen: Overview | None, labels: Mapping[str, str]) -> Iterable[Metric]:
    """All figures of a cluster; None: it does not answer."""
    up = Metric("cluster_up", "Whether the cluster answers", GAUGE)
    up.add_sample(up.name, {}, float(seen is not None))
    yield under(OURS, up, labels)
    for figure in CLUSTER if seen is not None else ():
        assert seen is not None
        metric = figure.metric(seen)
        for prefix in figure.prefixes if metric.samples else ():
            yield under(prefix, metric, labels)


def _gauge(value: float) -> list[Sample]:
    return [("", {}, value)]


def _epoch(seen: Overview) -> list[Sample]:
    return _gauge(seen.epoch)


def _ranks(seen: Overview) -> list[Sample]:
    return _gauge(seen.joined)


def _num_running(seen: Overview) -> int:
    return min(seen.state.get("running", 0), seen.open + seen.queued)


def _running(seen: Overview) -> list[Sample]:
    return _gauge(_num_running(seen))


def _waiting(seen: Overview) -> list[Sample]:
    return _gauge(seen.open + seen.queued - _num_running(seen))


def _state(name: str) -> Read:
    """What the head says of this moment, if it has."""
    return lambda seen: _gauge(seen.state[name]) if seen.state else []


def _kv_usage(seen: Overview) -> list[Sample]:
    state = seen.state
    return _gauge(state["kv_slots_held"] / max(state["kv_slots"], 1)) if state else []


def _cache_config(seen: Overview) -> list[Sample]:
    if not seen.state:
        return []
    return [("", {"block_size": "1", "num_gpu_blocks": str(seen.state["kv_slots"])}, 1)]


def _total(name: str) -> Read:
    """A count."""
    return lambda seen: [("_total", {}, seen.totals[name])]


def _total_if_any(name: str) -> Read:
    """A count that only some clusters have."""
    return lambda seen: [("_total", {}, seen.totals[name])] if seen.totals.get(name) else []


def _by(name: str, label: str, first: int, *, less: int = 0, scale: float = 1.0) -> Read:
    """A count times `scale`, by a label that is a whole number from `first` on, told `less` as
    much."""

    def read(seen: Overview) -> list[Sample]:
        found = {int(number): count for number, count in labelled(seen.totals, name).items()}
        return [
            ("_total", {label: str(number - less)}, found[number] * scale)
            for number in sorted(found)
            if number >= first
        ]

    return read


_by_position = _by("hits", "position", 1, less=1)


def _spent(name: str) -> Read:
    """Seconds by stage."""
    return _by(name, "stage", 1, scale=1e-9)


def _rows(seen: Overview) -> list[Sample]:
    kinds = {"decided": "root_rows", "prompt": "prompt_rows", "guess": "guess_rows"}
    return [("_total", {"kind": kind}, seen.totals[name]) for kind, name in kinds.items()]


def _accepted(seen: Overview) -> list[Sample]:
    hits = labelled(seen.totals, "hits")
    return [("_total", {}, sum(count for depth, count in hits.items() if depth != "0"))]


def _step_tokens(seen: Overview) -> list[Sample]:
    steps = {float(most): count for most, count in labelled(seen.totals, "step_tokens").items()}
    up_to = accumulate(steps.get(most, 0) for most in STEP_TOKENS)
    read_and_decided = seen.totals["prompt_rows"] + seen.totals["tokens"]
    return [
        *(
            ("_bucket", {"le": floatToGoString(most)}, count)
            for most, count in zip(STEP_TOKENS, up_to, strict=True)
        ),
        ("_count", {}, sum(steps.values())),
        ("_sum", {}, read_and_decided),
    ]


def _busy(seen: Overview) -> list[Sample]:
    return [("", {"stage": stage}, share) for stage, share in seen.busy.items()]


def _computing(seen: Overview) -> list[Sample]:
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
        for rank, how in seen.computing.items()
    ]


def _places(seen: Overview) -> list[Sample]:
    if not seen.assignment:
        return []
    assigned = RankAssignment.decode(seen.assignment)
    told: list[Sample] = []
    for rank, worker in enumerate(assigned.workers):
        layers = assigned.layers[rank - 1] if rank else range(0)
        place = {
            "rank": str(rank),
            "host": worker.rpartition("/")[0],
            "device": seen.computing.get(rank, {}).get("device", ""),
            "devices": str(len(assigned.members(rank))),
            "layers": f"{layers.start}-{layers.stop - 1}" if layers else "",
        }
        told.append(("", place, 1.0))
    return told


def _faults(seen: Overview) -> list[Sample]:
    return [("_total", {"kind": kind}, seen.faults.get(kind, 0)) for kind in FaultKind]


def _times(count: str, nanoseconds: str) -> Read:
    """How often something took time, and how long altogether."""
    return lambda seen: [
        ("_count", {}, seen.totals[count]),
        ("_sum", {}, seen.totals[nanoseconds] / 1e9),
    ]


_recoveries = _times(faults.RECOVERIES, faults.RECOVERY_NS)
_resumptions = _times(faults.RESUMPTIONS, faults.RESUMPTION_NS)


CLUSTER = (
    Figure("epoch", GAUGE, OWN, _epoch, "Lives of the cluster between faults"),
    Figure("ranks", GAUGE, OWN, _ranks, "Ranks that take part"),
    Figure("num_requests_running", GAUGE, BOTH, _running, "Answers that are decoded"),
    Figure("num_requests_waiting", GAUGE, BOTH, _waiting, "Answers that wait"),
    Figure("kv_cache_usage_perc", GAUGE, BOTH, _kv_usage, "Share of KV slots in use, 0 to 1"),
    Figure("kv_slots", GAUGE, OWN, _state("kv_slots"), "KV slots of every stage"),
    Figure("kv_slots_held", GAUGE, OWN, _state("kv_slots_held"), "KV slots in use"),
    Figure("kv_slots_retained", GAUGE, OWN, _state("kv_slots_retained"), "Others, with text"),
    Figure("prefix_cache_queries", COUNTER, BOTH, _total("cache_queries"), "Tokens looked up"),
    Figure("prefix_cache_hits", COUNTER, BOTH, _total("cache_hits"), "Of those, found in KV"),
    Figure("row_budget", GAUGE, OWN, _state("row_budget"), "Rows of a step beside prompts"),
    Figure("cache_config_info", GAUGE, BOTH, _cache_config, "KV slots, as blocks of a token"),
    Figure("num_preemptions", COUNTER, BOTH, _total("preemptions"), "Requests put back"),
    Figure("steps", COUNTER, OWN, _total("steps"), "Steps that fed rows"),
    Figure("decided_tokens", COUNTER, OWN, _total("tokens"), "Tokens decided, for whomever"),
    Figure("iteration_tokens_total", HISTOGRAM, BOTH, _step_tokens, "Read and decided in a step"),
    Figure("rows", COUNTER, OWN, _rows, "Rows fed, by kind"),
    Figure("spec_decode_num_drafts", COUNTER, BOTH, _total("rounds"), "Draft rounds"),
    Figure("spec_decode_num_draft_tokens", COUNTER, BOTH, _total("guess_rows"), "Guesses fed"),
    Figure("spec_decode_num_accepted_tokens", COUNTER, BOTH, _accepted, "Of those, accepted"),
    Figure("spec_decode_num_accepted_tokens_per_pos", COUNTER, BOTH, _by_position, "By depth - 1"),
    Figure("guess_rows", COUNTER, OWN, _by("fed", "depth", 1), "Guesses fed, by depth then"),
    Figure("guess_hits", COUNTER, OWN, _by("hits", "depth", 1), "Of those, accepted"),
    Figure("guess_hits_expected", COUNTER, OWN, _by("expected", "depth", 1), "As stated"),
    Figure("mid_passes", COUNTER, OWN, _total_if_any("mid_passes"), "Of the mid-size model"),
    Figure("mid_scored", COUNTER, OWN, _total_if_any("scored"), "Nodes that it scored"),
    Figure("rank_info", GAUGE, OWN, _computing, "How each rank computes"),
    Figure("rank_place_info", GAUGE, OWN, _places, "Where each rank is, with which layers"),
    Figure("stage_busy_share", GAUGE, OWN, _busy, "Of this epoch's time with requests"),
    Figure("stage_active_seconds", COUNTER, OWN, _spent("active_ns"), "Time with requests"),
    Figure("stage_busy_seconds", COUNTER, OWN, _spent("busy_ns"), "Of that, computing"),
    Figure("stage_receive_seconds", COUNTER, OWN, _spent("receive_ns"), "Of that, receiving"),
    Figure("stage_send_seconds", COUNTER, OWN, _spent("send_ns"), "Of that, sending"),
    Figure("faults", COUNTER, OWN, _faults, "Epochs that ended by a fault, by its kind"),
    Figure("recovery_seconds", SUMMARY, OWN, _recoveries, "From a fault to all ranks there"),
    Figure("resumption_seconds", SUMMARY, OWN, _resumptions, "From a fault to the next token"),
)
