"""`pipespec plan --gpus`: where the layers of a model would go, and how fast that would be."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from pipespec.console.terminal import show, write
from pipespec.errors import ConfigError
from pipespec.system.sizes import size_text

if TYPE_CHECKING:
    from pipespec.instruments.plan.cluster_plan import ClusterPlan

# Tokens of all requests together, for which the devices need room.
CONTEXT = 8192
# Options of plans from given times, and of divided devices.
OTHERS = (
    *("profile", "stages", "stage_ms", "experts", "hop_ms", "draft_ms", "mid_curve", "mid_ms"),
    *("devices", "target_group_ms", "draft_group_ms"),
    *("policies", "widths", "children", "rounds"),
)


def run(arguments: argparse.Namespace, settings: list[str]) -> int:
    """Say where the layers would go on the GPUs of --gpus, and predict the time of a token."""
    from pipespec.config.compose import compose_sections
    from pipespec.config.method_registry import default_policy
    from pipespec.instruments.plan import cluster_plan
    from pipespec.instruments.plan.hardware import parse_gpus

    _require_none_of_others(arguments)
    names = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in ("model.target", "model.draft") or not value:
            raise ConfigError(
                f"`pipespec plan --gpus` takes model.target and model.draft, but got {setting!r}."
            )
        names[name] = value
    if "model.target" not in names:
        raise ConfigError("`pipespec plan --gpus` needs model.target: a folder or a hub id.")
    link = None
    if arguments.link:
        (link,) = compose_sections(["emulate_link"], [f"emulate_link={arguments.link}"])
    asked = cluster_plan.PlanRequest(
        target=names["model.target"],
        draft=names.get("model.draft"),
        gpus=tuple(parse_gpus(arguments.gpus)),
        link=link,
        weights=cluster_plan.PlanRequest.weights
        if arguments.weights is None
        else arguments.weights,
        context=CONTEXT if arguments.context is None else arguments.context,
        curve=tuple(arguments.curve or ()),
        spread=arguments.spread,
        members=tuple(arguments.tensor_parallel or (1,)),
        sum_ms=arguments.sum_ms,
    )
    found = cluster_plan.plan(
        asked, default_policy("best_first"), num_tokens=arguments.tokens, seed=arguments.seed
    )
    if arguments.json:
        write(json.dumps(found.described(), allow_nan=False) + "\n")
        return 0
    _print(found)
    return 0


def _require_none_of_others(arguments: argparse.Namespace) -> None:
    """Raise ConfigError if an option was given that does nothing with --gpus."""
    given = [name for name in OTHERS if getattr(arguments, name) is not None]
    if given:
        options = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ConfigError(
            f"--gpus plans best_first from the names of models and GPUs alone; leave {options} out."
        )
    if arguments.spread is not None and not arguments.curve:
        raise ConfigError(
            "--spread says how a stated accuracy varies; with --gpus give --curve too, or leave it "
            "out."
        )


def _print(found: ClusterPlan) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    title = f"{found.target.name}, {found.target.parameters / 1e9:.1f} billion parameters"
    table = Table(box=SIMPLE_HEAD, padding=0, title=title, title_justify="left")
    has_states = any(stage.state_bytes for stage in found.cluster.stages)
    kept = "KV+states" if has_states else "KV"
    for heading in ("rank", "GPU", "layers", "weights", kept, "1 row", "16 rows", "64 rows"):
        table.add_column(f" {heading} ", justify="left" if heading == "GPU" else "right")
    if found.draft is not None and found.cluster.draft is not None:
        gib = size_text(found.draft.parameters * 2)
        round_ms = f"{found.cluster.machine.round_ms(1):.1f} ms"
        table.add_row("0", found.cluster.draft.name, "draft", gib, "", "", round_ms, "")
    for rank, stage in enumerate(found.cluster.stages, 1):
        gpus = f"{stage.members} x {stage.gpu.name}" if stage.members > 1 else stage.gpu.name
        times = [f"{stage.times.ms(rows):.1f} ms" for rows in (1, 16, 64)]
        sizes = map(size_text, (stage.weight_bytes, stage.kv_bytes + stage.state_bytes))
        table.add_row(str(rank), gpus, str(stage.layers), *sizes, *times)
    show(table)
    if found.left_out:
        unused = ", ".join(f"{count} x {name}" for name, count in found.left_out.items())
        show(f"Left out: {unused}; with more stages a token would take longer.")
    if found.share.size > 1:
        _print_groups(found, kept)
    show(f"Plain pipeline parallelism (policy=root): {found.plain_ms:.0f} ms between tokens.")
    for each in found.predicted:
        low = min(each.tbt_ms, found.plain_ms)
        show(
            f"With a draft whose first choice is right for {each.top1:.0%}: {low:.0f} ms, "
            f"{found.plain_ms / low:.1f} times as fast."
        )
    if found.draft is None:
        show("Give model.draft too: a smaller model of the same family makes this much faster.")
    show(
        "Times are ASSUMED from the GPUs' data sheets, and so is the accuracy of the draft unless "
        "--curve states it; `pipespec partition` measures."
    )


def _print_groups(found: ClusterPlan, kept: str) -> None:
    """Print what the GPUs of a group have, and the settings that make such groups."""
    size, heads = found.share.size, found.share.repeated_kv_heads
    repeated = size_text(max(stage.repeated_bytes for stage in found.cluster.stages))
    again = f", and {heads} KV head{'s' * (heads > 1)} of each layer once more" if heads else ""
    show(
        f"Weights and {kept} are those of each of {size} GPUs at most: {repeated} of norms and "
        f"other weights are on all of them{again}.",
        "What a group takes to add up is ASSUMED to be that of GPUs with NVLink; --sum-ms states "
        "your own.",
        f"Recommended: cluster.tensor_parallel={size} cluster.stages={len(found.cluster.stages)}",
    )
