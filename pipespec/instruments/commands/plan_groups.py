"""`pipespec plan --target-group-ms` and `pipespec partition --groups`: which devices of a host
compute the draft, and which the target."""

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
    from pipespec.instruments.plan.group_splits import Division, PredictedDivision
    from pipespec.instruments.plan.pipeline_times import Machine
    from pipespec.placement.host_figures import Figures, ModelSizes

SHOWN = 12  # divisions in the table


def run_plan(arguments: argparse.Namespace) -> int:
    """Divide --devices by the times that are given of groups of some sizes."""
    from pipespec.head.policies.best_first import BestFirst
    from pipespec.instruments.emulation.synthetic_proposer import Accuracy
    from pipespec.instruments.plan.group_splits import (
        divisions,
        machine_by_devices,
        predict_divisions,
    )
    from pipespec.instruments.plan.machine_profile import Profile

    given = (arguments.devices, arguments.target_group_ms, arguments.draft_group_ms)
    if any(each is None for each in given):
        raise ConfigError(
            "--devices, --target-group-ms and --draft-group-ms belong together: so many devices "
            "are divided by the times of groups of them."
        )
    if arguments.devices < 2:
        raise ConfigError(
            f"--devices is {arguments.devices}, but the draft and the target need one each."
        )
    if arguments.stages is not None or arguments.stage_ms or arguments.profile:
        raise ConfigError(
            "--devices plans groups from the times of groups alone; leave --stages, --stage-ms and "
            "--profile out."
        )
    target_ms = _times("--target-group-ms", arguments.target_group_ms)
    draft_ms = _times("--draft-group-ms", arguments.draft_group_ms)
    profile = Profile().replaced(curve=arguments.curve, spread=arguments.spread)
    accuracy = profile.accuracy()
    assert isinstance(accuracy, Accuracy)
    with progress("simulating"):
        found = predict_divisions(
            divisions(arguments.devices, one_stage=True),
            lambda division: machine_by_devices(target_ms, draft_ms, division),
            BestFirst(max(arguments.widths), max(arguments.children)),
            accuracy,
            num_tokens=arguments.tokens,
            seed=arguments.seed,
        )
    if arguments.json:
        write(json.dumps(as_json(found), allow_nan=False) + "\n")
        return 0
    show_divisions(found)
    best = found[0].division
    show(
        f"Recommended: cluster.tensor_parallel={best.members} "
        f"cluster.draft_tensor_parallel={best.draft} cluster.stages=1"
    )
    return 0


def run_partition(
    arguments: argparse.Namespace, hosts_file: HostsFile, figures: Figures, config: Config
) -> int:
    """Divide the devices of the only host of a hosts file by their measured times."""
    from pipespec.instruments.plan.cluster_plan import RANGE
    from pipespec.instruments.plan.group_splits import divisions, predict_divisions

    (host,) = hosts_file.hosts
    measured = figures.members.get(host.workers[0])
    if len(host.devices) > 2 and measured is not None and "sum_ms" not in measured:
        raise ConfigError(
            "The figures were measured without --groups, so they lack the time in which devices "
            "of a group add up; measure again with `pipespec partition --groups --json`."
        )
    with progress("simulating"):
        found = predict_divisions(
            [each for each in divisions(len(host.devices)) if _can_compute(each, figures)],
            lambda division: _machine(hosts_file, figures, config, division),
            config.policy,
            RANGE[len(RANGE) // 2],
            num_tokens=arguments.tokens,
        )
    if not found:
        raise ConfigError(
            f"No division of the {len(host.devices)} devices of {host.name} has room for the "
            "models; add devices, or lower model.context."
        )
    devices = grouped(host.devices, found[0].division.sizes)
    lines = {"devices": devices, "draft": host.workers[0]}
    if arguments.json:
        answer = {**as_json(found), "hosts": lines, "figures": figures.as_json()}
        write(json.dumps(answer, allow_nan=False, indent=2) + "\n")
        return 0
    show_divisions(found)
    whole = [role for role in ("target", "draft") if not _divisible(getattr(figures, role))]
    if whole:
        show(f"Several devices cannot compute the {' or the '.join(whole)} together.")
    show(
        f"\nTo use the first, write into {arguments.hosts}, for {host.name}:",
        f"devices: {_flow(devices)}",
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


def _times(option: str, texts: Sequence[str]) -> dict[int, float]:
    """From texts such as 1:24.8 and 8:11.2: devices and milliseconds."""
    from pipespec.instruments.emulation.machine import TimeCurve, point

    try:
        return dict(TimeCurve(tuple(point(text) for text in texts)).points)
    except ConfigError:
        raise ConfigError(
            f"{option} is {','.join(texts)!r}, but must be devices and milliseconds by rising "
            "numbers of devices, as in 1:24.8,8:11.2."
        ) from None


def grouped(devices: Sequence[str], sizes: Sequence[int]) -> list[str | list[str]]:
    """Devices in groups of these sizes, as a hosts file has them."""
    found: list[str | list[str]] = []
    first = 0
    for size in sizes:
        found.append(list(devices[first : first + size]) if size > 1 else devices[first])
        first += size
    return found


def _flow(devices: Sequence[str | list[str]]) -> str:
    """As YAML in one line."""
    texts = [f"[{', '.join(each)}]" if isinstance(each, list) else each for each in devices]
    return f"[{', '.join(texts)}]"


def _slowest_ms(machine: Machine) -> float:
    """The time of the slowest stage."""
    return max(curve.points[0][1] for curve in machine.stages)


def as_json(found: Sequence[PredictedDivision]) -> Mapping[str, Any]:
    """The divisions, the fastest first."""
    return {
        "divisions": [
            {
                **asdict(each.division),
                "stage_ms": _slowest_ms(each.machine),
                "draft_ms": each.machine.draft_ms,
                "tbt_ms": each.tbt_ms,
            }
            for each in found
        ]
    }


def show_divisions(found: Sequence[PredictedDivision]) -> None:
    """Print the fastest divisions."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        box=SIMPLE_HEAD,
        padding=0,
        title="Devices of the draft and of each stage, the fastest first",
        title_justify="left",
    )
    for heading in ("draft", " stages", " of each", " stage ms", " round ms", " TBT", " tok/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in found[:SHOWN]:
        division, machine = each.division, each.machine
        table.add_row(
            str(division.draft),
            str(division.stages),
            str(division.members),
            f"{_slowest_ms(machine):.2f}",
            f"{machine.round_ms(1):.2f}",
            f"{each.tbt_ms:.2f}",
            f"{1e3 / each.tbt_ms:.0f}",
        )
    show(table)
