"""Prometheus' rules and Grafana's dashboard ask for metrics and labels that the server exports."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from pipespec.server.metrics import Metrics
from tools.docs.metrics import sample_status

FOLDER = Path(__file__).parents[3] / "launch" / "docker"
GRAFANA = FOLDER / "grafana"
DASHBOARD: dict[str, Any] = json.loads(
    (GRAFANA / "dashboards" / "pipespec.json").read_text(encoding="utf-8")
)
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER.parents[1] / "compose.yaml").read_text())
# What Prometheus itself adds to what it reads.
OF_PROMETHEUS = {"up": {"job", "instance"}}
KEYWORDS = {"and", "bool", "by", "group_left", "group_right", "ignoring", "on", "or", "unless"}


def labels() -> dict[str, set[str]]:
    """What Prometheus reads: the names of samples, and the labels that each has."""
    text = Metrics("m").prometheus_text(sample_status()).decode()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels, ("job", "instance"))
    return found | OF_PROMETHEUS


def dashboard_queries() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        (metric, label) = re.fullmatch(
            r"label_values\((\w+), (\w+)\)", variable["query"]["query"]
        ).groups()
        yield f"count by ({label}) ({metric})"


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return group["rules"]


QUERIES = [*dashboard_queries(), *(rule["expr"] for rule in alerts())]


def used(query: str) -> tuple[set[str], set[str]]:
    """Names of metrics and of labels in a query."""
    selectors = re.findall(r"\{([^}]*)\}", query)
    grouped = re.findall(r"\b(?:by|ignoring|on|group_left) \(([^)]*)\)", query)
    used_labels = {name for text in selectors for name in re.findall(r"(\w+)=", text)}
    used_labels |= {name for text in grouped for name in re.findall(r"\w+", text)}
    rest = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(?:by|ignoring|on|group_left) \([^)]*\)", " ", query)
    names = re.findall(r"[a-zA-Z_:][\w:]*(?!\s*\()\b(?!\()", rest)
    functions = set(re.findall(r"([a-zA-Z_:][\w:]*)\s*\(", rest))
    return set(names) - KEYWORDS - functions, used_labels


@pytest.mark.parametrize("query", QUERIES)
def test_query_names_metrics_of_the_server(query: str) -> None:
    names, used_labels = used(query)
    known = labels()
    assert names and names <= known.keys()
    assert used_labels <= set().union(*(known[name] for name in names))


def test_queries_that_name_a_job_name_that_of_prometheus() -> None:
    (job,) = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    named = {name for query in QUERIES for name in re.findall(r'job="(\w+)"', query)}
    assert named == {job["job_name"]}


def test_alerts_say_what_is_wrong() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names)
    for rule in alerts():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"].endswith(".")
        _, grouped = used(rule["expr"])
        mentioned = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        if " by " in rule["expr"]:
            assert mentioned <= grouped, "a sum by other labels loses it"


def test_prometheus_reads_the_server_of_compose() -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    (static,) = job["static_configs"]
    (target,) = static["targets"]
    host, port = target.split(":")
    assert f"--port={port}" in COMPOSE["services"][host]["command"]
    assert job.get("metrics_path", "/metrics") == "/metrics"
    mounted = {each.split(":")[1] for each in COMPOSE["services"]["prometheus"]["volumes"]}
    assert set(config["rule_files"]) <= mounted
    (command, *_) = COMPOSE["services"]["prometheus"]["command"]
    assert command.partition("=")[2] in mounted


def test_grafana_is_provisioned_with_the_dashboard() -> None:
    (source,) = yaml.safe_load((GRAFANA / "datasource.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    asked = {panel["datasource"]["uid"] for panel in DASHBOARD["panels"]}
    assert asked == {source["uid"]}
    (provider,) = yaml.safe_load((GRAFANA / "provider.yaml").read_text())["providers"]
    mounts = dict(each.split(":")[:2] for each in COMPOSE["services"]["grafana"]["volumes"])
    folder = provider["options"]["path"]
    assert folder == mounts["./launch/docker/grafana/dashboards"]
    home = COMPOSE["services"]["grafana"]["environment"][
        "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"
    ]
    assert (GRAFANA / "dashboards" / Path(home).name).is_file()
    assert Path(home).parent == Path(folder)
