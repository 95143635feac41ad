"""What /metrics says of a server's answers and of a cluster, as Prometheus reads it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pipespec.controller.overview import Overview
from pipespec.core import Sampling
from pipespec.server.asking import Ask
from pipespec.server.metrics import Metrics

ASK = Ask(
    prompts=((1, 2, 3), (4, 5)),
    texts=(),
    n=2,
    samplings=(Sampling(),) * 4,
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
    "guess_rows": 12,
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
SEEN = Overview(5, 3, 4, 2, 9, None, STATE, COUNTS, PAST, COMPUTING)


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

    def kind(self, name: str) -> str:
        return self.families[name].type


def test_figures_of_a_cluster_are_what_it_says_under_both_prefixes() -> None:
    read = Read(Metrics("m").show(SEEN))
    for prefix in ("pipespec_", "vllm:"):
        told = lambda name, prefix=prefix, **labels: read.value(prefix + name, **labels)  # noqa: E731
        assert (told("num_requests_running"), told("num_requests_waiting")) == (3, 3)
        assert told("kv_cache_usage_perc") == 0.25
        assert told("cache_config_info", block_size="1", num_gpu_blocks="200") == 1
        assert told("num_preemptions_total") == 1
        assert told("prefix_cache_queries_total") == 40
        assert told("prefix_cache_hits_total") == 30
        assert told("spec_decode_num_drafts_total") == 4
        assert told("spec_decode_num_draft_tokens_total") == 12
        assert told("spec_decode_num_accepted_tokens_total") == 44
        by_position = "spec_decode_num_accepted_tokens_per_pos_total"
        assert told(by_position, position="0") == 43
        assert told(by_position, position="2") == 1
        assert read.kind(f"{prefix}num_preemptions") == "counter"
        assert read.kind(f"{prefix}iteration_tokens_total") == "histogram"
        assert told("iteration_tokens_total_count") == 110
        assert told("iteration_tokens_total_sum") == 33 + 66
        sizes = [("1.0", 5), ("2.0", 105), ("4.0", 109), ("4096.0", 109), ("+Inf", 110)]
        for most, steps in sizes:
            assert told("iteration_tokens_total_bucket", le=most) == steps
    assert read.value("pipespec_cluster_up") == 1
    assert (read.value("pipespec_epoch"), read.value("pipespec_ranks")) == (5, 3)
    assert (read.value("pipespec_kv_slots"), read.value("pipespec_kv_slots_held")) == (200, 50)
    assert read.value("pipespec_kv_slots_retained") == 90
    assert read.value("pipespec_steps_total") == 110
    assert read.value("pipespec_decided_tokens_total") == 66
    rows = [read.value("pipespec_rows_total", kind=k) for k in ("decided", "prompt", "guess")]
    assert rows == [2, 33, 12]
    assert read.value("pipespec_guess_rows_total", depth="2") == 4
    assert read.value("pipespec_guess_hits_total", depth="1") == 43
    assert not read.has("vllm:guess_hits_total")
    assert not read.has("pipespec_mid_scored_total")


def test_a_cascade_tells_what_its_mid_size_model_has_done() -> None:
    counts = COUNTS | {"mid_passes": 2, "scored": 90}
    read = Read(Metrics("m").show(replace(SEEN, counts=counts)))
    assert read.value("pipespec_mid_passes_total") == 2
    assert read.value("pipespec_mid_scored_total") == 90


def test_what_stages_and_the_launcher_say_is_told_too() -> None:
    read = Read(Metrics("m").show(SEEN))
    assert read.value("pipespec_stage_busy_share", stage="1") == 0.75
    assert read.value("pipespec_stage_busy_share", stage="2") == 0.25
    assert read.value("pipespec_stage_busy_seconds_total", stage="1") == pytest.approx(10)
    assert read.value("pipespec_stage_active_seconds_total", stage="2") == pytest.approx(4)
    assert read.value("pipespec_stage_receive_seconds_total", stage="1") == pytest.approx(0.1)
    assert read.value("pipespec_stage_send_seconds_total", stage="1") == pytest.approx(0.01)
    assert read.value("pipespec_faults_total", kind="worker_ended") == 2
    graphs = {"attention": "triton", "graph_rows": "16,64", "compiled": "false"}
    assert read.value("pipespec_rank_info", rank="1", **graphs) == 1
    plain = {"attention": "sdpa", "graph_rows": "", "compiled": "true"}
    assert read.value("pipespec_rank_info", rank="2", **plain) == 1
    assert read.value("pipespec_faults_total", kind="redis_gone") == 0
    assert read.kind("pipespec_recovery_seconds") == "summary"
    assert read.value("pipespec_recovery_seconds_sum") == 5
    assert read.value("pipespec_recovery_seconds_count") == 2
    assert read.value("pipespec_resumption_seconds_count") == 0


def test_what_cannot_be_known_is_left_out() -> None:
    away = Read(Metrics("m").show(None))
    assert away.value("pipespec_cluster_up") == 0
    for name in ("num_requests_running", "num_preemptions_total", "kv_cache_usage_perc"):
        assert not away.has(f"pipespec_{name}")
        assert not away.has(f"vllm:{name}")
    assert away.value("vllm:generation_tokens_total") == 0  # of this server it is known
    # An epoch in which nobody has said anything: what was counted before stays.
    begun = Read(Metrics("m").show(Overview(6, 1, 0, 2, 9, None, {}, {}, PAST)))
    assert begun.value("pipespec_steps_total") == 100
    assert begun.value("vllm:num_requests_waiting") == 2
    for name in ("pipespec_kv_slots", "vllm:kv_cache_usage_perc", "pipespec_stage_busy_share"):
        assert not begun.has(name)


def test_no_figure_is_named_twice_and_all_have_both_labels() -> None:
    names = set()
    for family in text_string_to_metric_families(Metrics("m").show(SEEN).decode()):
        assert family.name not in names
        names.add(family.name)
        for sample in family.samples:
            assert LABELS.items() <= sample.labels.items()


def test_every_figure_is_explained() -> None:
    """docs/serving.md names each, without prefix in its tables."""
    text = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()
    for family in text_string_to_metric_families(Metrics("m").show(SEEN).decode()):
        name = family.name.removeprefix("pipespec_").removeprefix("vllm:")
        name = f"{name}_total" if family.type == "counter" else name
        if not name.endswith("_created"):  # Prometheus' package adds these
            assert re.search(rf"`{name}[`{{]", text), name


def test_the_times_of_an_answer_add_up() -> None:
    now = [100.0]
    metrics = Metrics("m", clock=lambda: now[0])
    first, second, third, fourth = metrics.asked(ASK)
    assert metrics.unfinished == 4
    now[0] += 5
    first.heard(2)
    second.heard(1)
    now[0] += 3
    first.heard(3)
    first.ended("stop", 4 * 10**9)
    first.ended("abort")  # it has ended before
    second.ended("length")  # by a head that does not know what its first token took
    third.ended("abort")
    fourth.ended("abort")
    read = Read(metrics.show(None))
    for prefix in ("pipespec_", "vllm:"):

        def summed(name: str, prefix: str = prefix) -> tuple[float, float]:
            return read.value(f"{prefix}{name}_count"), read.value(f"{prefix}{name}_sum")

        assert summed("time_to_first_token_seconds") == (2, 10)
        assert summed("inter_token_latency_seconds") == (3, 3)
        assert summed("request_queue_time_seconds") == (1, 1)
        assert summed("request_prefill_time_seconds") == (1, 4)
        assert summed("request_decode_time_seconds") == (2, 6)
        assert summed("request_inference_time_seconds") == (1, 4 + 3)
        assert summed("e2e_request_latency_seconds") == (4, 32)
        assert summed("request_prompt_tokens") == (2, 5)
        assert summed("request_generation_tokens") == (4, 6)
        assert summed("request_params_n") == (1, 2)
        assert summed("request_params_max_tokens") == (2, 23)
        assert read.value(f"{prefix}prompt_tokens_total") == 5
        assert read.value(f"{prefix}generation_tokens_total") == 6
        reasons = [
            read.value(f"{prefix}request_success_total", finished_reason=reason)
            for reason in ("stop", "length", "abort")
        ]
        assert reasons == [1, 1, 2]
    assert metrics.unfinished == 0
