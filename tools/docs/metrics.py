"""Write docs/metrics.md, the reference of `GET /metrics`, from the metrics' own definitions.

python -m tools.docs.metrics
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import Metric

from pipespec.cluster.deployment.rank_assignment import RankAssignment
from pipespec.controller.cluster_status import ClusterStatus
from pipespec.server.metric_definitions import OURS, VLLM, RequestMetrics, cluster_metrics

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
HEAD = """\
# Metrics

<!-- Written by `python -m tools.docs.metrics` from pipespec/server/metric_definitions.py. -->

`GET /metrics` of `pipespec serve` exports these in Prometheus' text format. Every metric has the
labels `model_name` and `engine` besides those listed. Where the last column says *yes* the metric
is also exported under vLLM's prefix, `vllm:` in place of `pipespec_`, so that dashboards for vLLM
work. [Monitoring](monitoring.md) says what to watch and how to read them.
"""


@dataclass(frozen=True)
class Row:
    """A line of the reference: a metric's name under our prefix, and whether vLLM has it too."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str
    vllm: bool


def sample_status() -> ClusterStatus:
    """A cluster of which everything is known, so that each metric has samples with its labels."""
    per_label = {"fed", "hits", "expected", "active_ns", "busy_ns", "receive_ns", "send_ns"}
    counts = {f"{name}/1": 1 for name in per_label} | {"step_tokens/1": 1}
    counts |= dict.fromkeys(("mid_passes", "scored"), 1)
    state = dict.fromkeys(
        ("running", "kv_slots", "kv_slots_held", "kv_slots_retained", "row_budget"), 1
    )
    computing = {1: {"attention": "sdpa", "graph_rows": [], "compiled": False}}
    assignment = RankAssignment(("a/0", "a/1"), (range(4),)).encode()
    return ClusterStatus(1, 2, 1, 0, 0, None, state, counts, {}, computing, assignment)


def request_rows() -> Iterable[Row]:
    """The metrics of one server's own requests, exported under both prefixes."""
    for metric in RequestMetrics().collect():
        yield _row(metric, vllm=True)


def cluster_rows() -> Iterable[Row]:
    """The metrics of the whole cluster."""
    found = {metric.name: metric for metric in cluster_metrics(sample_status(), {})}
    for name, metric in found.items():
        if name.startswith(OURS):
            metric.name = name.removeprefix(OURS)
            yield _row(metric, vllm=VLLM + metric.name in found)


def _row(metric: Metric, *, vllm: bool) -> Row:
    labels = {label for sample in metric.samples for label in sample.labels} - {"le"}
    suffix = "_total" if metric.type == "counter" else ""
    name = OURS + metric.name + suffix
    return Row(name, metric.type, tuple(sorted(labels)), metric.documentation, vllm)


def page() -> str:
    """The text of docs/metrics.md."""
    parts = [HEAD]
    sections = {
        "Requests to this server": request_rows(),
        "The whole cluster": cluster_rows(),
    }
    for title, rows in sections.items():
        lines = [
            f"\n## {title}\n",
            "| metric | type | labels | meaning | vLLM |",
            "|---|---|---|---|---|",
        ]
        for row in rows:
            labels = ", ".join(f"`{label}`" for label in row.labels)
            also = "yes" if row.vllm else ""
            lines.append(f"| `{row.name}` | {row.kind} | {labels} | {row.text} | {also} |")
        parts.append("\n".join(lines) + "\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
