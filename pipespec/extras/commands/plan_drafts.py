"""`pipespec plan --drafts`: which models at hand can draft for a target, timed on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import CacheNotFound, scan_cache_dir

from pipespec.client.model_info import full_name
from pipespec.cluster.diagnostics.measure_hosts import MeasureRequest
from pipespec.console.terminal import progress
from pipespec.engine.checkpoint.model_path import known_model
from pipespec.engine.checkpoint.parts.folder import entries, is_checkpoint
from pipespec.engine.inspection.inspection import CheckpointInfo, inspect
from pipespec.engine.precision import automatic
from pipespec.errors import ConfigError, ModelError
from pipespec.extras.emulation.machine import TimeCurve
from pipespec.extras.emulation.synthetic_proposer import USUAL, Accuracy
from pipespec.extras.plan.advice import PlannedLayout
from pipespec.extras.plan.pipeline_times import Machine
from pipespec.head.proposers.token_map import token_map
from pipespec.system.devices import num_cuda
from pipespec.system.sizes import size_text
from pipespec.system.validation import Unreadable, from_fields, read_json, typed

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
    """What may draft, by its `setting`. `shared`: how much of its vocabulary is the target's;
    `measured`: whether `top1` was; `why`: it cannot draft."""

    setting: str
    shared: float = 1.0
    num_bytes: int = 0
    round_ms: float = 0.0
    top1: float = 0.0
    measured: bool = False
    why: str = ""

    def in_words(self) -> str:
        if self.why:
            return f"{self.setting}: {self.why}."
        own = f"{self.shared:.0%} of its tokens are the target's, {size_text(self.num_bytes)}, "
        figures = f"{own * bool(self.num_bytes)}{self.round_ms:.1f} ms a round"
        known = "measured" if self.measured else "assumed"
        return f"{self.setting}: {figures}, right at once for {self.top1:.0%} ({known})."


def compared(
    given: Mapping[str, Any], suffix: tuple[Accuracy, float]
) -> tuple[list[PlannedLayout], list[Draft]]:
    """A layout for each draft that can be used, and all that were looked at. `suffix`: what is
    assumed of the suffix proposer, with the time of a round. Heads are refused as drafts are."""
    if "model.target" not in given:
        raise ConfigError("`pipespec plan --drafts` needs model.target, a folder or a hub id.")
    (name,), stages = given["model.target"], given.get("stages", STAGES)
    target = inspect(name)
    models = given.get("model.draft") or [*at_hand(target)]
    times = given.get("stage_ms") or [
        f"{rows}:{target_ms(target, rows) / stages:.4g}" for rows in ROWS
    ]
    hop = TimeCurve.parse(given.get("hop_ms", 0.0), "hop_ms")
    machine = Machine((TimeCurve.parse(times),) * stages, hop)
    layouts, found = [], []

    def add(draft: Draft, accuracy: Accuracy) -> None:
        found.append(replace(draft, top1=accuracy.hit_rate(1)))
        of = replace(machine, draft_ms=draft.round_ms)
        layouts.append(PlannedLayout(draft.setting, of, 0, (draft.setting,), accuracy))

    of_suffixes, round_ms = suffix
    distilled = False
    with progress("measuring") as (on_done,):
        for done, model in enumerate(models, 1):
            draft = Draft(f"model.draft={model}")
            try:
                info = inspect(known_model(model) or model)
                shared = 1.0 if (tokens := token_map(target, info)) is None else tokens.share
                figures = timed(target, info, ROWS[-1])
            except ModelError as error:
                found.append(replace(draft, why=str(error)))
                continue
            kept = distilled_accuracy(info.path, full_name(name))
            accuracy = Accuracy({k: shared * of for k, of in USUAL.curve.items()}, USUAL.spread)
            if kept is not None:
                curves = ([*curve] for curve in (kept.curve, kept.suffix))
                accuracy, of_suffixes = (Accuracy.parse(each, USUAL.spread) for each in curves)
                distilled = True
            own = shared, held_bytes(info), figures["round_ms"]
            add(Draft(draft.setting, *own, measured=kept is not None), accuracy)
            on_done(done, len(models))
    add(Draft("proposer=suffix", round_ms=round_ms, measured=distilled), of_suffixes)
    return layouts, found


def at_hand(target: CheckpointInfo) -> Iterator[str]:
    """Checkpoints beside the target's, and those of the hub that are here, if they are so much
    smaller."""
    hub = {each.model for each in entries()}
    with suppress(CacheNotFound):
        hub |= {each.repo_id for each in scan_cache_dir().repos}
    beside = sorted(target.path.parent.iterdir())
    found = {str(each): each for each in beside if is_checkpoint(each)}
    for name, path in (found | {each: known_model(each) for each in sorted(hub)}).items():
        with suppress(ModelError):  # it is no model, or none that can draft
            if path is not None and size_of(inspect(path)) <= SMALLER * size_of(target):
                yield name


def size_of(info: CheckpointInfo) -> int:
    """Bytes of all weights in 16 bits."""
    return info.loaded("bfloat16", None).total


def held_bytes(info: CheckpointInfo) -> int:
    """Bytes of all weights as this machine would hold them."""
    dtype = info.chosen_dtype("auto", devices())
    return info.loaded(dtype, info.weight_format(None, "auto", dtype)).total


def devices() -> tuple[str]:
    return ("cuda:0" if num_cuda() else "cpu",)


def distilled_accuracy(folder: Path, target: str) -> DistilledAccuracy | None:
    """What was measured of a draft of this target; None: it was made for none or another."""
    with suppress(Unreadable):
        values = typed("it", read_json(folder / "accuracy.json"), Mapping[str, Any])
        found = from_fields(DistilledAccuracy, values.get("plan"))
        return found if found.target == target else None
    return None


def target_ms(target: CheckpointInfo, rows: int) -> float:
    """The whole target's time for so many rows here, from some of its layers."""
    found = timed(target, None, rows)
    layers: float = found["layer_ms"] * target.num_layers
    return layers + found["embedding_ms"] + found["head_ms"]


def timed(target: CheckpointInfo, draft: CheckpointInfo | None, rows: int) -> Mapping[str, Any]:
    """What `measure_devices` finds of the target, or of a draft. Raises ModelError."""
    from pipespec.cluster.diagnostics.measure_devices import measure

    role = "stage" if draft is None else "draft"
    of_draft = None if draft is None else str(draft.path)
    how: Any = devices(), ((role,),), rows, LENGTH, CHILDREN, automatic(devices())
    found: Mapping[str, Any] | None
    found = measure(MeasureRequest(str(target.path), of_draft, *how))["devices"][0][role]
    if found is None:
        raise ModelError("this machine has no room for it")
    return found
