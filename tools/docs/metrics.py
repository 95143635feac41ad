"""Write the sections of docs/metrics.md, the reference of `GET /metrics`, from the metrics.

python -m tools.docs.metrics
"""

from __future__ import annotations

from prometheus_client import Metric

from pipespec.cluster.deployment.rank_assignment import RankAssignment
from pipespec.controller.cluster_status import ClusterStatus
from pipespec.server.metrics import OURS, VLLM, RequestMetrics, cluster_metrics
from tools.docs.markdown import ROOT, by_hand, table

PAGE = ROOT / "docs" / "metrics.md"


def sample_status() -> ClusterStatus:
    """A cluster of which everything is known, so that each metric has samples with its labels."""
    per_label = {"fed", "hits", "expected", "active_ns", "busy_ns", "receive_ns", "send_ns"}
    counts = {f"{name}/1": 1 for name in per_label} | {"step_tokens/1": 1}
    state = dict.fromkeys(
        ("running", "kv_slots", "kv_slots_held", "kv_slots_retained", "row_budget"), 1
    )
    computing = {1: {"attention": "sdpa", "graph_rows": [], "compiled": False}}
    assignment = RankAssignment(("a/0", "a/1"), (range(4),)).encode()
    return ClusterStatus(1, 2, 1, 0, 0, None, state, counts, {}, computing, assignment)


def cells(metric: Metric, *, vllm: bool) -> list[str]:
    """The line of a metric; `vllm`: it is exported under vLLM's prefix too."""
    labels = {label for sample in metric.samples for label in sample.labels} - {"le"}
    name = OURS + metric.name + ("_total" if metric.type == "counter" else "")
    listed = ", ".join(f"`{label}`" for label in sorted(labels))
    return [f"`{name}`", metric.type, listed, metric.documentation, "yes" if vllm else ""]


def page() -> str:
    """The text of docs/metrics.md."""
    found = {metric.name: metric for metric in cluster_metrics(sample_status(), {})}
    of_cluster = []
    for name, metric in found.items():
        if name.startswith(OURS):
            metric.name = name.removeprefix(OURS)
            of_cluster.append(cells(metric, vllm=VLLM + metric.name in found))
    sections = {
        "Requests to this server": [cells(each, vllm=True) for each in RequestMetrics().collect()],
        "The whole cluster": of_cluster,
    }
    headings = ("metric", "type", "labels", "meaning", "vLLM")
    tables = (f"\n## {title}\n\n{table(headings, rows)}" for title, rows in sections.items())
    return by_hand(PAGE) + "".join(tables)


if __name__ == "__main__":
    PAGE.write_text(page())
