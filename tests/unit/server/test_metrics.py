"""What /metrics says of a server's answers and of a cluster, as Prometheus reads it."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pipespec.controller.cluster_status import ClusterStatus
from pipespec.core import SamplingParams
from pipespec.server.metrics import Metrics
from pipespec.server.request_parsing import ParsedRequest

ASK = ParsedRequest(
    prompts=((1, 2, 3), (4, 5)),
    echo_texts=(),
    n=2,
    sampling_params=(SamplingParams(),) * 4,
    max_tokens=(16, 7),
    stop=(),
    eos=(),
    priority=0,
    prompt_logprobs=None,
)
LABELS = {"model_name": "m", "engine": "0"}
STATE = {
    "running": 3,
    "waiting": 1,
    "kv_slots": 200,
    "kv_slots_held": 50,
    "kv_slots_retained": 90,
    "row_budget": 16,
}
# Of this epoch; and of those before, with what the launcher has counted of faults.
COUNTS = {
    "steps": 10,
    "tokens": 6,
    "rounds": 4,
    "preemptions": 1,
    "cache_queries": 40,
    "cache_hits": 30,
    "root_rows": 2,
    "prompt_rows": 30,
    "draft_rows": 12,
    "fed/0": 2,
    "fed/1": 8,
    "fed/2": 4,
    "hits/0": 2,
    "hits/1": 3,
    "hits/3": 1,
    "step_tokens/1": 5,
    "step_tokens/4": 4,
    "step_tokens/inf": 1,
    "active_ns/1": 4 * 10**9,
    "busy_ns/1": 3 * 10**9,
    "receive_ns/1": 10**8,
    "active_ns/2": 4 * 10**9,
    "busy_ns/2": 10**9,
    "send_ns/1": 10**7,
}
PAST = {
    "steps": 100,
    "tokens": 60,
    "hits/1": 40,
    "hits/0": 20,
    "step_tokens/2": 100,
    "busy_ns/1": 7 * 10**9,
    "prompt_rows": 3,
    "faults/worker_ended": 2,
    "recoveries": 2,
    "recovery_ns": 5 * 10**9,
}
COMPUTING = {
    1: {"attention": "triton", "graph_rows": [16, 64], "compiled": False, "refused": []},
    2: {"attention": "sdpa", "graph_rows": [], "compiled": True, "refused": ["It is old."]},
}
SEEN = ClusterStatus(5, 3, 4, 2, 9, None, STATE, COUNTS, PAST, COMPUTING)


class Read:
    """What Prometheus reads in a text."""

    def __init__(self, text: bytes):
        self.families = {
            family.name: family for family in text_string_to_metric_families(text.decode())
        }

    def value(self, name: str, **labels: str) -> float:
        """Of the one sample of a name with these labels, beside those that all have."""
        found = [
            sample.value
            for family in self.families.values()
            for sample in family.samples
            if sample.name == name and sample.labels == LABELS | labels
        ]
        assert len(found) == 1, f"{len(found)} of {name}{labels}"
        return found[0]

    def has(self, name: str) -> bool:
        return any(sample.name == name for f in self.families.values() for sample in f.samples)


# By name with its labels; `per_pos` and the like have those of their kind.
SHARED = {
    ("num_requests_running",): 3,
    ("num_requests_waiting",): 3,
    ("kv_cache_usage_perc",): 0.25,
    ("cache_config_info", "block_size", "1", "num_gpu_blocks", "200"): 1,
    ("num_preemptions_total",): 1,
    ("prefix_cache_queries_total",): 40,
    ("prefix_cache_hits_total",): 30,
    ("spec_decode_num_drafts_total",): 4,
    ("spec_decode_num_draft_tokens_total",): 12,
    ("spec_decode_num_accepted_tokens_total",): 44,
    ("spec_decode_num_accepted_tokens_per_pos_total", "position", "0"): 43,
    ("spec_decode_num_accepted_tokens_per_pos_total", "position", "2"): 1,
    ("iteration_tokens_total_count",): 110,
    ("iteration_tokens_total_sum",): 33 + 66,
    ("iteration_tokens_total_bucket", "le", "1.0"): 5,
    ("iteration_tokens_total_bucket", "le", "2.0"): 105,
    ("iteration_tokens_total_bucket", "le", "4.0"): 109,
    ("iteration_tokens_total_bucket", "le", "4096.0"): 109,
    ("iteration_tokens_total_bucket", "le", "+Inf"): 110,
}
OWN = {
    ("cluster_up",): 1,
    ("epoch",): 5,
    ("ranks",): 3,
    ("kv_slots",): 200,
    ("kv_slots_held",): 50,
    ("kv_slots_retained",): 90,
    ("steps_total",): 110,
    ("decided_tokens_total",): 66,
    ("rows_total", "kind", "decided"): 2,
    ("rows_total", "kind", "prompt"): 33,
    ("rows_total", "kind", "draft"): 12,
    ("draft_rows_total", "depth", "2"): 4,
    ("draft_hits_total", "depth", "1"): 43,
    ("stage_busy_share", "stage", "1"): 0.75,
    ("stage_busy_share", "stage", "2"): 0.25,
    ("stage_busy_seconds_total", "stage", "1"): 10,
    ("stage_active_seconds_total", "stage", "2"): 4,
    ("stage_receive_seconds_total", "stage", "1"): 0.1,
    ("stage_send_seconds_total", "stage", "1"): 0.01,
    ("faults_total", "kind", "worker_ended"): 2,
    ("faults_total", "kind", "redis_gone"): 0,
    ("recovery_seconds_sum",): 5,
    ("recovery_seconds_count",): 2,
    ("resumption_seconds_count",): 0,
}


def test_cluster_metrics_are_exported_under_their_prefixes() -> None:
    read = Read(Metrics("m").prometheus_text(SEEN))
    rows = [(prefix, SHARED) for prefix in ("pipespec_", "vllm:")] + [("pipespec_", OWN)]
    for prefix, expected in rows:
        for (name, *pairs), value in expected.items():
            labels = dict(zip(pairs[::2], pairs[1::2], strict=True))
            assert read.value(prefix + name, **labels) == pytest.approx(value), name
    kinds = {"num_preemptions": "counter", "iteration_tokens_total": "histogram"}
    kinds["recovery_seconds"] = "summary"
    assert {name: read.families[f"pipespec_{name}"].type for name in kinds} == kinds
    graphs = {"attention": "triton", "graph_rows": "16,64", "compiled": "false"}
    assert read.value("pipespec_rank_info", rank="1", **graphs) == 1
    plain = {"attention": "sdpa", "graph_rows": "", "compiled": "true"}
    assert read.value("pipespec_rank_info", rank="2", **plain) == 1
    assert not read.has("vllm:draft_hits_total")


def test_unknown_values_are_left_out() -> None:
    away = Read(Metrics("m").prometheus_text(None))
    assert away.value("pipespec_cluster_up") == 0
    for name in ("num_requests_running", "num_preemptions_total", "kv_cache_usage_perc"):
        assert not away.has(f"pipespec_{name}")
        assert not away.has(f"vllm:{name}")
    assert away.value("vllm:generation_tokens_total") == 0  # of this server it is known
    # An epoch without reports: the counts of earlier epochs stay.
    begun = Read(Metrics("m").prometheus_text(ClusterStatus(6, 1, 0, 2, 9, None, {}, {}, PAST)))
    assert begun.value("pipespec_steps_total") == 100
    assert begun.value("vllm:num_requests_waiting") == 2
    for name in ("pipespec_kv_slots", "vllm:kv_cache_usage_perc", "pipespec_stage_busy_share"):
        assert not begun.has(name)


def test_metric_names_are_unique_and_all_have_both_labels() -> None:
    names = set()
    for family in text_string_to_metric_families(Metrics("m").prometheus_text(SEEN).decode()):
        assert family.name not in names
        names.add(family.name)
        for sample in family.samples:
            assert LABELS.items() <= sample.labels.items()


def test_times_of_a_request_add_up() -> None:
    now = [100.0]
    metrics = Metrics("m", clock=lambda: now[0])
    first, second, third, fourth = metrics.request_arrived(ASK)
    assert metrics.unfinished == 4
    now[0] += 5
    first.add_tokens(2)
    second.add_tokens(1)
    now[0] += 3
    first.add_tokens(3)
    first.finished("stop", 4 * 10**9)
    first.finished("abort")  # it has ended before
    second.finished("length")  # by a head that does not know what its first token took
    third.finished("abort")
    fourth.finished("abort")
    read = Read(metrics.prometheus_text(None))
    sums = {
        "time_to_first_token_seconds": (2, 10),
        "inter_token_latency_seconds": (3, 3),
        "request_queue_time_seconds": (1, 1),
        "request_prefill_time_seconds": (1, 4),
        "request_decode_time_seconds": (2, 6),
        "request_inference_time_seconds": (1, 4 + 3),
        "e2e_request_latency_seconds": (4, 32),
        "request_prompt_tokens": (2, 5),
        "request_generation_tokens": (4, 6),
        "request_params_n": (1, 2),
        "request_params_max_tokens": (2, 23),
    }
    for prefix in ("pipespec_", "vllm:"):
        for name, counted in sums.items():
            found = [read.value(f"{prefix}{name}_{part}") for part in ("count", "sum")]
            assert (*found,) == counted, name
        assert read.value(f"{prefix}prompt_tokens_total") == 5
        assert read.value(f"{prefix}generation_tokens_total") == 6
        for reason, count in (("stop", 1), ("length", 1), ("abort", 2)):
            name = f"{prefix}request_success_total"
            assert read.value(name, finished_reason=reason) == count
    assert metrics.unfinished == 0
