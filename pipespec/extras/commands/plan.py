"""`pipespec plan`: predict what a cluster will do, without running anything."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pipespec.console.arguments import finish, list_of, overrides
from pipespec.console.terminal import progress, show, write
from pipespec.errors import ConfigError
from pipespec.extras.commands import plan_hosts
from pipespec.extras.commands.plan_hosts import RANGE, SHOWN, SPREAD, predictions_table
from pipespec.limits import MAX_COUNT, check_whole, suggest

if TYPE_CHECKING:
    from pipespec.console.arguments import Commands
    from pipespec.extras.emulation.synthetic_proposer import Accuracy
    from pipespec.extras.plan.advice import DecodingMethod, PlannedLayout, Prediction
    from pipespec.extras.plan.pipeline_times import DraftRecord

# What is tried unless a setting fixes it.
TRIED: dict[str, Sequence[Any]] = {
    "policy.width": (16, 64),
    "policy.children": (8,),
    "proposer.rounds": (1, 3, "auto"),
}
# Tokens of all requests together, for which GPUs need room.
CONTEXT = 8192
# Batches of draft tokens whose entries a stage with running states holds, for each rank
# (`measurements.slots_by_setting`).
BATCHES = 2
# On GPUs of which only the names are known, layouts that take at most so much longer are as fast.
EQUAL = 0.05
# The draft's best so many are what the estimate of a layout counts as proposed.
PROPOSED = 8

MODELS = ("model.target", "model.draft")
ACCURACY = ("curve", "spread")
TIMES = ("stages", "stage_ms", "hop_ms", "draft_ms", "experts")


def add(commands: Commands) -> None:
    command = commands.add_parser(
        "plan",
        help="predict what a cluster will do, and say how to lay it out and how to decode",
        usage="pipespec plan --gpus NAME:COUNT,... [...] | pipespec plan [--profile FILE] "
        "[NAME=VALUE ...] | pipespec plan HOSTS.yaml [--groups] [...] [SETTING=VALUE ...]",
        description="Predict the time between tokens and the speed-up over plain pipeline "
        "parallelism: with --gpus of model.target and model.draft on GPUs, from their names alone; "
        "else of every decoding method, for times of stages and draft that a profile or arguments "
        "give (stages, stage_ms, hop_ms, draft_ms, experts, curve, spread); policy, policy.width, "
        "policy.children and proposer.rounds fix what is tried. With a hosts file, measure its "
        "devices and links, and choose the slices, the order of the hosts and the place of the "
        "draft with which the slowest rank is fastest, within memory. docs/planning.md says how.",
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
        help="times and texts, as `pipespec bench --profile` writes them; with a hosts file, the "
        "figures of hosts in it, or those that an earlier --json printed: nothing is measured",
    )
    command.add_argument(
        "--groups",
        action="store_true",
        help="with a hosts file: divide the devices of its only host into tensor-parallel groups "
        "for draft and target, by simulation with the measured times",
    )
    command.add_argument(
        "--tokens",
        type=int,
        default=500,
        help="simulated for the fastest (500); for the others a fifth of them",
    )
    finish(command, run)


@dataclass(frozen=True)
class Plan:
    """What is compared, and what is said beside it. `same`: layouts that take at most so much
    longer are as fast (`advice.recommend`). `about`: more for the JSON answer. `more`: the same and
    sentences about the layout of a label, for the one that was chosen."""

    layouts: Sequence[PlannedLayout]
    methods: Sequence[DecodingMethod]
    accuracy: Accuracy | DraftRecord
    same: float = 0.01
    about: Mapping[str, Any] = field(default_factory=dict)
    more: Callable[[str], tuple[Mapping[str, Any], Sequence[str]]] = lambda label: ({}, ())


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    from pipespec.extras.plan.advice import predict_all, recommend

    settings = overrides(rest, arguments.known_options)
    if any(text.startswith("cluster=") for text in settings):
        for name in ("gpus", "link", "weights", "context"):
            if getattr(arguments, name) is not None:
                raise ConfigError(f"--{name} is of no plan with a hosts file; leave one out.")
        return plan_hosts.run(arguments, settings)
    if arguments.groups:
        raise ConfigError("--groups is for the devices of a hosts file; pass HOSTS.yaml.")
    if arguments.gpus is not None and arguments.profile is not None:
        raise ConfigError("--gpus and --profile are different plans; give one of them.")
    for option in ("link", "weights"):
        if getattr(arguments, option) is not None and arguments.gpus is None:
            raise ConfigError(f"--{option} is of a cluster that --gpus describes; give --gpus too.")
    plan = (_by_times if arguments.gpus is None else _on_gpus)(arguments, settings)
    with progress("simulating") as (on_done,):
        asked = (plan.layouts, plan.methods, plan.accuracy)
        found = predict_all(*asked, num_tokens=arguments.tokens, on_done=on_done)
    advised = recommend(found, plan.same)
    # Without draft tokens, the layout that is fastest so, with the most devices.
    most_ms = min(each.machine.plain_tbt_ms for each in plan.layouts) * (1 + plan.same)
    equal = [each for each in plan.layouts if each.machine.plain_tbt_ms <= most_ms]
    plainest = max(equal, key=lambda layout: layout.num_devices)
    label = plainest.label if advised is None else advised.layout
    layout = next(each for each in plan.layouts if each.label == label)
    more, sentences = plan.more(label)
    if arguments.json:
        answer = {
            **plan.about,
            **more,
            "plain_tbt_ms": layout.machine.plain_tbt_ms,
            "predictions": [asdict(each) for each in found],
            "recommended": None if advised is None else asdict(advised),
        }
        write(json.dumps(answer, allow_nan=False) + "\n")
        return 0
    show(predictions_table(found, advised), *sentences, *_advice(found, advised, layout))
    return 0


def _given(settings: Sequence[str], *known: str) -> dict[str, Any]:
    """The values of NAME=VALUE; numbers, or lists of texts. Raises ConfigError if another name is
    given."""
    found: dict[str, Any] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in known or not value:
            raise ConfigError(
                f"`pipespec plan` takes no setting {setting!r} here; {suggest(name, known)}."
            )
        texts = [text.strip() for text in value.strip("[]").split(",")]
        try:
            match name:
                case "stages" | "spread":
                    found[name] = (int if name == "stages" else float)(value)
                case "experts":
                    found[name] = [float(text) for text in texts]
                case "policy.width" | "policy.children" | "proposer.rounds":
                    found[name] = [text if text == "auto" else int(text) for text in texts]
                case _:
                    found[name] = texts
        except ValueError:
            raise ConfigError(f"{name} is {value!r}, but must be a number.") from None
    return found


def _methods(given: Mapping[str, Any]) -> list[DecodingMethod]:
    from pipespec.config.compose import policies_to_compare
    from pipespec.extras.plan.advice import choices

    widths, children, rounds = (given.get(name, usual) for name, usual in TRIED.items())
    return list(choices(given.get("policy") or policies_to_compare(), widths, children, rounds))


def _by_times(arguments: argparse.Namespace, settings: Sequence[str]) -> Plan:
    """Every decoding method on a pipeline whose times are known."""
    from pipespec.extras.plan.advice import PlannedLayout
    from pipespec.extras.plan.pipeline_times import Profile

    if any(text.startswith("model.") for text in settings):
        raise ConfigError("Models are planned from their names with --gpus; give --gpus too.")
    given = _given(settings, *TIMES, *ACCURACY, "policy", *TRIED)
    profile = Profile.read(arguments.profile) if arguments.profile else Profile()
    if given.get("stages", 1) > 1 == profile.stages:
        profile = profile.replaced(overlap=True)  # as with proposer.overlap=auto
    profile = profile.replaced(**{name: given.get(name) for name in (*TIMES, *ACCURACY)})
    if any(name in given for name in ACCURACY):
        profile = profile.replaced(texts=())  # these describe the draft instead
    if arguments.context is not None:
        profile = profile.at_context(arguments.context)
    layout = PlannedLayout(f"{profile.stages} stages", profile.machine())
    about = {"profile": asdict(profile.replaced(texts=()))}
    return Plan([layout], _methods(given), profile.accuracy(), about=about)


def _on_gpus(arguments: argparse.Namespace, settings: Sequence[str]) -> Plan:
    """The default policy on each number of GPUs, with which the layers of a model would fit."""
    from pipespec.config.compose import compose_sections, default_policy
    from pipespec.extras.emulation.synthetic_proposer import Accuracy
    from pipespec.extras.plan import gpu_layouts
    from pipespec.extras.plan.advice import DecodingMethod, predict
    from pipespec.extras.plan.hardware import parse_gpus
    from pipespec.extras.plan.model_shape import WEIGHT_BYTES, find

    given = _given(settings, *MODELS, *ACCURACY)
    if "spread" in given and "curve" not in given:
        raise ConfigError("spread says how a stated accuracy varies; give curve too.")
    gpus, weights = parse_gpus(arguments.gpus), arguments.weights or "bfloat16"
    context = CONTEXT if arguments.context is None else arguments.context
    check_whole("context", context, 1, MAX_COUNT)
    if weights not in WEIGHT_BYTES:
        raise ConfigError(f"--weights is {weights!r}, but {suggest(weights, list(WEIGHT_BYTES))}.")
    if "model.target" not in given:
        fitting = gpu_layouts.known_that_fit(gpus, weights, context)[:SHOWN]
        known = f"; of those it knows, these fit in {weights}: {', '.join(fitting)}"
        raise ConfigError(
            "`pipespec plan --gpus` needs model.target, a folder or a hub id"
            f"{known if fitting else ''}."
        )
    link = None
    if arguments.link:
        (link,) = compose_sections(["emulate_link"], [f"emulate_link={arguments.link}"])
    shape, draft = (find(given[name][0]) if name in given else None for name in MODELS)
    assert shape is not None
    policy = default_policy("best_first" if draft else "root")
    method = DecodingMethod("best_first" if draft else "root", policy, "auto" if draft else 1)
    spread = given.get("spread", SPREAD)
    curves = [given["curve"]] if "curve" in given else RANGE
    accuracies = [Accuracy.parse(list(curve), spread) for curve in curves]
    usual = accuracies[len(accuracies) // 2]
    target = gpu_layouts.Target(shape, weights, context, BATCHES * len(gpus) * policy.max_rows)
    clusters = gpu_layouts.clusters(target, draft, gpus, link)
    if draft is not None:
        clusters = gpu_layouts.promising(clusters, usual.hit_rate(PROPOSED))
    by_label = {each.label: each for each in clusters}

    def more(label: str) -> tuple[Mapping[str, Any], Sequence[str]]:
        cluster = by_label[label]
        plain_ms = cluster.machine.plain_tbt_ms
        said, by_accuracy = [*cluster.sentences(draft, gpus)], []
        for each in accuracies * (draft is not None):
            ms = predict(method, cluster.machine, each, num_tokens=arguments.tokens).tbt_ms
            by_accuracy.append({"top1": each.hit_rate(1), "tbt_ms": ms})
            said.append(
                f"With a draft whose first choice is right for {each.hit_rate(1):.0%}: {ms:.0f} "
                f"ms, {plain_ms / ms:.1f} times as fast as plain pipeline parallelism."
            )
        if draft is None:
            said.append("Give model.draft too: a smaller model of the same family is much faster.")
        said.append(
            "Times are ASSUMED from the GPUs' data sheets, and so is the accuracy of the draft "
            "unless curve states it; `pipespec plan HOSTS.yaml` measures."
        )
        return {**cluster.described(gpus), "by_accuracy": by_accuracy}, said

    layouts = [each.layout() for each in clusters]
    return Plan(layouts, [method], usual, EQUAL, {"target": asdict(shape)}, more)


def _advice(
    predictions: Sequence[Prediction], advised: Prediction | None, layout: PlannedLayout
) -> list[str]:
    plain_ms = layout.machine.plain_tbt_ms
    plain = f"plain pipeline parallelism (policy=root), which takes {plain_ms:.1f} ms"
    said = [f"TBT is the time between tokens in ms, gain the speed-up over {plain}."]
    speculating = [p for p in predictions if p.policy != "root"]
    losing = sum(p.speedup < 1 for p in speculating)
    if advised is None:
        root = " ".join((*layout.settings, "policy=root"))
        none = "No combination would be faster than plain pipeline parallelism."
        return [*said, *([none] if speculating else []), f"Recommended: {root}"]
    if losing:
        said.append(
            f"{losing} of {len(speculating)} speculating combinations would be slower than that."
        )
    said += [f"Recommended: {' '.join(advised.settings)}"]
    gain = f"{advised.speedup:.2f} times as fast as plain pipeline parallelism"
    return [*said, f"It would decode a token in {advised.tbt_ms:.1f} ms, {gain}."]
