"""What the emulated benchmarks share: methods, options, settings for a stored result.

Ranks are real processes; a pace holds each stage and each draft round to a stated time, so that
two cores can show what the runtime does on a machine per rank. All times are EMULATED.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from benchmarks.report import ROOT
from pipespec.client.bench import BenchResult, RequestResult, bench, record_truth
from pipespec.client.dataset import Sample, load
from pipespec.config.compose import compose
from pipespec.config.schema import Config

METHODS = ("root", "static_tree", "level", "best_first")
DATA = Path(__file__).parent / "data"


def numbers(text: str) -> list[int]:
    """An option such as 1,2,4."""
    return [int(part) for part in text.split(",")]


def names(text: str) -> list[str]:
    return text.split(",")


def add_output(parser: argparse.ArgumentParser) -> None:
    """Options that every figure has."""
    parser.add_argument("--quick", action="store_true", help="a small run that shows the shape")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    parser.add_argument("--plot", type=Path, help="draw it: this path with .png and .svg")


def add_cluster(parser: argparse.ArgumentParser, *, pace: str, stages: int = 8) -> None:
    """Options that say what is emulated."""
    parser.add_argument("--stages", type=int, default=stages, help=f"({stages})")
    parser.add_argument("--pace", default=pace, help=f"a file of conf/pace/ ({pace})")
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
    if options.draft_ms is not None:
        settings.append(f"pace.draft_ms={options.draft_ms:g}")
    return settings


def add_draft(parser: argparse.ArgumentParser) -> None:
    """Options that say who guesses."""
    parser.add_argument(
        "--source", choices=("demo", "synthetic"), default="demo", help="who guesses (demo)"
    )
    parser.add_argument("--curve", default="1:0.74,8:0.99", help="of the synthetic draft")
    parser.add_argument("--spread", type=float, default=0.8, help="of its confidence (0.8)")
    parser.add_argument("--rounds", default="auto", help="draft rounds per step: auto or n (auto)")


def draft(options: argparse.Namespace, truth: Path | None) -> list[str]:
    """The overrides of `add_draft`'s options; a synthetic draft needs the recorded `truth`."""
    if options.source == "demo":
        return ["source=draft_model", f"source.rounds={options.rounds}"]
    assert truth is not None
    return [
        "source=synthetic",
        f"source.truth={truth}",
        f"source.curve=[{options.curve}]",
        f"source.spread={options.spread}",
        f"source.rounds={options.rounds}",
    ]


def method(name: str, width: int, children: int) -> list[str]:
    """The overrides of a decoding method; `root` and `static_tree` have sizes of their own."""
    sized = name not in ("root", "static_tree")
    size = [f"feed.width={width}", f"feed.children={children}"] if sized else []
    return [f"feed={name}", *size]


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


def answer(options: argparse.Namespace) -> list[str]:
    """The overrides of `add_prompts`' options: equally long answers, whatever they say."""
    return [f"decode.max_new_tokens={options.tokens}", "decode.ignore_eos=true"]


def short(benchmark: str) -> str:
    """A data set's name without what stands in brackets."""
    return benchmark.partition(" (")[0]


def tags(options: argparse.Namespace) -> str:
    """What a title must say about how its times came about."""
    words = []
    if options.pace != "none" or options.link != "none":
        given = [name for name in (options.pace, options.link) if name != "none"]
        given += [f"{options.scale:g} times slower"] if options.scale != 1 else []
        given += [options.sync] if options.sync != "lockstep" else []
        words.append(f"EMULATED ({', '.join(given)})")
    if getattr(options, "source", "demo") == "synthetic":
        words.append(f"SYNTHETIC draft ({options.curve})")
    return ", ".join(words) or "Measured"


@dataclass(frozen=True)
class Ran:
    """One cluster's work, and the settings that repeat it."""

    result: BenchResult
    given: list[str]
    settings: dict[str, Any]

    @property
    def requests(self) -> list[RequestResult]:
        return self.result.requests

    def differing(self, other: Ran) -> int:
        """How many requests of this run have other tokens than the same ones of `other`, as far
        as both go."""
        theirs = {request.id: request.token_ids for request in other.requests}
        return sum(
            any(a != b for a, b in zip(request.token_ids, theirs[request.id], strict=False))
            for request in self.requests
        )


def run(
    name: str,
    given: Sequence[str],
    prompts: Sequence[Sample],
    *,
    prompt_tokens: int | None = None,
    temporary: Sequence[Path] = (),
) -> Ran:
    """Decode the prompts on a cluster of their own, behind a bar called `name`."""
    config = compose(given)
    with Progress(transient=True) as shown:
        task = shown.add_task(name)
        result = bench(
            config,
            prompts,
            prompt_tokens=prompt_tokens,
            on_done=lambda done, of: shown.update(task, completed=done, total=of),
        )
    return Ran(result, overrides(given, *temporary), settings(config, *temporary))


def record(options: argparse.Namespace, folder: Path, prompts: Sequence[Sample]) -> Path | None:
    """What the target says after the prompts, if the draft of `add_draft` must know it."""
    if options.source == "demo":
        return None
    file = folder / "truth.jsonl"
    record_truth(prompts, file, *answer(options), prompt_tokens=options.prompt_tokens)
    return file


def tbt_ms(request: RequestResult) -> float:
    """Mean milliseconds between the tokens of a request."""
    return (request.token_ms[-1] - request.token_ms[0]) / (len(request.token_ms) - 1)


def per_request(label: Mapping[str, Any], ran: Ran) -> list[dict[str, Any]]:
    """What is stored of every request, `label` first."""
    return [
        {
            **label,
            "id": request.id,
            "benchmark": request.benchmark,
            "prompt_tokens": len(request.prompt_ids),
            "tokens": len(request.token_ids),
            "ttft_ms": request.ttft_ms,
            "tbt_ms": tbt_ms(request),
            "hit_rate": request.stats["hit_rate"],
            "tokens_per_step": request.stats["tokens_per_step"],
            "step_ms": request.stats["step_ms"],
            "overruns": request.stats["overruns"],
        }
        for request in ran.requests
    ]


def settings(config: Config, *temporary: Path) -> dict[str, Any]:
    """A composed configuration as JSON, with the class of each part.

    Paths are written relative to the repository, or to the `temporary` folders of a run.
    """
    plain = _plain(config, (ROOT, *temporary))
    assert isinstance(plain, dict)
    return plain


def overrides(given: Sequence[str], *temporary: Path) -> list[str]:
    """Overrides as they are stored: without the names of folders that nobody else has."""
    return [_relative(text, (ROOT, *temporary)) for text in given]


def _plain(value: Any, folders: Sequence[Path]) -> Any:
    if is_dataclass(value):
        named = {field.name: _plain(getattr(value, field.name), folders) for field in fields(value)}
        return {"class": type(value).__name__, **named}
    if isinstance(value, Mapping):
        return {str(key): _plain(item, folders) for key, item in value.items()}
    if isinstance(value, str):
        return _relative(value, folders)
    # Among them OmegaConf's lists, which a policy's settings may be.
    if isinstance(value, Sequence):
        return [_plain(item, folders) for item in value]
    return value


def _relative(text: str, folders: Sequence[Path]) -> str:
    for folder in folders:
        text = text.replace(f"{folder}/", "")
    return text
