"""`pipespec doctor`: what this machine can run, or what keeps hosts from working together."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from pipespec.cluster.diagnostics.examine_hosts import Report, examine_hosts
from pipespec.config.compose import compose_sections
from pipespec.config.hosts import load_hosts
from pipespec.console.arguments import AddParser, finish, overrides, refuse_settings
from pipespec.console.terminal import show, write
from pipespec.engine.checkpoint.model_path import known_model
from pipespec.engine.inspection.draft_heads import inspect_head, require_head_fit
from pipespec.engine.inspection.inspection import inspect
from pipespec.engine.model_settings import ModelConfig
from pipespec.errors import ConfigError, print_error
from pipespec.extras.device_check.machine_check import check_machine, table
from pipespec.system.devices import require_device
from pipespec.system.validation import home_expanded

VERSIONS = ("python", "torch", "transformers", "pipespec", "driver")


def add(add_parser: AddParser) -> None:
    command = add_parser(
        usage="pipespec doctor [--gpu [DEVICE]] | pipespec doctor HOSTS.yaml [model.target=MODEL] "
        "[model.draft=MODEL], each with [--json]",
        description="Without a hosts file, say what this machine can run. With one, look at every "
        "host and at the way from each to every other: interface, round trip, bandwidth, "
        "versions, model files, open ports. The exit code is 1 if something is wrong; "
        "docs/doctor.md explains the findings. A MODEL is a folder or a hub id; nothing is "
        "downloaded.",
    )
    command.add_argument(
        "--gpu",
        nargs="?",
        const="cuda:0",
        metavar="DEVICE",
        help="test everything that runs on a GPU, too (cuda:0; cpu to try it), in some minutes",
    )
    finish(command, run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Print what was found; 0 if this machine, or the hosts together, can decode."""
    settings = overrides(rest, arguments.known_options)
    if arguments.gpu is not None:
        refuse_settings(arguments, rest)
        _require_device(arguments.gpu)
    elif settings:
        return _examine(settings, as_json=arguments.json)

    findings = check_machine()
    if not arguments.json:
        show(table(findings))
    if arguments.gpu is not None and findings["ok"]:
        _check_gpu(arguments.gpu, findings, as_json=arguments.json)
    if arguments.json:
        write(json.dumps(findings, indent=2) + "\n")
    for problem in findings["problems"]:
        print_error(f"pipespec: {problem}")
    return 0 if findings["ok"] else 1


def _check_gpu(device: str, findings: dict[str, Any], *, as_json: bool) -> None:
    """Add to the findings of this machine those of a device, and print these."""
    from pipespec.extras.device_check.correctness import check_device

    def on_part(title: str, found: Mapping[str, Any]) -> None:
        wrong = found.get("wrong", ())
        findings["problems"] += [f"{title}: {each}" for each in wrong]
        said = f"{len(wrong)} wrong" if wrong else found.get("not_available", "passes")
        if not as_json:
            write(f"{title}: {said}\n")

    findings["gpu"] = {"device": device, "parts": check_device(device, on_part)}
    findings["ok"] = not findings["problems"]


def _require_device(device: str) -> None:
    if device == "cpu":
        return
    kind, _, index = device.partition(":")
    if kind != "cuda" or not (index or "0").isdecimal():
        raise ConfigError(f"--gpu must be cpu, cuda or cuda:N, not {device!r}.")
    require_device(device, "--gpu names", "name another, or try the check with --gpu cpu")


def _examine(settings: list[str], *, as_json: bool) -> int:
    cluster, model, proposer = compose_sections(["cluster", "model", "proposer"], settings)
    if cluster.hosts is None:
        raise ConfigError(
            "`pipespec doctor` looks at this machine, and takes settings for the hosts of a hosts "
            "file alone; pass HOSTS.yaml."
        )
    if proposer.needs_head:
        _require_head(model)
    report = examine_hosts(load_hosts(cluster.hosts), model)
    if as_json:
        write(json.dumps(report.as_json(), indent=2) + "\n")
    else:
        show(*(table for table in (hosts_table(report), links_table(report)) if table.row_count))
        show(conclusion(report))
    for finding in report.findings:
        kind = "pipespec" if finding.error else "pipespec: warning"
        print_error(f"{kind}: {finding.sentence}")
    return 0 if report.ok else 1


def _require_head(model: ModelConfig) -> None:
    """Raise ModelError if a draft head cannot be used, as far as it and its target are here."""
    names = [name for name in (model.target, model.draft) if name is not None]
    target, *draft = (known_model(name) or home_expanded(name) for name in names)
    if all(path.exists() for path in (target, *draft)):
        info = inspect(target, fit=False)
        require_head_fit(inspect_head(draft[0] if draft else None, info), info)


def conclusion(report: Report) -> str:
    errors = sum(finding.error for finding in report.findings)
    if errors:
        what = "1 error keeps" if errors == 1 else f"{errors} errors keep"
        return f"{what} the hosts from working together."
    num = len(report.findings)
    warned = {0: "nothing is wrong", 1: "1 warning follows"}.get(num, f"{num} warnings follow")
    if not report.hosts:
        return "No host was checked, as all are started by hand."
    checked = " that were checked" if report.unchecked else ""
    return f"The hosts{checked} can work together; {warned}."


def hosts_table(report: Report) -> Table:
    """One row per host: the interface that carries batches, versions. What no host states has no
    column."""
    rows = []
    for name, seen in report.hosts.items():
        carrier = None if seen.listening is None else seen.listening.carrier
        versions = {} if seen.inventory is None else seen.inventory.versions
        rows.append([name, carrier, *map(versions.get, VERSIONS)])
    table = Table(title="Hosts", title_justify="left")
    stated = [i for i in range(len(VERSIONS) + 2) if any(row[i] for row in rows)]
    for index in stated:
        table.add_column(("host", "interface", *VERSIONS)[index])
    for row in rows:
        table.add_row(*(row[index] or "-" for index in stated))
    return table


def links_table(report: Report) -> Table:
    columns = ("from", "to", "round trip ms", "Gbit/s")
    table = Table(*columns, title="Links", title_justify="left")
    for link in report.links:
        figures = [link.reach.problem or "-", "-"]
        if link.measured is not None:
            figures = [f"{link.measured.rtt_ms:.3f}", f"{link.measured.gbit_per_s:.2f}"]
        table.add_row(link.source, link.to, *figures)
    return table
