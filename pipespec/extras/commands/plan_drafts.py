"""`pipespec plan --drafts`: which models at hand can draft for a target, and what to expect of
each, by the times of this machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from pipespec.console.terminal import progress, show, table_of, write
from pipespec.errors import ConfigError, ModelError
from pipespec.system.validation import Unreadable, from_fields, read_json, typed

if TYPE_CHECKING:
    from rich.table import Table

    from pipespec.engine.inspection.inspection import CheckpointInfo
    from pipespec.extras.emulation.synthetic_proposer import Accuracy
    from pipespec.extras.plan.pipeline_times import Machine

STAGES = 4
# Rows for which the target is timed, and nodes of a draft round; tokens of text behind which.
ROWS, LENGTH, CHILDREN = (1, 16), 512, 16
# A model at hand is tried if it has at most such a share of the target's bytes.
SMALLER = 0.5


@dataclass(frozen=True)
class DistilledAccuracy:
    """`plan` in the `accuracy.json` of a draft that tools/distill_draft.py has made: on answers of
    `target` that it has not learnt from, its `curve` and that of the suffix proposer."""

    target: str
    curve: Sequence[str]
    suffix: Sequence[str]


@dataclass(frozen=True)
class Draft:
    """What may draft, by its `setting`. `shared`: how much of its vocabulary is the target's, None:
    it has none; `measured`: whether `top1` was; `why`: it cannot draft."""

    setting: str
    shared: float | None = None
    num_bytes: int = 0
    round_ms: float = 0.0
    top1: float = 0.0
    measured: bool = False
    tbt_ms: float = 0.0
    speedup: float = 0.0
    why: str = ""


def run(arguments: argparse.Namespace, given: Mapping[str, Any]) -> int:
    from pipespec.client.model_info import full_name
    from pipespec.engine.inspection.inspection import inspect
    from pipespec.extras.emulation.machine import TimeCurve
    from pipespec.extras.plan.pipeline_times import Machine

    if "model.target" not in given:
        raise ConfigError("`pipespec plan --drafts` needs model.target, a folder or a hub id.")
    (name,), stages = given["model.target"], given.get("stages", STAGES)
    target = inspect(name)
    models = given.get("model.draft") or [*at_hand(target)]
    times = given.get("stage_ms") or [
        f"{rows}:{stage_ms(target, rows) / stages:.4g}" for rows in ROWS
    ]
    hop = TimeCurve.parse(given.get("hop_ms", 0.0), "hop_ms")
    machine = Machine((TimeCurve.parse(times),) * stages, hop)
    suffix = None
    found: list[Draft] = []
    with progress("measuring") as (on_done,):
        for done, model in enumerate(models, 1):
            try:
                draft, accuracy, of_suffix = examined(model, target, full_name(name))
                found.append(expected(draft, accuracy, machine, arguments.tokens))
                suffix = suffix or of_suffix
            except ModelError as error:  # a head for another model too
                found.append(Draft(f"model.draft={model}", why=str(error)))
            on_done(done, len(models))
    draft, accuracy = of_suffixes(suffix)
    found.append(expected(draft, accuracy, machine, arguments.tokens))
    found.sort(key=lambda each: (each.why != "", each.tbt_ms))
    if arguments.json:
        answer = {"plain_tbt_ms": machine.plain_tbt_ms, "drafts": [asdict(each) for each in found]}
        write(json.dumps(answer) + "\n")
        return 0
    show(table(found), *sentences(found, machine, measured="stage_ms" not in given))
    return 0


def at_hand(target: CheckpointInfo) -> Iterator[str]:
    """Checkpoints beside the target's, and in the cache of the hub, that are so much smaller."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    from pipespec.engine.formats.gguf import is_gguf
    from pipespec.engine.inspection.inspection import inspect

    beside = sorted(target.path.parent.iterdir())
    names = [str(each) for each in beside if is_gguf(each) or (each / "config.json").is_file()]
    with suppress(CacheNotFound):
        repositories = scan_cache_dir().repos
        names += sorted(each.repo_id for each in repositories if each.repo_type == "model")
    for name in names:
        with suppress(ModelError):  # nobody has named it
            if size_of(inspect(name)) <= SMALLER * size_of(target):
                yield name


def size_of(info: CheckpointInfo) -> int:
    """Bytes of all weights in 16 bits."""
    return info.loaded("bfloat16", None).total


def examined(
    model: str, target: CheckpointInfo, target_name: str
) -> tuple[Draft, Accuracy, Accuracy | None]:
    """A model as a draft, its accuracy, and if that was measured that of the suffix proposer on the
    same text. Raises ModelError."""
    from pipespec.engine.inspection.inspection import inspect
    from pipespec.extras.emulation.synthetic_proposer import USUAL, Accuracy
    from pipespec.head.proposers.token_map import token_map

    info = inspect(model)
    tokens = token_map(target, info)
    shared = 1.0 if tokens is None else tokens.share
    figures = timed(target, info, ROWS[-1])
    if figures is None:
        raise ModelError(f"this machine has no room for {info.path}")
    draft = Draft(f"model.draft={model}", shared, size_of(info), figures["round_ms"])
    with suppress(Unreadable):
        of = typed("it", read_json(info.path / "accuracy.json"), Mapping[str, Any])
        kept = from_fields(DistilledAccuracy, of.get("plan"))
        if kept.target == target_name:
            curves = kept.curve, kept.suffix
            own, of_suffix = (Accuracy.parse(list(each), USUAL.spread) for each in curves)
            return replace(draft, measured=True), own, of_suffix
    curve = {rank: shared * hit for rank, hit in USUAL.curve.items()}
    return draft, Accuracy(curve, USUAL.spread), None


def of_suffixes(measured: Accuracy | None) -> tuple[Draft, Accuracy]:
    """The suffix proposer, and its accuracy: assumed unless it was measured."""
    from pipespec.extras.commands.plan import SUFFIX_RANGE, SUFFIX_SPREAD
    from pipespec.extras.emulation.synthetic_proposer import Accuracy
    from pipespec.extras.plan.gpu_layouts import ROUND_MS

    accuracy = measured or Accuracy.parse(list(SUFFIX_RANGE[1]), SUFFIX_SPREAD)
    draft = Draft("proposer=suffix", round_ms=ROUND_MS, measured=measured is not None)
    return draft, accuracy


def expected(draft: Draft, accuracy: Accuracy, machine: Machine, num_tokens: int) -> Draft:
    """With what the default policy would do."""
    from pipespec.config.compose import default_policy
    from pipespec.extras.plan.advice import DecodingMethod, predict

    method = DecodingMethod("best_first", default_policy("best_first"), "auto")
    with_draft = replace(machine, draft_ms=draft.round_ms)
    of = predict(method, with_draft, accuracy, num_tokens=num_tokens)
    return replace(draft, top1=accuracy.hit_rate(1), tbt_ms=of.tbt_ms, speedup=of.speedup)


def stage_ms(target: CheckpointInfo, rows: int) -> float:
    """The whole target's time for so many rows here, from some of its layers."""
    found = timed(target, None, rows)
    assert found is not None
    layers: float = found["layer_ms"] * target.num_layers
    return layers + found["embedding_ms"] + found["head_ms"]


def timed(
    target: CheckpointInfo, draft: CheckpointInfo | None, rows: int
) -> Mapping[str, Any] | None:
    """What `measure_devices` finds of the target, or of a draft: None, if there is no room."""
    from pipespec.cluster.diagnostics.measure_devices import measure
    from pipespec.cluster.diagnostics.measure_hosts import MeasureRequest
    from pipespec.engine.precision import automatic
    from pipespec.system.devices import num_cuda

    devices, role = ("cuda:0" if num_cuda() else "cpu",), "stage" if draft is None else "draft"
    models = str(target.path), None if draft is None else str(draft.path)
    how = devices, ((role,),), rows, LENGTH, CHILDREN, automatic(devices)
    request = MeasureRequest(*models, *how)
    found: Mapping[str, Any] | None = measure(request)["devices"][0][role]
    return found


def table(found: Sequence[Draft]) -> Table:
    headings = ("its tokens", "GiB", "round ms", "right at once", "TBT", "gain")
    out = table_of("", "draft", *headings, left=1)
    for each in found:
        if not each.why:
            shared = "-" if each.shared is None else f"{each.shared:.0%}"
            top1 = f"{each.top1:.0%}{'' if each.measured else ' *'}"
            figures = (f"{each.num_bytes / 2**30:.2f}", f"{each.round_ms:.1f}", top1)
            out.add_row(each.setting, shared, *figures, f"{each.tbt_ms:.1f}", f"{each.speedup:.2f}")
    return out


def sentences(found: Sequence[Draft], machine: Machine, *, measured: bool) -> Iterator[str]:
    like = "machines like this one" if measured else "stages of the given times"
    yield (
        f"TBT is the time between tokens in ms on {machine.num_stages} {like}, gain the speed-up "
        f"over a plain pipeline, which takes {machine.plain_tbt_ms:.1f} ms; drafts are timed here."
    )
    if not all(each.measured for each in found if not each.why):
        yield (
            "* assumed: what a close pair had, of another vocabulary the share that is common, and "
            "of suffixes a text of which some repeats; `pipespec bench --profile` measures."
        )
    for each in found:
        if each.why:
            yield f"{each.setting}: {each.why}."
    if found[0].speedup > 1:
        yield f"Recommended: {found[0].setting}"
    if not any(each.shared == 1 for each in found):
        yield "No model at hand has the target's vocabulary; docs/drafts.md says how to distil one."
