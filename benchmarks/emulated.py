"""Options that several benchmarks share, and the overrides they stand for.

A run is said in four parts: the machine that is emulated, who guesses, how it decodes, and what.
Ranks are real processes; a pace holds each stage and each draft round to a stated time, so that
two cores can show what the runtime does on a machine per rank. All such times are EMULATED.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import inflate
from benchmarks.experiment import names
from pipespec.client.dataset import Sample, load
from pipespec.client.truth import record_truth
from pipespec.system.resources import resource_dir

METHODS = ("root", "static_tree", "level", "best_first")
CURVE = "1:0.74,32:0.99"  # SpecPipe's 1B draft; its best guess is assumed
DATA = Path(__file__).parent / "data"
DEMO = resource_dir("demo")
TARGET = DEMO / "target"
PARALLEL = f"model.draft={DEMO / 'draft_pard'}"
# Who guesses for the demo target, and the overrides that name it.
GUESSERS = {
    "demo": ("source=draft_model",),
    "parallel": ("source=draft_model", PARALLEL),
    "suffix": ("source=suffix",),
    "hybrid": ("source=hybrid",),
    "parallel_hybrid": ("source=hybrid", PARALLEL),
}
# And those whose guesses depend on how long they take, so that counts mean something in emulated
# time alone.
ALL_GUESSERS = {**GUESSERS, "cascade": ("source=cascade",)}
SYNTHETIC = "synthetic"


# --- the machine --------------------------------------------------------------------------------


def add_cluster(parser: argparse.ArgumentParser, *, pace: str, stages: int = 8) -> None:
    """Options that say what is emulated."""
    parser.add_argument("--stages", type=int, default=stages, help=f"({stages})")
    parser.add_argument("--pace", default=pace, help=f"a file of conf/pace/ ({pace})")
    parser.add_argument("--stage-ms", help='of one stage by its rows, as in "1:20 64:60"')
    parser.add_argument("--draft-ms", type=float, help="a draft round (what the pace says)")
    parser.add_argument("--scale", type=float, default=1.0, help="emulate so much slower (1)")
    parser.add_argument("--link", default="none", help="a file of conf/link/ (none)")
    parser.add_argument("--sync", default="lockstep", help="lockstep or free (lockstep)")


def cluster(options: argparse.Namespace) -> list[str]:
    """The overrides of `add_cluster`'s options."""
    settings = [
        f"cluster.stages={options.stages}",
        "cluster.devices=[cpu]",
        f"cluster.sync={options.sync}",
        f"pace={options.pace}",
        f"link={options.link}",
    ]
    if options.pace != "none":
        settings.append(f"pace.scale={options.scale:g}")
    if options.stage_ms is not None:
        settings.append(f'pace.stage_ms=["{options.stage_ms}"]')
    if options.draft_ms is not None:
        settings.append(f"pace.draft_ms={options.draft_ms:g}")
    return settings


def target(stages: int, folder: Path) -> list[str]:
    """The overrides that name a model with a layer for every stage: the demo target, or one in
    `folder` with further layers that change nothing (`benchmarks.inflate`)."""
    shape = inflate.Shape.of(inflate.read_config(TARGET))
    if stages <= shape.layers:
        return []
    larger = folder / f"target_{stages}"
    if not larger.exists():
        new = shape.grow(shape.hidden, stages, shape.intermediate)
        inflate.write(TARGET, larger, new, torch.float32)
    return [f"model.target={larger}"]


# --- who guesses --------------------------------------------------------------------------------


def add_draft(parser: argparse.ArgumentParser) -> None:
    """Options that say who guesses."""
    parser.add_argument(
        "--source",
        choices=(*ALL_GUESSERS, SYNTHETIC),
        default="demo",
        help="who guesses (demo)",
    )
    parser.add_argument("--curve", default=CURVE, help="of the synthetic draft")
    parser.add_argument("--spread", type=float, default=0.8, help="of its confidence (0.8)")
    parser.add_argument("--rounds", default="auto", help="draft rounds per step: auto or n (auto)")


def draft(options: argparse.Namespace, truth: Path | None) -> list[str]:
    """The overrides of `add_draft`'s options; a synthetic draft needs the recorded `truth`."""
    source = [*ALL_GUESSERS.get(options.source, ())]
    if is_synthetic(options):
        assert truth is not None
        source = synthetic(truth, options.curve, options.spread, options.source)
    return [*source, f"source.rounds={options.rounds}"]


def is_synthetic(options: argparse.Namespace) -> bool:
    """Whether the draft makes its guesses from the answer."""
    return options.source not in ALL_GUESSERS


def synthetic(truth: Path, curve: str, spread: float, source: str = SYNTHETIC) -> list[str]:
    """The overrides of a draft that knows the `truth` and errs as its curve says."""
    return [
        f"source={source}",
        f"source.truth={truth}",
        f"source.curve=[{curve}]",
        f"source.spread={spread}",
    ]


def record(options: argparse.Namespace, folder: Path, prompts: Sequence[Sample]) -> Path | None:
    """What the target says after the prompts, if the draft of `add_draft` must know it."""
    if not is_synthetic(options):
        return None
    file = folder / "truth.jsonl"
    record_truth(prompts, file, *answer(options.tokens), prompt_tokens=options.prompt_tokens)
    return file


# --- how it decodes -----------------------------------------------------------------------------


def add_size(parser: argparse.ArgumentParser, *, width: int = 64) -> None:
    """Options that say how much is guessed."""
    parser.add_argument("--width", type=int, default=width, help=f"({width})")
    parser.add_argument("--children", type=int, default=16, help="(16)")


def add_methods(
    parser: argparse.ArgumentParser, methods: Sequence[str] = METHODS, *, width: int = 64
) -> None:
    """Options that say which methods are compared, root first."""
    parser.add_argument("--methods", type=_methods, default=methods, help=f"({','.join(methods)})")
    add_size(parser, width=width)


def _methods(text: str) -> list[str]:
    methods = names(text)
    if methods[0] != "root":
        raise argparse.ArgumentTypeError("must begin with root, with which others are compared.")
    return methods


def method(name: str, options: argparse.Namespace) -> list[str]:
    """The overrides of a decoding method, in the size of `add_size`'s options; `root` and
    `static_tree` have sizes of their own."""
    if name in ("root", "static_tree"):
        return [f"feed={name}"]
    return [f"feed={name}", f"feed.width={options.width}", f"feed.children={options.children}"]


# --- what is decoded ----------------------------------------------------------------------------


def add_prompts(
    parser: argparse.ArgumentParser, *, prompts: int, tokens: int, prompt_tokens: int = 96
) -> None:
    """Options that say what is decoded."""
    parser.add_argument("--dataset", type=Path, default=DATA, help="file or folder (the shipped)")
    parser.add_argument("--num-prompts", type=int, default=prompts, help=f"of all ({prompts})")
    parser.add_argument("--tokens", type=int, default=tokens, help=f"for each ({tokens})")
    parser.add_argument(
        "--prompt-tokens", type=int, default=prompt_tokens, help=f"cut to ({prompt_tokens})"
    )


def samples(options: argparse.Namespace) -> list[Sample]:
    """The prompts of `add_prompts`' options, of all data sets alike."""
    return load(options.dataset, options.num_prompts)


def answer(tokens: int) -> list[str]:
    """The overrides of equally long answers, whatever they say."""
    return [f"decode.max_new_tokens={tokens}", "decode.ignore_eos=true"]


# --- titles -------------------------------------------------------------------------------------


def tags(options: argparse.Namespace) -> str:
    """What a title must say about how its times came about.

    A benchmark without `add_cluster`'s options emulates a machine of its own.
    """
    words = []
    if not hasattr(options, "pace"):
        words.append("EMULATED")
    elif options.pace != "none" or options.link != "none":
        given = [name for name in (options.pace, options.link) if name != "none"]
        given += [f"{options.scale:g} times slower"] if options.scale != 1 else []
        given += [options.sync] if options.sync != "lockstep" else []
        words.append(f"EMULATED ({', '.join(given)})")
    if is_synthetic(options):
        words.append(f"SYNTHETIC draft ({options.curve})")
    elif options.source != "demo":
        words.append(f"source {options.source}")
    return ", ".join(words) or "Measured"


def short(benchmark: str) -> str:
    """A data set's name without what stands in brackets."""
    return benchmark.partition(" (")[0]
