"""`pipespec partition`: which layers each device of a hosts file should hold, and why."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any

from pipespec.console.arguments import finish, overrides
from pipespec.console.terminal import progress, show, table_of, write

if TYPE_CHECKING:
    from rich.table import Table

    from pipespec.config.hosts import HostsFile
    from pipespec.config.schema import Config
    from pipespec.console.arguments import Commands
    from pipespec.placement.host_figures import Figures
    from pipespec.placement.slices import Placement


def add(commands: Commands) -> None:
    """Describe the command."""
    command = commands.add_parser(
        "partition",
        help="say which layers each device of a hosts file should hold",
        usage="pipespec partition [--json] [--measured FILE] [--groups] HOSTS.YAML "
        "[SETTING=VALUE ...]",
        description="Measure every device and link of a hosts file, then choose the slices, the "
        "order of the hosts and the place of the draft with which the slowest rank is fastest, "
        "within memory. Nothing is changed: the last lines are what to write into the hosts file. "
        "What the file says already (draft, order, split) stays as it is.",
    )
    command.add_argument("hosts", metavar="HOSTS.YAML", help="the file that names the hosts")
    command.add_argument(
        "--measured",
        metavar="FILE",
        help="plan from the figures that an earlier --json printed, and measure nothing",
    )
    command.add_argument(
        "--groups",
        action="store_true",
        help="divide the devices of the only host into tensor-parallel groups for draft and "
        "target, by simulation with the measured times",
    )
    command.add_argument(
        "--tokens", type=int, default=1000, help="simulated for the best of --groups (1000)"
    )
    finish(command, run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Measure, plan, and print the plan with its reasons."""
    settings = overrides(rest, arguments.known_options)

    from pipespec.config.compose import compose
    from pipespec.config.hosts import load_hosts
    from pipespec.instruments.commands import partition_groups
    from pipespec.placement.host_figures import Figures
    from pipespec.placement.measurements import problem
    from pipespec.placement.slices import plan_slices

    hosts_file = load_hosts(arguments.hosts)
    config = compose([f"cluster.stages={hosts_file.num_stages}", *settings])
    if config.cluster.split is not None:
        hosts_file = replace(hosts_file, split=tuple(config.cluster.split))
    if arguments.groups:
        partition_groups.require_one_host(hosts_file)
    if arguments.measured is not None:
        figures = Figures.read(arguments.measured)
    else:
        figures = _measure(hosts_file, config, sums=arguments.groups)
    if arguments.groups:
        return partition_groups.run_partition(arguments, hosts_file, figures, config)
    placement = plan_slices(problem(hosts_file, figures, config))
    lines = hosts_lines(hosts_file, placement)
    plain_ms = _plain_step_ms(placement)
    if arguments.json:
        answer = {
            "step_ms": placement.step_ms,
            "plain_step_ms": plain_ms,
            "ranks": rows(placement, figures),
            "spares": list(placement.spares),
            "hosts": lines,
            "figures": figures.as_json(),
        }
        write(json.dumps(answer, allow_nan=False, indent=2) + "\n")
        return 0
    show(
        table(placement, figures),
        *_sentences(placement, figures, plain_ms),
        f"\nTo keep this, write into {arguments.hosts}:",
        *(f"{name}: {partition_groups.flow(value)}" for name, value in lines.items()),
    )
    return 0


def _measure(hosts_file: HostsFile, config: Config, *, sums: bool) -> Figures:
    from pipespec.instruments.diagnostics.measure_hosts import measure_hosts

    with progress("measuring") as (on_host,):
        return measure_hosts(hosts_file, config, on_host, sums=sums)


# --- what comes out ---------------------------------------------------------------------------


def hosts_lines(hosts_file: HostsFile, placement: Placement) -> dict[str, Any]:
    """The entries of a hosts file that make it this placement."""
    head, *stages = placement.workers_by_rank
    order = list(dict.fromkeys(hosts_file.host_of(worker).name for worker in stages))
    # Whose workers are spares comes last: a file's last workers are its spares.
    spare = [hosts_file.host_of(worker).name for worker in placement.spares]
    others = [host.name for host in hosts_file.hosts if host.name not in order]
    order += sorted(others, key=lambda name: name in spare)
    return {"draft": head, "order": order, "split": [len(piece) for piece in placement.layers]}


def rows(placement: Placement, figures: Figures) -> list[dict[str, Any]]:
    """One entry per rank."""
    from pipespec.placement.slices import GIB, reason

    found = []
    for rank, worker in enumerate(placement.workers_by_rank):
        piece = placement.layers[rank - 1] if rank else None
        found.append(
            {
                "rank": rank,
                "member": worker,
                "device": figures.members[worker]["model"],
                "layers": None if piece is None else [piece.start, piece.stop - 1],
                "compute_ms": placement.compute_ms[rank],
                "link_ms": placement.link_ms[rank],
                "gib": placement.bytes_by_rank[rank] / GIB,
                "of_gib": placement.problem.worker(worker).memory_bytes / GIB,
                "why": reason(placement, rank),
            }
        )
    return found


def table(placement: Placement, figures: Figures) -> Table:
    """One row per rank, then the spares."""
    title = f"A step of {placement.step_ms:.2f} ms, {figures.rows} rows wide, {figures.dtype}"
    headings = ("rank", "member", "layers", "compute ms", "link ms", "GiB", "of")
    out = table_of(title, *headings, left=3)
    for column in out.columns:
        column.no_wrap = True
    out.add_column("why")
    for row in rows(placement, figures):
        first_last = row["layers"]
        layers = "draft" if first_last is None else _layers(*first_last)
        numbers = [f"{row[name]:.2f}" for name in ("compute_ms", "link_ms", "gib", "of_gib")]
        out.add_row(str(row["rank"]), row["member"], layers, *numbers, row["why"])
    for worker in placement.spares:
        out.add_row("-", worker, "spare")
    return out


def _layers(first: int, last: int) -> str:
    return f"{first} to {last} ({last - first + 1})"


def _plain_step_ms(placement: Placement) -> float | None:
    """The step with even slices, hosts and head as the file lists them; None if that cannot be."""
    from pipespec.errors import ConfigError
    from pipespec.placement.slices import plan_slices, split_evenly

    problem = placement.problem
    heads = [
        worker.name
        for worker in problem.workers
        if worker.name not in problem.spares and worker.draft_round_ms < inf
    ]
    sizes = [len(p) for p in split_evenly(problem.needs.num_layers, len(placement.layers))]
    plain = replace(
        problem,
        draft=problem.draft or heads[0],
        order=problem.order or tuple(dict.fromkeys(worker.host for worker in problem.workers)),
        split=tuple(sizes),
    )
    try:
        return plan_slices(plain).step_ms
    except ConfigError:
        return None


def _sentences(placement: Placement, figures: Figures, plain_ms: float | None) -> list[str]:
    from pipespec.placement.ordering import MAX_ORDERED

    devices: dict[str, list[str]] = {}
    for worker, found in figures.members.items():
        devices.setdefault(found["model"], []).append(worker)
    said = [f"{', '.join(workers)}: {model}." for model, workers in devices.items()]
    if plain_ms is None:
        said.append("Even slices in the order of the file would not fit into memory.")
    elif plain_ms > placement.step_ms:
        said.append(f"Even slices in the order of the file: {plain_ms:.2f} ms a step.")
    else:
        said.append("Even slices in the order of the file would be as fast.")
    problem = placement.problem
    if problem.order is None and len({worker.host for worker in problem.workers}) > MAX_ORDERED:
        said.append(
            f"Of more than {MAX_ORDERED} hosts the order of the file is kept; try others by order."
        )
    said += [
        f"{link['source']} to {link['to']}: {link['rtt_ms']:.3f} ms there and back, "
        f"{link['gbit_s']:.2f} Gbit/s."
        for link in figures.links
    ]
    return said
