"""`pipespec doctor`: what keeps the hosts of a hosts file from working together."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING

from pipespec.cli.arguments import finish, overrides
from pipespec.cli.terminal import show, write
from pipespec.errors import tell

if TYPE_CHECKING:
    from rich.table import Table

    from pipespec.cli.arguments import Commands
    from pipespec.survey.doctor import Report
    from pipespec.survey.findings import Seen

VERSIONS = ("python", "torch", "transformers", "pipespec", "driver")


def add(commands: Commands) -> None:
    """Describe the command."""
    command = commands.add_parser(
        "doctor",
        help="look at the hosts of a hosts file and the links between them",
        usage="pipespec doctor [--json] HOSTS.YAML [model.target=FOLDER] [model.draft=FOLDER]",
        description="Look at every host and at the way from each to every other: interface, round "
        "trip, bandwidth, clocks, versions, model files, open ports. The exit code is 1 if "
        "something keeps them from working together; docs/doctor.md explains the findings.",
    )
    command.add_argument("hosts", metavar="HOSTS.YAML", help="the file that names the hosts")
    finish(command, run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Print what was found; 0 if the hosts can work together."""
    settings = overrides(rest, arguments.known_options)

    from pipespec.config.compose import compose_sections
    from pipespec.config.hosts import load_hosts
    from pipespec.head.source.protocol import Cascading
    from pipespec.survey.doctor import examine

    model, source = compose_sections(["model", "source"], settings)
    if not (isinstance(source, Cascading) and source.needs_mid):
        model = replace(model, mid=None)
    report = examine(load_hosts(arguments.hosts), model)
    if arguments.json:
        write(json.dumps(report.as_json(), indent=2) + "\n")
    else:
        show(*(table for table in (hosts_table(report), links_table(report)) if table.row_count))
    for finding in report.findings:
        kind = "pipespec" if finding.error else "pipespec: warning"
        tell(f"{kind}: {finding.sentence}")
    return 0 if report.ok else 1


def hosts_table(report: Report) -> Table:
    """One row per host: the interface that carries batches, versions, its clock beside ours.

    What no host told has no column.
    """
    from rich.table import Table

    table = Table(title="Hosts", title_justify="left")
    columns = ("host", "interface", *VERSIONS, "clock ms")
    rows = [_host_row(name, seen) for name, seen in report.hosts.items()]
    told = [index for index in range(len(columns)) if any(row[index] for row in rows)]
    for index in told:
        table.add_column(columns[index])
    for row in rows:
        table.add_row(*(row[index] or "-" for index in told))
    return table


def _host_row(name: str, seen: Seen) -> list[str | None]:
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
