"""`pipespec plan`: predict what a cluster will do, without running anything."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from pipespec.console.arguments import finish, list_of, overrides
from pipespec.console.terminal import progress, show, write
from pipespec.errors import ConfigError

if TYPE_CHECKING:
    from pipespec.console.arguments import Commands
    from pipespec.instruments.plan.advice import Prediction
    from pipespec.instruments.plan.pipeline_times import Machine

# What is tried unless other sizes are given.
WIDTHS = (8, 16, 32, 64)
CHILDREN = (8,)
ROUNDS = (1, 2, 3, 4)


def add(commands: Commands) -> None:
    """Describe the command."""
    command = commands.add_parser(
        "plan",
        help="predict what a cluster will do, and which decoding method suits it",
        description="Predict tokens per step, time between tokens and speed-up over plain pipeline "
        "parallelism for every policy, width and number of draft rounds. With --gpus, say where "
        "the layers of model.target would go and how fast that would be, from its config alone. "
        "Nothing is run; docs/planning.md says how it is done.",
    )
    command.add_argument(
        "--gpus",
        type=list_of(str),
        metavar="NAME:COUNT,...",
        help="GPUs of a cluster for model.target and model.draft (a folder, a hub id or one of the "
        "models that pipespec knows), as in rtx3090:4",
    )
    command.add_argument("--link", metavar="NAME", help="between them, of conf/emulate_link (none)")
    command.add_argument("--weights", help="of the target: bfloat16 (default), int8, fp8 or int4")
    command.add_argument(
        "--context",
        type=int,
        metavar="TOKENS",
        help="of all requests together (8192; with --profile that at which it was measured)",
    )
    command.add_argument(
        "--profile",
        metavar="FILE",
        help="JSON with what the options below give, as `pipespec profile` writes it",
    )
    command.add_argument("--stages", type=int, metavar="N", help="stages of the pipeline (8)")
    command.add_argument(
        "--stage-ms",
        type=list_of(str),
        metavar="ROWS:MS,...",
        help="time of a stage by rows, as in 1:37.8,64:41; without a ROWS: it is the same for all",
    )
    command.add_argument(
        "--experts",
        type=list_of(float),
        metavar="E,K,SHARE[,OVERLAP]",
        help="a mixture of experts: of E experts a row chooses K, which take that SHARE of the "
        "time of one row, as in 256,8,0.9; OVERLAP says how much alike rows choose, from 0 "
        "(independently, the default) to 1 (the same) (a dense model)",
    )
    command.add_argument(
        "--hop-ms",
        type=list_of(str),
        metavar="ROWS:MS,...",
        help="from stage to stage by rows, as in 1:0.1,64:8.4 (0)",
    )
    command.add_argument("--draft-ms", type=float, metavar="MS", help="one draft round (0)")
    command.add_argument(
        "--curve",
        type=list_of(str),
        metavar="RANK:SHARE,...",
        help="accuracy of the draft: share of tokens among its RANK best (1:0.81,8:0.99)",
    )
    command.add_argument(
        "--spread", type=float, help="how much its confidence varies, from 0 to below 1 (0.5)"
    )
    command.add_argument(
        "--mid-curve",
        type=list_of(str),
        metavar="RANK:SHARE,...",
        help="accuracy of the mid-size model of a cascade (there is none)",
    )
    command.add_argument(
        "--mid-ms", type=float, metavar="MS", help="one pass of it, beside the head (0)"
    )
    command.add_argument(
        "--tensor-parallel",
        type=list_of(int),
        metavar="N,...",
        help="devices that compute the layers of so many stages together (1: each a stage); of "
        "several numbers the best is recommended",
    )
    command.add_argument(
        "--sum-ms",
        type=float,
        metavar="MS",
        help="what adding up takes such a group for the layers of one stage (0; with --gpus, as "
        "with NVLink)",
    )
    command.add_argument(
        "--devices",
        type=int,
        metavar="K",
        help="of a host, to be divided between a group for the target and one for the draft",
    )
    command.add_argument(
        "--target-group-ms",
        type=list_of(str),
        metavar="DEVICES:MS,...",
        help="a step of the target on groups of some sizes, as in 1:24.8,2:15.9,8:11.2",
    )
    command.add_argument(
        "--draft-group-ms",
        type=list_of(str),
        metavar="DEVICES:MS,...",
        help="a draft round on such groups",
    )
    command.add_argument(
        "--policies",
        type=list_of(str),
        metavar="NAME,...",
        help="of conf/policy (all)",
    )
    command.add_argument("--widths", type=list_of(int), help="(8,16,32,64)")
    command.add_argument("--children", type=list_of(int), help="(8)")
    command.add_argument("--rounds", type=list_of(_rounds), help="numbers or auto (1,2,3,4)")
    command.add_argument(
        "--tokens",
        type=int,
        default=500,
        help="simulated for the fastest methods (500); for the others a fifth of them",
    )
    command.add_argument("--seed", type=int, default=0)
    finish(command, run)


def _rounds(text: str) -> int | str:
    return text if text == "auto" else int(text)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Predict tokens per step, TBT and speed-up of every decoding method, and advise one."""
    models = overrides(rest, arguments.known_options)
    if arguments.gpus:
        from pipespec.instruments.commands import plan_cluster

        return plan_cluster.run(arguments, models)
    if models:
        raise ConfigError(
            f"`pipespec plan` takes options and no settings, but got {rest[0]!r}; models are for "
            "--gpus."
        )
    for option in ("link", "weights"):
        if getattr(arguments, option) is not None:
            raise ConfigError(f"--{option} is of a cluster that --gpus describes; give --gpus too.")
    arguments.widths = arguments.widths or WIDTHS
    arguments.children = arguments.children or CHILDREN
    arguments.rounds = arguments.rounds or ROUNDS

    divided = (arguments.devices, arguments.target_group_ms, arguments.draft_group_ms)
    if any(given is not None for given in divided):
        from pipespec.instruments.commands import plan_groups

        return plan_groups.run_plan(arguments)

    from pipespec.config.method_registry import policies_to_compare
    from pipespec.instruments.plan import advice, grid
    from pipespec.instruments.plan.machine_profile import Profile

    profile = Profile.read(arguments.profile) if arguments.profile else Profile()
    several = arguments.stages is not None and profile.stages == 1 < arguments.stages
    profile = profile.replaced(
        stages=arguments.stages,
        overlap=True if several else None,  # as with proposer.overlap=auto
        stage_ms=arguments.stage_ms,
        experts=arguments.experts,
        hop_ms=arguments.hop_ms,
        draft_ms=arguments.draft_ms,
        curve=arguments.curve,
        spread=arguments.spread,
        mid_curve=arguments.mid_curve,
        mid_ms=arguments.mid_ms,
        tensor_parallel=arguments.tensor_parallel,
        sum_ms=arguments.sum_ms,
    )
    if arguments.curve or arguments.spread is not None or profile.mid_curve:
        # These describe the draft instead; a cascade is simulated from curves alone.
        profile = profile.replaced(texts=())
    if arguments.context is not None:
        profile = profile.at_context(arguments.context)
    machines, accuracy = profile.machines(), profile.accuracy()
    policies = arguments.policies or policies_to_compare()
    methods = list(advice.choices(policies, arguments.widths, arguments.children, arguments.rounds))
    by_size = {}
    for size, machine in machines.items():
        with progress("simulating") as (on_done,):
            by_size[size] = grid.predictions(
                methods,
                machine,
                accuracy,
                num_tokens=arguments.tokens,
                seed=arguments.seed,
                mid=profile.mid(),
                on_done=on_done,
            )
    found = [(size, each) for size, predictions in by_size.items() for each in predictions]
    advised = advice.recommend([each for _, each in found])
    best = min(machines, key=lambda size: machines[size].plain_tbt_ms)  # without draft tokens
    if advised is not None:
        best = next(size for size, each in found if each is advised)
    if arguments.json:
        chosen = None if advised is None else {**asdict(advised), "tensor_parallel": best}
        answer = {
            "profile": asdict(profile.replaced(texts=())),
            "plain_tbt_ms": profile.machine().plain_tbt_ms,
            "predictions": [{**asdict(each), "tensor_parallel": size} for size, each in found],
            "recommended": chosen,
        }
        write(json.dumps(answer, allow_nan=False) + "\n")
        return 0
    for size, machine in machines.items():
        _print_table(machine, size, by_size[size], advised)
    groups = f"cluster.tensor_parallel={best} cluster.stages={machines[best].num_stages} "
    _print_advice([each for _, each in found], advised, groups if len(machines) > 1 else "")
    if advised is not None and advised.texts:
        _print_texts(machines[best], advised)
    return 0


def _print_texts(machine: Machine, advised: Prediction) -> None:
    """Print what the advised method does with each benchmark, and how much texts differ."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        box=SIMPLE_HEAD, padding=0, title="The recommended one, by benchmark", title_justify="left"
    )
    table.add_column("benchmark")
    for heading in ("texts", "tok/step", "TBT", "of texts", "gain"):
        table.add_column(f" {heading}", justify="right", no_wrap=True)
    plain_ms = machine.plain_tbt_ms
    for benchmark in dict.fromkeys(text.benchmark for text in advised.texts):
        texts = [text for text in advised.texts if text.benchmark == benchmark]
        tokens = sum(text.tokens for text in texts)
        tbt_ms = sum(text.tbt_ms * text.tokens for text in texts) / tokens
        steps = sum(text.tokens / text.tokens_per_step for text in texts)
        times = [text.tbt_ms for text in texts]
        table.add_row(
            benchmark,
            str(len(texts)),
            f"{tokens / steps:.2f}",
            f"{tbt_ms:.1f}",
            f" {min(times):.1f} to {max(times):.1f}",
            f"{plain_ms / tbt_ms:.2f}",
        )
    show(table)


def _print_table(
    machine: Machine, size: int, predictions: Sequence[Prediction], advised: Prediction | None
) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        box=SIMPLE_HEAD,
        padding=0,
        title=f"{machine.num_stages} stages{f' of {size} devices' if size > 1 else ''}; plain "
        "pipeline parallelism: "
        f"{machine.plain_tbt_ms:.1f} ms between tokens",
        title_justify="left",
    )
    headings = "policy width top-k rounds tok/step ± hits rows TBT bound E(T) gain"
    for heading in headings.split():
        table.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap=True)
    for p in predictions:
        table.add_row(
            p.policy,
            str(p.width),
            str(p.children),
            str(p.rounds),
            f"{p.tokens_per_step:.2f}",
            f"{p.error:.2f}",
            f"{p.hit_rate:.2f}",
            f"{p.rows_per_step:.1f}",
            f"{p.tbt_ms:.1f}",
            "" if p.bound_ms is None else f"{p.bound_ms:.1f}",
            "" if p.specpipe_ms is None else f"{p.specpipe_ms:.1f}",
            f"{p.speedup:.2f}",
            style="bold" if p is advised else None,
        )
    show(table)


def _print_advice(
    predictions: Sequence[Prediction], advised: Prediction | None, groups: str
) -> None:
    """Print what the predictions say, a sentence a line.

    Args:
        groups: the settings that make the best groups of devices.
    """
    show("TBT is the time between tokens in ms, gain the speed-up over plain pipeline parallelism.")
    if any(p.bound_ms is not None for p in predictions):
        show(
            "For `level`, bound and E(T) are TBT by equation, with every draft token among the "
            "top-k in time: bound by this schedule's, E(T) by SpecPipe's."
        )
    if advised is None:
        show(
            "No combination would be faster than plain pipeline parallelism.",
            f"Recommended: {groups}policy=root",
        )
        return
    show(
        f"Recommended: {groups}{' '.join(advised.settings)}",
        f"It would decode a token in {advised.tbt_ms:.1f} ms, {advised.speedup:.2f} times as fast "
        "as plain pipeline parallelism.",
    )
    num_losing = sum(p.speedup < 1 for p in predictions if p.policy != "root")
    if num_losing:
        num_speculating = sum(p.policy != "root" for p in predictions)
        show(
            f"{num_losing} of {num_speculating} speculating combinations would be slower than "
            "plain pipeline parallelism."
        )
