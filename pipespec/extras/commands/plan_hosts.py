"""`pipespec plan HOSTS.yaml`: which layers each device of a hosts file should hold, and why; with
--groups, which devices of its only host are for the draft and which for the target."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.table import Table

from pipespec.cluster.diagnostics.measure_hosts import measure_hosts
from pipespec.config.compose import compose
from pipespec.config.hosts import HostsFile, load_hosts
from pipespec.config.schema import Config
from pipespec.console.terminal import progress, show, table_of, write
from pipespec.errors import ConfigError
from pipespec.extras.emulation.machine import TimeCurve
from pipespec.extras.emulation.synthetic_proposer import USUAL
from pipespec.extras.plan.advice import DecodingMethod, Division, Prediction, divisions, predict_all
from pipespec.extras.plan.pipeline_times import Machine
from pipespec.head.policies.policy import AUTO
from pipespec.placement.host_figures import Figures, ModelSizes
from pipespec.placement.measurements import problem
from pipespec.placement.ordering import MAX_ORDERED
from pipespec.placement.slices import GIB, Placement, plan_slices, reason

SHOWN = 16  # predictions in the table


def run(arguments: argparse.Namespace, settings: list[str]) -> int:
    config = compose(settings)
    assert config.cluster.hosts is not None
    hosts_file = load_hosts(config.cluster.hosts)
    if arguments.groups:
        require_one_host(hosts_file)
    with progress("measuring") as (on_host,):
        figures = measure_hosts(hosts_file, config, on_host, sums=arguments.groups)
    if arguments.groups:
        answer, said = _divided(arguments, hosts_file, figures, config)
    else:
        placement = plan_slices(problem(hosts_file, figures, config))
        answer = {
            "step_ms": placement.step_ms,
            "ranks": rows(placement, figures),
            "spares": list(placement.spares),
            "hosts": hosts_lines(hosts_file, placement),
        }
        said = [table(placement, figures), *_sentences(placement, figures)]
    if arguments.json:
        answer["figures"] = asdict(figures)
        write(json.dumps(answer, allow_nan=False, indent=2) + "\n")
        return 0
    lines = [f"{name}: {flow(value)}" for name, value in answer["hosts"].items()]
    of_host = f", `devices` for {hosts_file.hosts[0].name}" if arguments.groups else ""
    show(*said, f"\nTo keep this, write into {config.cluster.hosts}{of_host}:", *lines)
    return 0


# --- layers of devices ------------------------------------------------------------------------


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
    return [
        {
            "rank": rank,
            "member": worker,
            "device": figures.members[worker]["model"],
            "layers": [placement.layers[rank - 1][0], placement.layers[rank - 1][-1]]
            if rank
            else None,
            "compute_ms": placement.compute_ms[rank],
            "link_ms": placement.link_ms[rank],
            "gib": placement.bytes_by_rank[rank] / GIB,
            "of_gib": placement.problem.worker(worker).memory_bytes / GIB,
            "why": reason(placement, rank),
        }
        for rank, worker in enumerate(placement.workers_by_rank)
    ]


def table(placement: Placement, figures: Figures) -> Table:
    title = f"A step of {placement.step_ms:.2f} ms, {figures.rows} rows wide, {figures.dtype}"
    headings = ("rank", "member", "layers", "compute ms", "link ms", "GiB", "of")
    out = table_of(title, *headings, left=3)
    for column in out.columns:
        column.no_wrap = True
    out.add_column("why")
    for row in rows(placement, figures):
        layers = "draft"
        if row["layers"] is not None:
            first, last = row["layers"]
            layers = f"{first} to {last} ({last - first + 1})"
        numbers = [f"{row[name]:.2f}" for name in ("compute_ms", "link_ms", "gib", "of_gib")]
        out.add_row(str(row["rank"]), row["member"], layers, *numbers, row["why"])
    for worker in placement.spares:
        out.add_row("-", worker, "spare")
    return out


def _sentences(placement: Placement, figures: Figures) -> list[str]:
    devices: dict[str, list[str]] = {}
    for worker, found in figures.members.items():
        devices.setdefault(found["model"], []).append(worker)
    said = [f"{', '.join(workers)}: {model}." for model, workers in devices.items()]
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


# --- groups of devices ------------------------------------------------------------------------


def _divided(
    arguments: argparse.Namespace, hosts_file: HostsFile, figures: Figures, config: Config
) -> tuple[dict[str, Any], list[Any]]:
    """The divisions of a host's devices, the fastest first, by their measured times."""
    (host,) = hosts_file.hosts
    found = {}
    for division in divisions(len(host.devices)):
        groups = ((division.members, figures.target), (division.draft, figures.draft))
        if all(size == 1 or _divisible(model) for size, model in groups):
            machine = _machine(hosts_file, figures, config, division)
            if machine is not None:
                layout = division.layout(machine)
                found[layout.label] = division, layout
    if not found:
        raise ConfigError(
            f"No division of the {len(host.devices)} devices of {host.name} has room for the "
            "models; add devices, or lower model.context."
        )
    with progress("simulating") as (on_done,):
        predicted = predict_all(
            [layout for _, layout in found.values()],
            [DecodingMethod(type(config.policy).__name__, config.policy, AUTO)],
            USUAL,
            num_tokens=arguments.tokens,
            on_done=on_done,
        )
    each = []
    for one in predicted:
        division, layout = found[one.layout]
        slowest = max(curve.points[0][1] for curve in layout.machine.stages)
        times = {"stage_ms": slowest, "draft_ms": layout.machine.draft_ms, "tbt_ms": one.tbt_ms}
        each.append(division._asdict() | times)
    best, _ = found[predicted[0].layout]
    lines = {"devices": grouped(host.devices, best.sizes), "draft": host.workers[0]}
    said = [
        predictions_table(predicted, predicted[0]),
        "A layout is the devices of the draft, the number of stages and the devices of each.",
    ]
    whole = [role for role in ("target", "draft") if not _divisible(getattr(figures, role))]
    if whole:
        said.append(f"Several devices cannot compute the {' or the '.join(whole)} together.")
    return {"divisions": each, "hosts": lines}, said


def require_one_host(hosts_file: HostsFile) -> None:
    """Raise ConfigError unless the devices of a hosts file can be divided anew."""
    if len(hosts_file.hosts) != 1:
        raise ConfigError(
            f"--groups divides the devices of one host, but the hosts file has "
            f"{len(hosts_file.hosts)}; name one of them in a file of its own."
        )
    (host,) = hosts_file.hosts
    said = [name for name in ("draft", "order", "split", "spares") if getattr(hosts_file, name)]
    said += ["a group of devices"] * any(size > 1 for size in host.groups)
    if said:
        raise ConfigError(
            f"--groups chooses what the hosts file says already ({', '.join(said)}); leave it out."
        )
    if len(host.devices) < 2:
        raise ConfigError(
            f"--groups needs two devices or more, but {host.name} has {len(host.devices)}."
        )


def _divisible(model: ModelSizes | None) -> bool:
    """Whether several devices can compute a model together; None: there is none."""
    return model is None or model.get("divisible", True)


def _machine(
    hosts_file: HostsFile, figures: Figures, config: Config, division: Division
) -> Machine | None:
    """The times of a division, of the layout that would be chosen; None: it does not fit."""
    (host,) = hosts_file.hosts
    divided = replace(
        hosts_file, hosts=(replace(host, groups=division.sizes),), draft=host.workers[0]
    )
    measured = problem(divided, figures, config)
    try:
        placement = plan_slices(measured)
    except ConfigError:
        return None
    curves = tuple(TimeCurve(((figures.rows, ms),)) for ms in placement.stage_ms)
    head = measured.worker(placement.workers_by_rank[0])
    return Machine(curves, draft_ms=head.draft_round_ms)


def grouped(devices: Sequence[str], sizes: Sequence[int]) -> list[str | list[str]]:
    left = iter(devices)
    groups = ([next(left) for _ in range(size)] for size in sizes)
    return [group if len(group) > 1 else group[0] for group in groups]


def flow(value: Any) -> str:
    return f"[{', '.join(map(flow, value))}]" if isinstance(value, list) else str(value)


def predictions_table(predictions: Sequence[Prediction], advised: Prediction | None) -> Table:
    """The fastest, and what the advised one does with each benchmark of a recorded draft; without
    what all methods have in common."""
    headings = ("layout", "policy", "width", "top-k", "rounds", "tok/step", "±", "rows", "TBT")
    rows = [
        (
            *(p.layout, p.policy, str(p.width), str(p.children), str(p.rounds)),
            *(f"{p.tokens_per_step:.2f}", f"{p.error:.2f}", f"{p.rows_per_step:.1f}"),
            *(f"{p.tbt_ms:.1f}", f"{p.speedup:.2f}"),
        )
        for p in predictions[:SHOWN]
    ]
    texts = advised.texts if advised is not None else ()
    for benchmark in dict.fromkeys(text.benchmark for text in texts):
        own = [text for text in texts if text.benchmark == benchmark]
        tokens = sum(text.tokens for text in own)
        steps = sum(text.tokens / text.tokens_per_step for text in own)
        tbt_ms = sum(text.tbt_ms * text.tokens for text in own) / tokens
        figures = (f"{tokens / steps:.2f}", "", "", f"{tbt_ms:.1f}", "")
        rows.append((benchmark, "(recommended)", "", "", "", *figures))
    kept = [i for i in range(10) if not 0 < i < 5 or len({row[i] for row in rows}) > 1]
    left = 1 + (1 in kept)
    table = table_of("", *(f"{(*headings, 'gain')[i]} " for i in kept), left=left)
    for column in table.columns[left:]:
        column.no_wrap = True
    for place, row in enumerate(rows):
        chosen = place < len(predictions) and predictions[place] is advised
        cells = (f"{row[i]} " if i < 2 else row[i] for i in kept)
        table.add_row(*cells, style="bold" if chosen else None)
    return table
