"""`pipespec partition --groups`: which devices of a host are for the draft and the target."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from pipespec.console.terminal import progress, show, write
from pipespec.errors import ConfigError

if TYPE_CHECKING:
    from pipespec.config.hosts import HostsFile
    from pipespec.config.schema import Config
    from pipespec.instruments.plan.advice import Layout
    from pipespec.instruments.plan.group_splits import Division
    from pipespec.instruments.plan.pipeline_times import Machine
    from pipespec.placement.host_figures import Figures, ModelSizes


def run_partition(
    arguments: argparse.Namespace, hosts_file: HostsFile, figures: Figures, config: Config
) -> int:
    """Divide the devices of the only host of a hosts file by their measured times."""
    from pipespec.head.policies.draft_rounds import AUTO
    from pipespec.instruments.commands.plan import RANGE, SPREAD, show_predictions
    from pipespec.instruments.emulation.synthetic_proposer import Accuracy
    from pipespec.instruments.plan.advice import DecodingMethod, predict_all
    from pipespec.instruments.plan.group_splits import divisions, layouts_of

    (host,) = hosts_file.hosts
    measured = figures.members.get(host.workers[0])
    if len(host.devices) > 2 and measured is not None and "sum_ms" not in measured:
        raise ConfigError(
            "The figures were measured without --groups, so they lack the time in which devices "
            "of a group add up; measure again with `pipespec partition --groups --json`."
        )
    found = layouts_of(
        (each for each in divisions(len(host.devices)) if _can_compute(each, figures)),
        lambda division: _machine(hosts_file, figures, config, division),
    )
    if not found:
        raise ConfigError(
            f"No division of the {len(host.devices)} devices of {host.name} has room for the "
            "models; add devices, or lower model.context."
        )
    accuracy = Accuracy.parse(RANGE[len(RANGE) // 2], SPREAD)
    method = DecodingMethod(type(config.policy).__name__, config.policy, AUTO)
    with progress("simulating") as (on_done,):
        predicted = predict_all(
            [layout for _, layout in found.values()],
            [method],
            accuracy,
            num_tokens=arguments.tokens,
            on_done=on_done,
        )
    best, _ = found[predicted[0].layout]
    devices = grouped(host.devices, best.sizes)
    lines = {"devices": devices, "draft": host.workers[0]}
    if arguments.json:
        each = [_described(*found[one.layout], one.tbt_ms) for one in predicted]
        answer = {"divisions": each, "hosts": lines, "figures": figures.as_json()}
        write(json.dumps(answer, allow_nan=False, indent=2) + "\n")
        return 0
    show_predictions(predicted, predicted[0])
    show("A layout is the devices of the draft, the number of stages and the devices of each.")
    whole = [role for role in ("target", "draft") if not _divisible(getattr(figures, role))]
    if whole:
        show(f"Several devices cannot compute the {' or the '.join(whole)} together.")
    show(
        f"\nTo use the first, write into {arguments.hosts}, for {host.name}:",
        f"devices: {flow(devices)}",
        "and for all hosts:",
        f"draft: {lines['draft']}",
    )
    return 0


def require_one_host(hosts_file: HostsFile) -> None:
    """Raise ConfigError unless the devices of a hosts file can be divided anew."""
    if len(hosts_file.hosts) != 1:
        raise ConfigError(
            f"--groups divides the devices of one host, but the hosts file has "
            f"{len(hosts_file.hosts)}; name one of them in a file of its own."
        )
    (host,) = hosts_file.hosts
    said = [
        name
        for name, value in (
            ("draft", hosts_file.draft),
            ("order", hosts_file.order),
            ("split", hosts_file.split),
            ("spares", hosts_file.spares),
            ("a group of devices", any(size > 1 for size in host.groups)),
        )
        if value
    ]
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


def _can_compute(division: Division, figures: Figures) -> bool:
    """Whether the groups of a division can compute their models."""
    target = division.members == 1 or _divisible(figures.target)
    return target and (division.draft == 1 or _divisible(figures.draft))


def _machine(
    hosts_file: HostsFile, figures: Figures, config: Config, division: Division
) -> Machine | None:
    """The times of a division, of the layout that `partition` would choose; None: it does not
    fit. Raises ConfigError if the figures are of something else."""
    from pipespec.instruments.emulation.machine import TimeCurve
    from pipespec.instruments.plan.pipeline_times import Machine
    from pipespec.placement.measurements import problem
    from pipespec.placement.slices import plan_slices

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
    """Devices in groups of these sizes, as a hosts file has them."""
    found: list[str | list[str]] = []
    first = 0
    for size in sizes:
        found.append(list(devices[first : first + size]) if size > 1 else devices[first])
        first += size
    return found


def flow(value: Any) -> str:
    """As YAML in one line."""
    return f"[{', '.join(map(flow, value))}]" if isinstance(value, list) else str(value)


def _described(division: Division, layout: Layout, tbt_ms: float) -> Mapping[str, Any]:
    """A division as JSON values, with the time of its slowest stage."""
    machine = layout.machine
    slowest = max(curve.points[0][1] for curve in machine.stages)
    times = {"stage_ms": slowest, "draft_ms": machine.draft_ms, "tbt_ms": tbt_ms}
    return asdict(division) | times
