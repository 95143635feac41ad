"""Options that several benchmarks share, and the overrides that they stand for.

They state four things: the machine that is emulated, the proposer, the method, and the prompts.
Ranks are real processes; each stage and each draft round is held to a stated time, so that two
cores can show how the runtime behaves with a machine per rank. All such times are emulated.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.common.experiment import ROOT, names
from benchmarks.common.reference_texts import record_reference
from pipespec.config.compose import policy_class
from pipespec.engine.checkpoint.tokenizer import BackendTokenizer
from pipespec.extras.bench.dataset import Sample, load
from pipespec.extras.emulation.synthetic_proposer import USUAL, USUAL_CURVE
from pipespec.system.folders import resource_dir
from tools import inflate

METHODS = ("root", "static_tree", "level", "two_levels", "best_first")
CURVE = ",".join(USUAL_CURVE)
# Of those tried in `pipeline.deployments`, the best of a pipeline of eight.
SHAPE = [1] * 8
DATA = ROOT / "benchmarks" / "data"
DEMO = resource_dir("demo")
TARGET, DRAFT = DEMO / "target", DEMO / "draft"
PARALLEL = f"model.draft={DEMO / 'draft_pard'}"
# Proposers for the demo target, and their overrides.
PROPOSERS = {
    "demo": ("proposer=draft_model",),
    "parallel": ("proposer=draft_model", PARALLEL),
    "suffix": ("proposer=suffix",),
    "hybrid": ("proposer=hybrid",),
    "parallel_hybrid": ("proposer=hybrid", PARALLEL),
}
SYNTHETIC = "synthetic"


# --- the machine --------------------------------------------------------------------------------


def add_cluster(parser: argparse.ArgumentParser, *, machine: str, stages: int = 8) -> None:
    """Options of the cluster and of the machine that is emulated."""
    parser.add_argument("--stages", type=int, default=stages, help=f"({stages})")
    parser.add_argument("--machine", default=machine, help=f"of conf/emulate/ ({machine})")
    parser.add_argument("--stage-ms", help='of one stage by its rows, as in "1:20 64:60"')
    parser.add_argument("--draft-ms", type=float, help="a draft round (as the machine says)")
    parser.add_argument("--scale", type=float, default=1.0, help="emulate so much slower (1)")
    parser.add_argument("--link", default="none", help="a file of conf/emulate_link/ (none)")


def cluster(options: argparse.Namespace) -> list[str]:
    """The overrides of `add_cluster`'s options."""
    settings = [
        f"cluster.stages={options.stages}",
        "cluster.devices=[cpu]",
        f"emulate={options.machine}",
        f"emulate_link={options.link}",
    ]
    if options.machine != "none":
        settings.append(f"emulate.scale={options.scale:g}")
    if options.stage_ms is not None:
        settings.append(f'emulate.stage_ms=["{options.stage_ms}"]')
    if options.draft_ms is not None:
        settings.append(f"emulate.draft_ms={options.draft_ms:g}")
    return settings


def target(stages: int, folder: Path) -> list[str]:
    """The overrides that name a model with a layer for every stage: the demo target, or one in
    `folder` with further layers that change nothing (`tools.inflate`)."""
    shape = inflate.Shape.of(inflate.read_config(TARGET))
    if stages <= shape.layers:
        return []
    larger = folder / f"target_{stages}"
    if not larger.exists():
        new = shape.grow(shape.hidden, stages, shape.intermediate)
        inflate.write(TARGET, larger, new, torch.float32)
    return ["model=demo", f"model.target={larger}"]


# --- the proposer -------------------------------------------------------------------------------


def add_draft(parser: argparse.ArgumentParser) -> None:
    """Options of the proposer."""
    parser.add_argument(
        "--proposer",
        choices=(*PROPOSERS, SYNTHETIC),
        default="demo",
        help="(demo)",
    )
    parser.add_argument("--curve", default=CURVE, help="of the synthetic draft")
    parser.add_argument(
        "--spread", type=float, default=USUAL.spread, help=f"of its confidence ({USUAL.spread})"
    )
    parser.add_argument("--rounds", default="auto", help="draft rounds per step: auto or n (auto)")


def draft(options: argparse.Namespace, truth: Path | None) -> list[str]:
    """The overrides of `add_draft`'s options; a synthetic draft needs the reference `truth`."""
    if is_synthetic(options):
        assert truth is not None
        proposer = synthetic(truth, options.curve, options.spread)
    else:
        proposer = [*PROPOSERS[options.proposer]]
    return [*proposer, f"proposer.rounds={options.rounds}"]


def is_synthetic(options: argparse.Namespace) -> bool:
    """Whether draft tokens are made from the answer."""
    return bool(options.proposer == SYNTHETIC)


def synthetic(truth: Path, curve: str, spread: float) -> list[str]:
    """The overrides of a draft that makes its tokens from the answers in `truth`, with the accuracy
    of `curve`."""
    return [
        f"proposer={SYNTHETIC}",
        f"proposer.truth={truth}",
        f"proposer.curve=[{curve}]",
        f"proposer.spread={spread}",
    ]


def record(options: argparse.Namespace, folder: Path, prompts: Sequence[Sample]) -> Path | None:
    """Record the target's answers in a file, if the draft of `add_draft` needs them."""
    if not is_synthetic(options):
        return None
    file = folder / "truth.jsonl"
    record_reference(prompts, file, *answer(options.tokens), prompt_tokens=options.prompt_tokens)
    return file


# --- the method ---------------------------------------------------------------------------------


def add_size(parser: argparse.ArgumentParser, *, width: int = 64) -> None:
    """Options of the tree's size."""
    parser.add_argument("--width", type=int, default=width, help=f"({width})")
    parser.add_argument("--children", type=int, default=16, help="(16)")


def add_methods(parser: argparse.ArgumentParser) -> None:
    """Options of the methods that are compared, root first."""
    parser.add_argument("--methods", type=_methods, default=METHODS, help=f"({','.join(METHODS)})")
    add_size(parser)


def _methods(text: str) -> list[str]:
    methods = names(text)
    if methods[0] != "root":
        raise argparse.ArgumentTypeError("must begin with root, with which others are compared.")
    if unknown := {*methods} - {*METHODS}:
        known = ", ".join(METHODS)
        raise argparse.ArgumentTypeError(f"has {', '.join(sorted(unknown))}; choose of {known}.")
    return methods


def method(name: str, options: argparse.Namespace) -> list[str]:
    """The overrides of a decoding method, in the size of `add_size`'s options; `root` and
    `static_tree` have sizes of their own. `two_levels` is `level` with two a step, each of half
    the width."""
    if name == "static_tree":
        return [f"policy={name}", f"policy.shape={SHAPE}"]
    if name == "two_levels":
        halved = [f"policy.width={options.width // 2}", f"policy.children={options.children}"]
        return ["policy=level", "policy.levels=2", *halved]
    if policy_class(name).has_fixed_size:
        return [f"policy={name}"]
    return [
        f"policy={name}",
        f"policy.width={options.width}",
        f"policy.children={options.children}",
    ]


# With a row's cost as measured, counts of best_first would depend on the machine's speed.
STATED_COST = "policy.row_cost=0.0001"


def counted_method(name: str, options: argparse.Namespace) -> list[str]:
    """The same for a benchmark that counts."""
    return [*method(name, options), *([STATED_COST] if name == "best_first" else [])]


# --- the prompts --------------------------------------------------------------------------------


def add_prompts(
    parser: argparse.ArgumentParser, *, prompts: int, tokens: int, prompt_tokens: int = 96
) -> None:
    """Options of prompts and answers."""
    parser.add_argument("--dataset", type=Path, default=DATA, help="file or folder (the shipped)")
    parser.add_argument("--num-prompts", type=int, default=prompts, help=f"of all ({prompts})")
    parser.add_argument("--tokens", type=int, default=tokens, help=f"for each ({tokens})")
    parser.add_argument(
        "--prompt-tokens", type=int, default=prompt_tokens, help=f"cut to ({prompt_tokens})"
    )


def samples(options: argparse.Namespace) -> list[Sample]:
    """The prompts of `add_prompts`' options, evenly from all data sets."""
    return load(options.dataset, options.num_prompts)


def as_chat(sample: Sample, encoder: BackendTokenizer) -> Sample:
    """The prompt as a user's message in the template of a model."""
    text = encoder.apply_chat_template(
        [{"role": "user", "content": sample.prompt}],
        chat_template=encoder.chat_template,
        add_generation_prompt=True,
        tokenize=False,
    )
    return replace(sample, prompt=text)


def answer(tokens: int) -> list[str]:
    """The overrides of answers of `tokens` tokens, which no end of text ends."""
    return [f"decode.max_new_tokens={tokens}", "decode.ignore_eos=true"]


# --- titles -------------------------------------------------------------------------------------


def tags(options: argparse.Namespace) -> str:
    """What a title must say about the origin of its times.

    A benchmark without `add_cluster`'s options emulates a machine of its own.
    """
    words = []
    if not hasattr(options, "machine"):
        words.append("emulated")
    elif options.machine != "none" or options.link != "none":
        given = [name for name in (options.machine, options.link) if name != "none"]
        given += [f"{options.scale:g} times slower"] if options.scale != 1 else []
        words.append(f"emulated ({', '.join(given)})")
    if is_synthetic(options):
        words.append(f"synthetic draft ({options.curve})")
    elif options.proposer != "demo":
        words.append(f"proposer {options.proposer}")
    return ", ".join(words) or "Measured"


def short(benchmark: str) -> str:
    """A data set's name without the part in brackets."""
    return benchmark.partition(" (")[0]
