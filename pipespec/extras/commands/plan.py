"""`pipespec plan`: predict what a cluster will do, without running anything. Above 350 lines, as
the tables of one command are beside its options."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from pipespec.config.compose import compose_sections, default_policy, policies_to_compare
from pipespec.console.arguments import AddParser, finish, list_of, overrides, refuse_settings
from pipespec.console.terminal import progress, show, table_of, write
from pipespec.errors import ConfigError
from pipespec.extras.commands import plan_drafts, plan_hosts
from pipespec.extras.commands.plan_hosts import predictions_table
from pipespec.extras.emulation.synthetic_proposer import RANGE, USUAL, Accuracy
from pipespec.extras.plan import gpu_layouts
from pipespec.extras.plan.advice import (
    DecodingMethod,
    PlannedLayout,
    Prediction,
    choices,
    predict,
    predict_all,
    recommend,
)
from pipespec.extras.plan.gpu_layouts import GIB, ROUND_MS, PlannedModel
from pipespec.extras.plan.hardware import parse_gpus
from pipespec.extras.plan.model_shape import find, published
from pipespec.extras.plan.pipeline_times import DraftRecord, Profile
from pipespec.extras.plan.simulation import Rounds
from pipespec.extras.plan.stored_weights import WEIGHTS
from pipespec.limits import MAX_COUNT, check_whole, suggest

# What is tried unless a setting fixes it.
TRIED: dict[str, Sequence[Any]] = {
    "policy.width": (16, 64),
    "policy.children": (8,),
    "proposer.rounds": (1, 3, "auto"),
}
# Rounds that are tried on GPUs: where a step holds one whole round and a part of a second, a longer
# step with both may be faster than the shorter one, which `auto` chooses.
ROUNDS_ON_GPUS: Sequence[Rounds] = (2, 3, "auto")
# Tokens of all requests together, for which GPUs need room.
CONTEXT = 8192
# Batches of draft tokens whose entries a stage with running states holds, for each rank
# (`measurements.slots_by_setting`).
BATCHES = 2
# On GPUs of which only the names are known, layouts that take at most so much longer are as fast.
EQUAL = 0.05
# The draft's best so many are what the estimate of a layout counts as proposed.
PROPOSED = 8

# Assumed accuracies of proposer=suffix, from a new text to one that repeats others; of the demo
# target's answers .61 were among 16 candidates (docs/benchmarks.md).
SUFFIX_RANGE = (("1:0.2", "8:0.3"), ("1:0.45", "8:0.6"), ("1:0.8", "8:0.9"))
SUFFIX_SPREAD = 0.9

MODELS = ("model.target", "model.draft")
PROPOSERS = ("draft_model", "suffix")
OF_GPUS = ("link", "weights", "draft-weights")
ACCURACY = ("curve", "spread")
TIMES = ("stages", "stage_ms", "hop_ms", "draft_ms", "experts")


def add(add_parser: AddParser) -> None:
    command = add_parser(
        usage="pipespec plan --gpus NAME:COUNT,... [...] | pipespec plan [--profile FILE] "
        "[NAME=VALUE ...] | pipespec plan --drafts MODEL [--draft NAME,...] [NAME=VALUE ...] | "
        "pipespec plan HOSTS.yaml [--groups] [...] [SETTING=VALUE ...]",
        description="Predict the time between tokens, and recommend layout and decoding method: "
        "with --gpus from the names of GPUs and models alone; with --profile, or with times as "
        "settings (stages, stage_ms, hop_ms, draft_ms, experts, curve, spread), by comparing all "
        "methods. policy, policy.width, policy.children, proposer.rounds and proposer=suffix fix "
        "what is tried. With a hosts file, measure its devices and links, and divide the layers so "
        "that the slowest rank is as fast as memory allows. See docs/planning.md.",
    )
    command.add_argument(
        "--gpus",
        type=list_of(str),
        metavar="NAME:COUNT,...",
        help="GPUs of a cluster for model.target and model.draft (a folder, a hub id or one of the "
        "models that pipespec knows), as in rtx3090:4",
    )
    command.add_argument(
        "--models",
        action="store_true",
        help="list the models that pipespec knows; with --gpus those that fit",
    )
    command.add_argument(
        "--drafts",
        action="store_true",
        help="compare what could draft for model.target: models at hand, or those of model.draft, "
        "and proposer=suffix, by the times of this machine or of stage_ms",
    )
    command.add_argument("--link", metavar="NAME", help="between them, of conf/emulate_link (none)")
    command.add_argument(
        "--weights",
        help="of the target: bfloat16, int8, fp8 or int4; as it is published by default",
    )
    command.add_argument("--draft-weights", metavar="WEIGHTS", help="the same of the draft")
    command.add_argument(
        "--context",
        type=int,
        metavar="TOKENS",
        help="of all requests together (8192; with --profile that at which it was measured)",
    )
    command.add_argument(
        "--profile",
        metavar="FILE",
        help="times and texts, as `pipespec bench --profile` writes them",
    )
    command.add_argument(
        "--groups",
        action="store_true",
        help="with a hosts file: divide the devices of its only host into tensor-parallel groups "
        "for draft and target, by simulation with the measured times",
    )
    command.add_argument(
        "--tokens", type=int, default=500, help="to simulate of each layout and method (500)"
    )
    finish(command, run)


@dataclass(frozen=True)
class Plan:
    """What is compared, and what is said beside it. `same`: layouts that take at most so much
    longer are as fast (`advice.recommend`). `about`: more for the JSON answer. `more`: the same and
    sentences about the layout of a label with so many draft rounds, for the one that was chosen.
    `undrafted`: what is advised in its place where no draft tokens pay."""

    layouts: Sequence[PlannedLayout]
    methods: Sequence[DecodingMethod]
    accuracy: Accuracy | DraftRecord
    same: float = 0.01
    about: Mapping[str, Any] = field(default_factory=dict)
    more: Callable[[str, Rounds], tuple[Mapping[str, Any], Sequence[str]]] = lambda *_: ({}, ())
    undrafted: Callable[[], Plan] | None = None


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    settings = overrides(rest, arguments.known_options)
    if any(text.startswith("cluster=") for text in settings):
        for option in ("gpus", "models", "drafts", *OF_GPUS, "context", "profile"):
            if getattr(arguments, option.replace("-", "_")):
                raise ConfigError(f"--{option} is of no plan with a hosts file; leave one out.")
        return plan_hosts.run(arguments, settings)
    if arguments.groups:
        raise ConfigError("--groups is for the devices of a hosts file; pass HOSTS.yaml.")
    if arguments.gpus is not None and arguments.profile is not None:
        raise ConfigError("--gpus and --profile are different plans; give one of them.")
    if arguments.models:
        refuse_settings(arguments, rest)
        return _list_models(arguments)
    for option in OF_GPUS:
        if getattr(arguments, option.replace("-", "_")) is not None and arguments.gpus is None:
            raise ConfigError(f"--{option} is of a cluster that --gpus describes; give --gpus too.")
    of_gpus = _by_times if arguments.gpus is None else _on_gpus
    plan = (_of_drafts if arguments.drafts else of_gpus)(arguments, settings)
    with progress("simulating") as (on_done,):
        asked = (plan.layouts, plan.methods, plan.accuracy)
        found = predict_all(*asked, num_tokens=arguments.tokens, on_done=on_done)
    advised = recommend(found, plan.same)
    if advised is None and plan.undrafted is not None:
        plan = plan.undrafted()
    # Without draft tokens, the layout that is fastest so, with the fewest devices.
    most_ms = min(each.machine.plain_tbt_ms for each in plan.layouts) * (1 + plan.same)
    equal = [each for each in plan.layouts if each.machine.plain_tbt_ms <= most_ms]
    plainest = min(equal, key=lambda layout: layout.num_devices)
    label = plainest.label if advised is None else advised.layout
    layout = next(each for each in plan.layouts if each.label == label)
    rounds = plan.methods[-1].rounds if advised is None else advised.rounds
    more, sentences = plan.more(label, rounds)
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
        if name == "proposer" and value not in PROPOSERS:
            raise ConfigError(f"proposer is {value!r}; {suggest(value, PROPOSERS)}.")
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
    widths, children, rounds = (given.get(name, usual) for name, usual in TRIED.items())
    return list(choices(given.get("policy") or policies_to_compare(), widths, children, rounds))


def _by_times(arguments: argparse.Namespace, settings: Sequence[str]) -> Plan:
    """Every decoding method on a pipeline whose times are known."""
    if any(text.startswith("model.") for text in settings):
        raise ConfigError("Models are planned from their names with --gpus; give --gpus too.")
    given = _given(settings, *TIMES, *ACCURACY, "policy", "proposer", *TRIED)
    proposer: tuple[str, ...] = ()
    said = []
    if given.get("proposer") == ["suffix"]:
        proposer = ("proposer=suffix",)
        said = ["A round of proposer=suffix, and how often it is right, are assumed if not given."]
        usual = SUFFIX_RANGE[len(SUFFIX_RANGE) // 2]
        given = {"curve": usual, "spread": SUFFIX_SPREAD, "draft_ms": ROUND_MS} | given
    profile = Profile.read(arguments.profile) if arguments.profile else Profile()
    if given.get("stages", 1) > 1 == profile.stages:
        profile = profile.replaced(overlap=True)  # as with proposer.overlap=auto
    if "hop_ms" in given:
        profile = replace(profile, row_ms=None)
    profile = profile.replaced(**{name: given.get(name) for name in (*TIMES, *ACCURACY)})
    if any(name in given for name in ACCURACY):
        profile = profile.replaced(texts=())  # these describe the draft instead
    if arguments.context is not None:
        profile = profile.at_context(arguments.context)
    machine = profile.machine()
    layout = PlannedLayout(f"{profile.stages} stages", machine, settings=proposer)
    about = {"profile": asdict(profile.replaced(texts=()))}
    if profile.row_ms is not None:
        rows, _ = machine.hop.points[-2]
        said.append(
            f"Hops were measured with up to {rows} row{'s' * (rows > 1)}; each row beyond is taken "
            f"to add its bytes over the bandwidth of the slowest link, {profile.row_ms:.3g} ms."
        )
    accuracy = profile.accuracy()
    return Plan([layout], _methods(given), accuracy, about=about, more=lambda *_: ({}, said))


def _of_drafts(_: argparse.Namespace, settings: Sequence[str]) -> Plan:
    """The default policy with each draft at hand."""
    given = _given(settings, *MODELS, "stages", "stage_ms", "hop_ms")
    suffix = Accuracy.parse(list(SUFFIX_RANGE[len(SUFFIX_RANGE) // 2]), SUFFIX_SPREAD)
    layouts, found = plan_drafts.compared(given, (suffix, ROUND_MS))
    said = [each.in_words() for each in found]
    said.append(
        "Rounds are timed on this machine, and so are stages without stage_ms, as many machines "
        "like it. A share that is assumed is that of a close pair, less where the vocabularies "
        "differ; `pipespec bench --profile` measures it. Draft heads (EAGLE-3, MTP layers) are not "
        "ranked; docs/drafts.md says where one pays, how it is measured, and how to make a draft."
    )
    method = DecodingMethod("best_first", default_policy("best_first"), "auto")
    about = {"drafts": [asdict(each) for each in found]}
    return Plan(layouts, [method], suffix, about=about, more=lambda *_: ({}, said))


def _on_gpus(
    arguments: argparse.Namespace, settings: Sequence[str], *, names_drafts: bool = True
) -> Plan:
    """The default policy on each number of GPUs, with which the layers of a model would fit.
    `names_drafts`: without a draft, name those that would fit."""
    given = _given(settings, *MODELS, "proposer", *ACCURACY)
    suffix = given.get("proposer") == ["suffix"]
    if suffix and "model.draft" in given:
        raise ConfigError("proposer=suffix uses no draft model; leave model.draft out.")
    if "spread" in given and "curve" not in given:
        raise ConfigError("spread says how a stated accuracy varies; give curve too.")
    gpus, (weights, draft_weights, context) = parse_gpus(arguments.gpus), _sizes(arguments)
    if "model.target" not in given:
        raise ConfigError(
            "`pipespec plan --gpus` needs model.target, a folder or a hub id; --models lists those "
            "that fit."
        )
    link = None
    if arguments.link:
        (link,) = compose_sections(["emulate_link"], [f"emulate_link={arguments.link}"])
    shape, draft = (find(given[name][0]) if name in given else None for name in MODELS)
    assert shape is not None
    drafts = suffix or draft is not None
    name = "best_first" if drafts else "root"
    policy = default_policy(name)
    methods = [DecodingMethod(name, policy, n) for n in (ROUNDS_ON_GPUS if drafts else (1,))]
    accuracies: Sequence[Accuracy] = RANGE
    if suffix or "curve" in given:
        curves = [given["curve"]] if "curve" in given else SUFFIX_RANGE
        spread = given.get("spread", SUFFIX_SPREAD if suffix else USUAL.spread)
        accuracies = [Accuracy.parse(list(curve), spread) for curve in curves]
    usual = accuracies[len(accuracies) // 2]
    nodes = BATCHES * len(gpus) * policy.max_rows
    target = PlannedModel(shape, weights, context, nodes)
    own = None if draft is None else replace(target, shape=draft, weights=draft_weights)
    clusters = gpu_layouts.clusters(target, own, gpus, link, suffix * ROUND_MS)
    if drafts:
        clusters = gpu_layouts.promising(clusters, usual.hit_rate(PROPOSED))
    by_label = {each.label: each for each in clusters}

    def more(label: str, rounds: Rounds) -> tuple[Mapping[str, Any], Sequence[str]]:
        cluster = by_label[label]
        plain_ms = cluster.machine.plain_tbt_ms
        said, by_accuracy = [*cluster.sentences(own, gpus)], []
        for model in filter(None, (target, own)):
            if why := model.shape.undecoded:
                said.insert(0, f"pipespec does not decode {model.shape.name}: {why}.")
        method = DecodingMethod(name, policy, rounds)
        for each in accuracies if drafts else ():
            ms = predict(method, cluster.machine, each, num_tokens=arguments.tokens).tbt_ms
            by_accuracy.append({"top1": each.hit_rate(1), "tbt_ms": ms})
            said.append(
                f"With proposals whose first choice is right for {each.hit_rate(1):.0%}: {ms:.0f} "
                f"ms, {plain_ms / ms:.1f} times as fast as plain pipeline parallelism."
            )
        if names_drafts and not drafts:
            fitting = gpu_layouts.draft_that_fits(target, gpus)
            small = f"model.draft={fitting} or " if fitting else ""
            said.append(f"Draft tokens may help: give {small}proposer=suffix, which needs no GPU.")
        said.append(
            "Times are assumed from the GPUs' data sheets, and so is the accuracy of proposals "
            "unless curve states it; `pipespec plan HOSTS.yaml` measures."
        )
        return {**cluster.described(gpus), "by_accuracy": by_accuracy}, said

    layouts = [each.layout(("proposer=suffix",) * suffix) for each in clusters]
    only_target = [text for text in settings if text.startswith("model.target=")]
    undrafted = partial(_on_gpus, arguments, only_target, names_drafts=False) if drafts else None
    return Plan(layouts, methods, usual, EQUAL, {"target": asdict(shape)}, more, undrafted)


def _sizes(arguments: argparse.Namespace) -> tuple[str, str, int]:
    """The weights of target and draft, "" as they are stored, and the context."""
    context = CONTEXT if arguments.context is None else arguments.context
    check_whole("context", context, 1, MAX_COUNT)
    target, draft = arguments.weights or "", arguments.draft_weights or ""
    for option, given in (("--weights", target), ("--draft-weights", draft)):
        if given and given not in WEIGHTS:
            raise ConfigError(f"{option} is {given!r}, but {suggest(given, list(WEIGHTS))}.")
    return target, draft, context


def _list_models(arguments: argparse.Namespace) -> int:
    """The models of the table, with GiB of their weights and of the context."""
    weights, _, context = _sizes(arguments)
    shapes, gpus = list(published().values()), parse_gpus(arguments.gpus or ())
    if gpus:
        shapes = [
            e for e in shapes if gpu_layouts.fits(PlannedModel(e, weights, context), None, gpus)
        ]
    if arguments.json:
        write(json.dumps([asdict(each) for each in shapes]) + "\n")
        return 0
    table = table_of("", "model", "billions", "layers", "bits", "GiB", "KV, GiB", left=1)
    for each in shapes:
        sizes = (8 * each.layer_bytes(weights) / each.layer, each.num_bytes(weights) / GIB)
        figures = (*sizes, each.num_layers * each.kv_bytes(context) / GIB)
        name, count = f"{each.name}{' *' * bool(each.undecoded)}", f"{each.parameters / 1e9:.1f}"
        table.add_row(name, count, str(each.num_layers), *(f"{each:.1f}" for each in figures))
    notes = [f"* {each.name}: {each.undecoded}." for each in shapes if each.undecoded]
    show(
        table,
        f"Weights are as published unless --weights is given; KV: {context} tokens.",
        *["* pipespec does not decode:"] * bool(notes),
        *notes,
    )
    return 0


def _advice(
    predictions: Sequence[Prediction], advised: Prediction | None, layout: PlannedLayout
) -> list[str]:
    plain_ms = layout.machine.plain_tbt_ms
    several = len({round(each.speedup * each.tbt_ms, 3) for each in predictions}) > 1
    where = " in the same layout, in the recommended one" if several else ", which takes"
    plain = f"plain pipeline parallelism (policy=root){where} {plain_ms:.1f} ms"
    said = [f"TBT is the time between tokens in ms; gain is the speed-up over {plain}."]
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
    said.append(f"It would decode a token in {advised.tbt_ms:.1f} ms, {gain}.")
    stages = layout.machine.num_stages
    if advised.in_flight not in (1, stages):
        said.append(
            f"Links are long: the head keeps {advised.in_flight} batches in flight before {stages} "
            f"stage{'s' * (stages > 1)}, one every {advised.step_ms:.1f} ms."
        )
    elif advised.in_flight < stages:
        said.append(
            "Links are long: the head has one batch at a time in flight, of a whole tree, every "
            f"{advised.step_ms:.1f} ms."
        )
    return said
