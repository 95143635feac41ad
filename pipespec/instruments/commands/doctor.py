"""`pipespec doctor`: what keeps the hosts of a hosts file from working together."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pipespec.console.arguments import finish, overrides
from pipespec.console.terminal import show, write
from pipespec.errors import print_error

if TYPE_CHECKING:
    from rich.table import Table

    from pipespec.config.hosts import HostsFile
    from pipespec.console.arguments import Commands
    from pipespec.instruments.diagnostics.examine_hosts import Report
    from pipespec.instruments.diagnostics.findings import HostReport

VERSIONS = ("python", "torch", "transformers", "pipespec", "driver")


def add(commands: Commands) -> None:
    """Describe the command."""
    command = commands.add_parser(
        "doctor",
        help="look at the hosts of a hosts file and the links between them",
        usage="pipespec doctor [--json] HOSTS.YAML [model.target=MODEL] [model.draft=MODEL]",
        description="Look at every host and at the way from each to every other: interface, round "
        "trip, bandwidth, clocks, versions, model files, open ports. The exit code is 1 if "
        "something keeps them from working together; docs/doctor.md explains the findings. A MODEL "
        "is a folder or a hub id; nothing is downloaded.",
    )
    command.add_argument("hosts", metavar="HOSTS.YAML", help="the file that names the hosts")
    finish(command, run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Print what was found; 0 if the hosts can work together."""
    settings = overrides(rest, arguments.known_options)

    from pipespec.config.compose import compose_sections
    from pipespec.config.hosts import load_hosts
    from pipespec.instruments.diagnostics.examine_hosts import examine_hosts

    model, proposer = compose_sections(["model", "proposer"], settings)
    if not proposer.needs_mid:
        model = replace(model, mid=None)
    hosts_file = load_hosts(arguments.hosts)
    if not arguments.json:
        show(layout_table(hosts_file))  # before anything is connected to
    report = examine_hosts(hosts_file, model)
    if arguments.json:
        answer = {**report.as_json(), "layout": layout(hosts_file)}
        write(json.dumps(answer, indent=2) + "\n")
    else:
        show(*(table for table in (hosts_table(report), links_table(report)) if table.row_count))
        show(conclusion(report))
    for finding in report.findings:
        kind = "pipespec" if finding.error else "pipespec: warning"
        print_error(f"{kind}: {finding.sentence}")
    return 0 if report.ok else 1


def conclusion(report: Report) -> str:
    """What the findings mean for the hosts, in a sentence."""
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


def layout(hosts_file: HostsFile) -> list[dict[str, Any]]:
    """What each worker computes if nothing is measured, and on which devices: one entry per rank,
    then the spares."""
    head, *stages = hosts_file.ranks
    parts = [(head, "head"), *((worker, f"stage {i}") for i, worker in enumerate(stages, 1))]
    parts += [(worker, "spare") for worker in hosts_file.workers if worker not in hosts_file.ranks]
    return [
        {"worker": worker, "part": part, "devices": list(hosts_file.devices_of(worker))}
        for worker, part in parts
    ]


def layout_table(hosts_file: HostsFile) -> Table:
    """The same as a table."""
    from rich.table import Table

    table = Table("worker", "part", "devices", title="Layout", title_justify="left")
    for entry in layout(hosts_file):
        table.add_row(entry["worker"], entry["part"], " + ".join(entry["devices"]))
    return table


def hosts_table(report: Report) -> Table:
    """One row per host: the interface that carries batches, versions, its clock beside ours.

    What no host states has no column.
    """
    from rich.table import Table

    table = Table(title="Hosts", title_justify="left")
    columns = ("host", "interface", *VERSIONS, "clock ms")
    rows = [_host_row(name, seen) for name, seen in report.hosts.items()]
    stated = [index for index in range(len(columns)) if any(row[index] for row in rows)]
    for index in stated:
        table.add_column(columns[index])
    for row in rows:
        table.add_row(*(row[index] or "-" for index in stated))
    return table


def _host_row(name: str, seen: HostReport) -> list[str | None]:
    carrier = None if seen.listening is None else seen.listening.carrier
    versions = {} if seen.inventory is None else seen.inventory.versions
    clock = None if seen.clock is None else f"{1e3 * seen.clock.offset_s:+.1f}"
    return [name, carrier, *map(versions.get, VERSIONS), clock]


def links_table(report: Report) -> Table:
    """One row per ordered pair of hosts."""
    from rich.table import Table

    table = Table(
        "from", "to", "through", "round trip ms", "Gbit/s", title="Links", title_justify="left"
    )
    for link in report.links:
        figures = [link.reach.problem or "-", "-"]
        if link.measured is not None:
            figures = [f"{link.measured.rtt_ms:.3f}", f"{link.measured.gbit_per_s:.2f}"]
        table.add_row(link.source, link.to, link.reach.interface or "-", *figures)
    return table
